"""Groups whose ranks are processes: the same sums, and none that waits for one that was killed."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from services.worker.engine.native import build
from tests.support.collective_groups import in_order, mesh, tcp_pair

try:
    build.load(build.COLLECTIVE)
except build.KernelsUnavailable as error:
    pytest.skip(f"no compiled transports here: {error}", allow_module_level=True)

from services.worker.collective.native import make_memory

SCRIPT = Path(__file__).parents[1] / "support" / "collective_rank.py"
WAYS = {
    "memory one-shot": ("one-shot", None),
    "memory two-shot": ("two-shot", None),
    "unix direct": ("direct", socket.socketpair),
    "tcp direct": ("direct", tcp_pair),
    "tcp ring": ("ring", tcp_pair),
    "tcp tree": ("tree", tcp_pair),
    "unix scatter": ("scatter", socket.socketpair),
}
QUICK = ("memory one-shot", "tcp ring")
EACH = [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]


class Ranks:
    """Processes of one group, ended on exit."""

    def __init__(self, size: int, way: str, sums: int, floats: int, spin_us: float = 20.0) -> None:
        algorithm, pair = WAYS[way]
        memory = None if pair else make_memory(size)
        peers = mesh(size, pair) if pair else [{} for _ in range(size)]
        self.processes = []
        for rank in range(size):
            sockets = {peer: end.fileno() for peer, end in peers[rank].items()}
            told = {"rank": rank, "size": size, "memory": memory, "peers": sockets, "algorithm": algorithm}
            told |= {"sums": sums, "floats": floats, "spin_us": spin_us}
            inherited = [*sockets.values(), *([memory] if memory is not None else [])]
            command = [sys.executable, str(SCRIPT), json.dumps(told)]
            self.processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=inherited)
            )
        for ends in peers:
            for end in ends.values():
                end.close()
        if memory is not None:
            os.close(memory)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def lines(self, *but: int) -> list[str]:
        """The next line of each rank."""
        said = [p.stdout.readline() for r, p in enumerate(self.processes) if r not in but and p.stdout]
        return [line.rstrip("\n") for line in said]


@pytest.mark.parametrize("way", EACH)
def test_processes_compute_what_threads_do(way):
    size, floats, sums = 3, 3001, 5
    rngs = [np.random.default_rng(rank) for rank in range(size)]
    with Ranks(size, way, sums, floats) as ranks:
        assert ranks.lines() == ["running"] * size
        outcomes = ranks.lines()
    assert len(set(outcomes)) == 1
    assert outcomes[0].startswith("done ")
    if WAYS[way][0] in ("one-shot", "two-shot", "direct", "scatter"):
        digest = hashlib.sha256()
        for _ in range(sums):
            digest.update(
                in_order([rng.standard_normal(floats).astype(np.float32) for rng in rngs]).tobytes()
            )
        assert outcomes[0] == f"done {digest.hexdigest()}"


@pytest.mark.parametrize("floats", [576, pytest.param(200_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", EACH)
def test_the_others_notice_within_a_second_that_a_rank_was_killed(way, floats):
    size, victim = 3, 1
    with Ranks(size, way, 1 << 40, floats) as ranks:
        assert ranks.lines() == ["running"] * size
        time.sleep(0.05)  # so that it dies within some sum or other
        ranks.processes[victim].kill()
        killed = time.monotonic()
        outcomes = ranks.lines(victim)
        assert time.monotonic() - killed < 1
    for outcome in outcomes:
        what, _, reason = outcome.split(" ", 2)
        assert what == "lost"
        assert f"rank {victim} has ended" in reason
