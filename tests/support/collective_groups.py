"""Groups of every transport for the contract tests: whoever writes a transport adds a `Kind` here."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from services.worker.collective.port import LOOPBACK, Collective

T = TypeVar("T")
Ends = Sequence[Callable[[], Collective]]


@dataclass(frozen=True)
class Kind:
    """One transport with one algorithm for all sums."""

    name: str
    ends: Callable[[int], Ends]
    """Ranks → what opens each rank's end; each is called in its own thread."""
    sizes: tuple[int, ...] = (2, 3, 4)
    in_rank_order: bool = False
    """Sums are those of adding the parts of rank 0, 1, … one after the other."""
    exchange: bool = True
    """Native passes can use it."""


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def mesh(size: int, pair: Callable[[], tuple[Any, Any]] = socket.socketpair) -> list[dict[int, Any]]:
    """A connected socket between every two ranks, by rank and peer."""
    peers: list[dict[int, Any]] = [{} for _ in range(size)]
    for a in range(size):
        for b in range(a):
            peers[a][b], peers[b][a] = pair()
    return peers


@dataclass(frozen=True)
class Native:
    """Opens ends of `NativeCollective`s that sum by one algorithm."""

    algorithm: str
    memory: bool = False
    pair: Callable[[], tuple[Any, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, size: int) -> Ends:
        from services.worker.collective.native import MOST_FLOATS, NativeCollective, make_memory

        most = self.options.get("most_floats", MOST_FLOATS)
        fd = make_memory(size, most) if self.memory else None
        peers = mesh(size, self.pair) if self.pair else [None] * size

        def end(rank: int) -> Collective:
            collective = NativeCollective(rank, size, fd, peers[rank], **self.options)
            collective.set_table([(1 << 40, self.algorithm)])
            return collective

        return [lambda rank=rank: end(rank) for rank in range(size)]


KINDS = (
    Kind("loopback", lambda size: [lambda: LOOPBACK], (1,), in_rank_order=True, exchange=False),
    Kind("memory one-shot", Native("one-shot", memory=True), in_rank_order=True),
    Kind(
        "memory one-shot without spinning", Native("one-shot", True, None, {"spin_us": 0}), in_rank_order=True
    ),
    Kind("memory two-shot", Native("two-shot", memory=True), in_rank_order=True),
    Kind("unix direct", Native("direct", pair=socket.socketpair), in_rank_order=True),
    Kind("unix ring", Native("ring", pair=socket.socketpair), (2, 3, 5)),
    Kind("unix tree", Native("tree", pair=socket.socketpair), (2, 3, 6)),
    Kind("unix scatter", Native("scatter", pair=socket.socketpair), in_rank_order=True),
    Kind("tcp direct", Native("direct", pair=tcp_pair), in_rank_order=True),
    Kind("tcp ring", Native("ring", pair=tcp_pair), (3,)),
    Kind("tcp tree", Native("tree", pair=tcp_pair), (4,)),
    Kind("tcp scatter", Native("scatter", pair=tcp_pair), (3,), in_rank_order=True),
    Kind(
        "tcp direct in small rooms",
        Native("direct", pair=tcp_pair, options={"most_floats": 5000}),
        (3,),
        in_rank_order=True,
    ),
)


def on_ranks(ends: Ends, work: Callable[[Collective], T], timeout_s: float = 60.0) -> list[T]:
    """`work` on every rank at once, in threads; its results by rank. Raises what the first one raised."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            end = ends[rank]()
            try:
                results[rank] = work(end)
            finally:
                end.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(len(ends))]


def parts_of(rng: np.random.Generator, size: int, floats: int) -> list[np.ndarray]:
    return [rng.standard_normal(floats).astype(np.float32) for _ in range(size)]


def in_order(parts: Sequence[np.ndarray]) -> np.ndarray:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def dawdle(rng: np.random.Generator) -> None:
    """A rank that is late by up to a millisecond, every third time."""
    if rng.random() < 0.3:
        time.sleep(rng.random() / 1000)
