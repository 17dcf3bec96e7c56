"""A node that has none but ranks above 0: it starts them, and ends as soon as one of them does."""

import os
import select
import signal
import subprocess
import time

import structlog

from services.worker.group.layout import cores_here, layout_of, rank_settings, rendezvous_of
from services.worker.group.local import start_rank
from services.worker.group.machine import cpus_here
from services.worker.settings import WorkerSettings
from shared.runtime import logs, process

_GRACE_S = 3.0


def run_node(settings: WorkerSettings) -> int:
    """Until SIGTERM or SIGINT, or until a rank ends. Returns the exit status; raises `SettingsError`.

    Whoever started this process starts it again when the group is lost, and it meets node 0 anew.
    """
    logs.configure("worker", settings.instance, settings.log_level)
    log = structlog.get_logger()
    if settings.parent_pid:
        process.die_with_parent(settings.parent_pid)
    layout = layout_of(settings)
    spare = len(cores_here(settings))
    told, tell = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.write(tell, bytes([number])) and None)
    host, port = rendezvous_of(settings)
    cpus = cpus_here()
    ranks = _Ranks(told)
    for rank in layout.ranks_of(settings.node_rank):
        ranks.start(rank, rank_settings(settings, layout, rank, spare, cpus))
    log.info("ranks of this node run", ranks=sorted(ranks.each), rendezvous=f"{host}:{port}", pid=os.getpid())
    ended = ranks.until_formed_or_end()
    if ranks.formed:
        log.info("ranks of this node are in their group")
        if settings.ready_file:
            process.write_ready_file(settings.ready_file, "")
        ended = ranks.until_end()
    ranks.stop()
    if ended is None:
        log.info("stopped")
        return 0
    code = ranks.each[ended].returncode
    log.info("the group is over", rank=ended, exit_status=code)
    return 1 if code else 0


class _Ranks:
    """The rank processes of this node. `told` becomes readable when this process is to stop."""

    def __init__(self, told: int) -> None:
        self.each: dict[int, subprocess.Popen[bytes]] = {}
        self._told = told
        self._waiting = select.poll()
        self._waiting.register(told, select.POLLIN)
        self._ends: dict[int, int] = {}
        self._says: set[int] = set()
        # pidfd → rank; and what ranks write to once they are in their group

    @property
    def formed(self) -> bool:
        return not self._says

    def start(self, rank: int, own: WorkerSettings) -> None:
        says, formed = os.pipe()
        self.each[rank] = start_rank(own, ["--rank", str(rank), "--formed", str(formed)], (formed,))
        os.close(formed)
        end = os.pidfd_open(self.each[rank].pid)
        self._says.add(says)
        self._ends[end] = rank
        for fd in (says, end):
            self._waiting.register(fd, select.POLLIN)

    def until_formed_or_end(self) -> int | None:
        """Until every rank is in its group; else as `until_end`."""
        while self._says:
            ready = [fd for fd, _ in self._waiting.poll()]
            if self._told in ready:
                return None
            for fd in self._says & set(ready):
                # Closed without a word: its end follows.
                if os.read(fd, 1):
                    self._says.discard(fd)
                self._waiting.unregister(fd)
                os.close(fd)
            for end in self._ends.keys() & set(ready):
                return self._ended(end)
        return None

    def until_end(self) -> int | None:
        """The rank that ends first; None if this process is told to stop before."""
        ready = [fd for fd, _ in self._waiting.poll()]
        return None if self._told in ready else self._ended(ready[0])

    def stop(self) -> None:
        """End them all, one way or the other."""
        for each in self.each.values():
            each.terminate()
        deadline = time.monotonic() + _GRACE_S
        for each in self.each.values():
            try:
                each.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()

    def _ended(self, end: int) -> int:
        rank = self._ends[end]
        self.each[rank].wait()
        return rank
