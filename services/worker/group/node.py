"""A node that has none but ranks above 0: it starts them, and ends as soon as one of them does."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping

import structlog

from services.worker.group.layout import layout_of, rank_settings, rendezvous_of
from services.worker.group.local import start_rank
from services.worker.settings import WorkerSettings, parse_cores
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
    spare = len(parse_cores(settings.cores) or os.sched_getaffinity(0))
    told, tell = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.write(tell, bytes([number])) and None)
    host, port = rendezvous_of(settings)
    ranks = {
        rank: start_rank(rank_settings(settings, layout, rank, spare), ["--rank", str(rank)])
        for rank in layout.ranks_of(settings.node_rank)
    }
    log.info("ranks of this node run", ranks=sorted(ranks), rendezvous=f"{host}:{port}", pid=os.getpid())
    if settings.ready_file:
        process.write_ready_file(settings.ready_file, "")
    ended = _first_end(ranks, told)
    for each in ranks.values():
        each.terminate()
    deadline = time.monotonic() + _GRACE_S
    for each in ranks.values():
        try:
            each.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.kill()
            each.wait()
    if ended is None:
        log.info("stopped")
        return 0
    code = ranks[ended].returncode
    log.info("the group is over", rank=ended, exit_status=code)
    return 1 if code else 0


def _first_end(ranks: Mapping[int, "subprocess.Popen[bytes]"], told: int) -> int | None:
    """The rank that ended first; None if this process is to stop."""
    waiting = select.poll()
    waiting.register(told, select.POLLIN)
    pidfds = {os.pidfd_open(each.pid): rank for rank, each in ranks.items()}
    for pidfd in pidfds:
        waiting.register(pidfd, select.POLLIN)
    ready = [fd for fd, _ in waiting.poll()]
    first = None if told in ready else pidfds[ready[0]]
    for pidfd in pidfds:
        os.close(pidfd)
    if first is not None:
        ranks[first].wait()
    return first
