"""What a service asks of the operating system: to die with its parent, and to end when told to."""

import asyncio
import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """SIGTERM to us when `parent_pid` ends, however it ends (Linux). Exits at once if it has ended already.

    The kernel sends the signal when the parent's *thread* that started us ends: start services from a thread
    that lives as long as the launcher.
    """
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died between fork and prctl; then nobody will ever send the signal.
    if os.getppid() != parent_pid:
        raise SystemExit(f"parent_pid={parent_pid} is not our parent (any more): {os.getppid()} is")


def on_stop_signals(
    loop: asyncio.AbstractEventLoop, stop: Callable[[str], None], hard_after_s: float
) -> None:
    """First SIGTERM or SIGINT: `stop(name)`, and a thread that ends the process should it hang for
    `hard_after_s`. A second one ends it at once."""
    seen: list[str] = []

    def stop_or_exit(name: str) -> None:
        if seen:
            os._exit(130)
        seen.append(name)
        watchdog = threading.Timer(hard_after_s, os._exit, args=(124,))
        watchdog.daemon = True
        watchdog.start()
        stop(name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_or_exit, signal.Signals(number).name)


def write_ready_file(path: str, http: str) -> None:
    """{"http": "host:port", "pid": n}, visible only when complete."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_text(json.dumps({"http": http, "pid": os.getpid()}))
    partial.replace(target)
