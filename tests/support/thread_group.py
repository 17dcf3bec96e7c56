"""A tensor-parallel group whose ranks are threads of one process: the oracle of what passes exchange.

Messages are numpy arrays kept for ever-waiting readers; nothing is fast here, everything is plain.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from services.worker.collective import abi
from services.worker.collective.port import BYTES, F32, GroupLost

T = TypeVar("T")


class _Shared:
    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: dict[int, dict[int, np.ndarray]] = {}
        self.changed = threading.Condition()
        self.lost = ""


class ThreadRank:
    """`Collective` of one rank; parts are handed over unadded, in rank order."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        self._shared, self.rank, self.size = shared, rank, shared.size
        self._next, self._landing = 0, 0
        self._open: np.ndarray | None = None
        self._landed: deque[list[np.ndarray]] = deque()
        self.messages: list[int] = []
        """Floats of each message begun by a native pass."""
        self._calls = (
            abi.ROOM(lambda _, floats, kind: self._room(floats)),
            abi.BEGIN(lambda _: self._begin()),
            abi.LAND(lambda _, landed: self._land(landed)),
            abi.RELEASE(lambda _: self._landed.popleft()),
        )
        self._exchange = abi.Exchange(None, rank, shared.size, 1 << 40, *self._calls)

    def exchange(self) -> abi.Exchange:
        return self._exchange

    def all_reduce(self, values: F32) -> None:
        parts = self._swap(values.copy())
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        values[...] = total

    def gather(self, mine: BYTES) -> BYTES:
        return np.stack(self._swap(mine.copy()))

    def check(self) -> None:
        if self._shared.lost:
            raise GroupLost(self._shared.lost)

    def abort(self, reason: str) -> None:
        with self._shared.changed:
            self._shared.lost = self._shared.lost or reason
            self._shared.changed.notify_all()

    def close(self) -> None:
        pass

    def _room(self, floats: int) -> int:
        self._open = np.full(floats, np.nan, np.float32)
        return self._open.ctypes.data

    def _begin(self) -> None:
        assert self._open is not None
        self.messages.append(self._open.size)
        self._give(self._open)
        self._open = None

    def _land(self, landed: Any) -> None:
        try:
            parts = self._take()
        except GroupLost:
            landed.contents.parts = 0
            return
        self._landed.append(parts)
        landed.contents.parts = len(parts)
        for i, part in enumerate(parts):
            landed.contents.part[i] = ctypes.c_void_p(part.ctypes.data).value

    def _swap(self, mine: np.ndarray) -> list[np.ndarray]:
        self._give(mine)
        return self._take()

    def _give(self, mine: np.ndarray) -> None:
        with self._shared.changed:
            self._shared.parts.setdefault(self._next, {})[self.rank] = mine
            self._shared.changed.notify_all()
        self._next += 1

    def _take(self) -> list[np.ndarray]:
        shared, number = self._shared, self._landing
        self._landing += 1
        with shared.changed:
            shared.changed.wait_for(lambda: shared.lost or len(shared.parts[number]) == self.size, 60)
            self.check()
            parts = shared.parts[number]
            assert len({part.size for part in parts.values()}) == 1, "ranks disagree about a message"
            return [parts[rank] for rank in range(self.size)]


def on_ranks(size: int, work: Callable[[ThreadRank], T], timeout_s: float = 100.0) -> list[T]:
    """`work` on every rank at once; its results by rank. Raises what the first rank that failed raised."""
    shared = _Shared(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        end = ThreadRank(shared, rank)
        try:
            results[rank] = work(end)
        except BaseException as error:
            errors.append(error)
            end.abort(f"rank {rank}: {error}")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
