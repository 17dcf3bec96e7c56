"""Latency and bandwidth between every two ranks, measured before anything else uses their connections."""

import socket
import time
from collections.abc import Iterator, Mapping
from itertools import combinations

from services.worker.parallel.topology import Links

ROUND_TRIPS = 30
BLOCK = 1 << 18
MOST_BLOCKS = 64
ENOUGH_S = 0.1
"""Bandwidth is measured for so long or `MOST_BLOCKS`: a slow link is told by less."""

_LINE = 64
_LOCAL = 1e12
"""Bytes/s of a rank to itself: counts for nothing."""


def measure_links(
    rank: int, size: int, peers: Mapping[int, socket.socket], limit_s: float | None = None
) -> Links:
    """The matrix, the same on every rank; all ranks call it at once. Raises OSError if a rank ends.

    One pair is measured at a time, so that none shares a link with another.

    `peers`: a connected stream socket for each other rank. `limit_s`: how long to wait for one of them.
    """
    for peer in peers.values():
        peer.settimeout(limit_s)
        if peer.family != socket.AF_UNIX:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        return _measure(rank, size, peers)
    finally:
        for peer in peers.values():
            peer.settimeout(None)


def _measure(rank: int, size: int, peers: Mapping[int, socket.socket]) -> Links:
    speeds = [[_LOCAL] * size for _ in range(size)]
    latencies = [[0.0] * size for _ in range(size)]
    for a, b in combinations(range(size), 2):
        if rank == a:
            found = _ask(peers[b])
        elif rank == b:
            _answer(peers[a])
        told = _share(rank, a, size, peers, found if rank == a else "")
        latencies[a][b] = latencies[b][a] = told[0]
        speeds[a][b] = speeds[b][a] = told[1]
    return Links(tuple(map(tuple, speeds)), tuple(map(tuple, latencies)))


def _ask(peer: socket.socket) -> str:
    """`latency bandwidth` of the way to a rank that answers, in seconds and bytes/s."""
    best = float("inf")
    for _ in range(ROUND_TRIPS):
        begun = time.perf_counter()
        peer.sendall(b"p")
        _receive(peer, 1)
        best = min(best, time.perf_counter() - begun)
    block = bytes(BLOCK)
    sent, begun = 0, time.perf_counter()
    for _ in range(MOST_BLOCKS):
        peer.sendall(b"b")
        peer.sendall(block)
        sent += 1
        # What lies in the systems' buffers has not arrived yet.
        _receive(peer, 1)
        if time.perf_counter() - begun > ENOUGH_S:
            break
    took = time.perf_counter() - begun
    peer.sendall(b"e")
    return f"{best / 2} {sent * BLOCK / max(1e-9, took - sent * best)}"


def _answer(peer: socket.socket) -> None:
    while (what := _receive(peer, 1)) != b"e":
        if what == b"b":
            _receive(peer, BLOCK)
        peer.sendall(b"a")


def _share(
    rank: int, source: int, size: int, peers: Mapping[int, socket.socket], told: str
) -> tuple[float, float]:
    """What rank `source` tells all others; nobody goes on before it has."""
    if rank == source:
        for other in _others(source, size):
            peers[other].sendall(told.encode().ljust(_LINE))
    else:
        told = _receive(peers[source], _LINE).decode()
    latency, bandwidth = told.split()
    return float(latency), float(bandwidth)


def _others(rank: int, size: int) -> Iterator[int]:
    return (other for other in range(size) if other != rank)


def _receive(peer: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = peer.recv(min(count, 1 << 20))
        if not part:
            raise ConnectionResetError("a rank ended while links were measured")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
