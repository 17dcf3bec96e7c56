"""A group whose ranks are threads of one process, over the transports that processes use."""

import os
import socket
import threading
from collections.abc import Callable
from itertools import combinations
from typing import TypeVar

from services.worker.collective.native import NativeCollective, make_memory

T = TypeVar("T")


def on_native_ranks(
    size: int,
    work: Callable[[NativeCollective], T],
    most_floats: int = 1 << 22,
    memory: bool = True,
    links: bool = True,
    timeout_s: float = 500.0,
) -> list[T]:
    """`work` on every rank at once; its results by rank. Raises what the first rank that failed raised."""
    fd = make_memory(size, most_floats) if memory else None
    peers: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    if links:
        for a, b in combinations(range(size), 2):
            peers[a][b], peers[b][a] = socket.socketpair()
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        end = NativeCollective(rank, size, fd, peers[rank], most_floats, spin_us=0.0)
        try:
            results[rank] = work(end)
        except BaseException as error:
            errors.append(error)
            end.abort(f"rank {rank}: {error}")
        finally:
            end.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if fd is not None:
        os.close(fd)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
