"""Processes named by pid *and* start time, so that a recycled pid is never taken for one of ours.

Linux only: pidfds deliver exits without polling, and `/proc` tells start times.
"""

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class ProcessId:
    """One life of a process. `start` is in clock ticks since boot (field 22 of `/proc/PID/stat`)."""

    pid: int
    start: int

    @property
    def alive(self) -> bool:
        """Whether this very process still runs; a zombie does not."""
        return start_ticks(self.pid) == self.start

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to this very process. False when it is gone."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            # The pidfd pins the process, so what is checked here is what gets the signal.
            if not self.alive:
                return False
            signal.pidfd_send_signal(fd, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is gone. False when it still runs after `timeout_s`. Works for non-children too."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive:
                return True
            return bool(select.select([fd], [], [], max(0.0, timeout_s))[0])
        finally:
            os.close(fd)


def start_ticks(pid: int) -> int | None:
    """Start time of a running process; None when there is none or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in parentheses and may hold anything, blanks and parentheses included.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def identify(pid: int) -> ProcessId | None:
    start = start_ticks(pid)
    return None if start is None else ProcessId(pid, start)


def die_with_parent(parent: int) -> Callable[[], None]:
    """What a child runs between fork and exec: be killed when the process that started it dies."""

    def arrange() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)

    return arrange


def with_environment(variable: str, prefix: str) -> list[ProcessId]:
    """Processes of this user whose environment has `variable` beginning with `prefix`."""
    wanted = f"{variable}={prefix}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:  # gone, or another user's
            continue
        if any(pair.startswith(wanted) for pair in environ.split(b"\0")):
            process = identify(int(entry.name))
            if process is not None:
                found.append(process)
    return found


def end(processes: Iterable[ProcessId], grace_s: float) -> list[ProcessId]:
    """SIGTERM, up to `grace_s` for all together, then SIGKILL. Returns those that had to be killed."""
    waiting = [p for p in processes if p.signal(signal.SIGTERM)]
    deadline = time.monotonic() + grace_s
    stubborn = [p for p in waiting if not p.wait(deadline - time.monotonic())]
    for process in stubborn:
        process.signal(signal.SIGKILL)
    for process in stubborn:
        process.wait(5.0)
    return stubborn
