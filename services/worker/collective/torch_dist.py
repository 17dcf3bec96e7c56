"""`Collective` over torch.distributed's gloo: what others use, to be compared with.

Of a rank that ends, gloo tells only ranks that have something under way with it, and its `abort` frees
nobody. So whoever waits looks around every few milliseconds, and whoever finds the group lost closes its own
connections, which the next ones notice in turn (docs/decisions/2026-11-30-gloo-and-lost-ranks.md).
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from services.worker.collective import abi
from services.worker.collective.port import BYTES, F32, Collective, GroupLost

GATHER, RING = "gather", "ring"
"""Every rank gets every part and adds them in rank order; gloo's own, each piece summed on one rank."""
_TABLE = ((1 << 15, GATHER), (1 << 62, RING))
"""Before anything is measured."""
_SLICE = timedelta(milliseconds=50)
_MOST_FLOATS = 1 << 22


def open_store(address: str, rank: int, size: int, limit_s: float = 60.0) -> "dist.Store":
    """Where the ranks find each other: `file:///PATH`, fresh and on a file system all see, or
    `tcp://HOST:PORT`, where rank 0 listens. Raises ValueError."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "file" and rest.startswith("/"):
        return dist.FileStore(rest, size)
    if scheme == "tcp" and host and port.isdecimal():
        return dist.TCPStore(host, int(port), size, rank == 0, timedelta(seconds=limit_s))
    raise ValueError(f"rendezvous {address!r}: give file:///PATH or tcp://HOST:PORT")


def shared_store(collective: Collective, host: str = "127.0.0.1", limit_s: float = 60.0) -> "dist.Store":
    """A store of a group that is formed already, for what torch forms in it. All ranks call it at once.

    `host`: an address by which all of them reach rank 0, which keeps it. Raises `GroupLost`.
    """
    limit = timedelta(seconds=limit_s)
    port = np.zeros(1, np.int32)
    store: dist.Store | None = None
    if collective.rank == 0:
        store = dist.TCPStore(host, 0, None, True, limit, wait_for_workers=False)
        port[0] = store.port
    told = int(collective.gather(port.view(np.uint8))[0].view(np.int32)[0])
    return store or dist.TCPStore(host, told, None, False, limit, wait_for_workers=False)


@dataclass(frozen=True)
class _Message:
    """A sum or a gathering under way. The tensors of `parts`, added up in order, are what a sum comes to."""

    work: Any
    parts: Sequence[torch.Tensor]


class TorchDistCollective:
    """One rank's end of a group that meets in `store`. Raises `GroupLost` if not all come within `limit_s`.

    `host`: the address or name by which the other ranks reach this one; None: what the host name resolves to.
    `limit_s`: how long to wait for a rank that lives but does not come, before the group is lost.
    """

    def __init__(
        self, store: "dist.Store", rank: int, size: int, limit_s: float = 20.0, host: str | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self._lost = ""
        self._lock = threading.Lock()
        self._table: tuple[tuple[int, str], ...] = _TABLE
        self._open: tuple[torch.Tensor, int] | None = None
        self._flying: deque[_Message] = deque()
        self._calls = (
            abi.ROOM(lambda _, floats, kind: self._room(floats, kind)),
            abi.BEGIN(lambda _: self._begin()),
            abi.LAND(lambda _, landed: self._land(landed)),
            abi.RELEASE(lambda _: self._release()),
        )
        self._exchange = abi.Exchange(None, rank, size, _MOST_FLOATS, *self._calls)
        gloo: Any = dist.ProcessGroupGloo  # its options are missing in torch's stubs
        options = gloo._Options()
        options._timeout = timedelta(seconds=limit_s)
        options._devices = [
            gloo.create_default_device() if host is None else gloo.create_device(hostname=host)
        ]
        try:
            self._group: Any = gloo(store, rank, size, options)
        except RuntimeError as error:
            raise GroupLost(f"not all of {size} ranks came together: {_first_line(error)}") from None

    def exchange(self) -> abi.Exchange:
        """For native passes; valid until `close`. As slow as Python is."""
        return self._exchange

    def algorithms(self) -> tuple[str, ...]:
        """By which sums can go here."""
        return GATHER, RING

    def set_table(self, table: Sequence[tuple[int, str]]) -> None:
        """Sums of at most so many bytes go by that algorithm, ascending; longer ones by the last.

        The same on all ranks, at the same place in the order of messages. Raises ValueError.
        """
        for _, algorithm in table:
            if algorithm not in self.algorithms():
                raise ValueError(f"no sums by {algorithm!r} in this group, only by {GATHER}, {RING}")
        self._table = tuple(table)

    def time(self, algorithm: str, floats: int, repeats: int) -> tuple[float, float]:
        """(least, median) seconds of one sum of so many floats; all ranks call it."""
        before, values, taken = self._table, np.zeros(floats, np.float32), []
        self.set_table([(1 << 62, algorithm)])
        for _ in range(repeats + 1):
            begun = time.perf_counter()
            self.all_reduce(values)
            taken.append(time.perf_counter() - begun)
        self.set_table(before)
        return min(taken[1:]), float(np.median(taken[1:]))

    def all_reduce(self, values: F32) -> None:
        if values.dtype != np.float32 or not values.flags.c_contiguous or not values.flags.writeable:
            raise ValueError(f"sums are of contiguous writable float32, not of {values.dtype} {values.flags}")
        if not values.size:
            return
        mine = torch.from_numpy(values.reshape(-1))
        total, *others = self._landed(self._sum(mine))
        for part in others:
            total += part
        if total is not mine:
            mine.copy_(total)

    def gather(self, mine: BYTES) -> BYTES:
        every = torch.empty(self.size, mine.size, dtype=torch.uint8)
        if mine.size:
            own = torch.from_numpy(np.array(mine, np.uint8).reshape(-1))
            self._landed(self._gather(own, list(every)))
        rows: BYTES = every.numpy()
        return rows

    def check(self) -> None:
        if self._lost:
            raise GroupLost(self._lost)

    def abort(self, reason: str) -> None:
        with self._lock:
            self._lost = self._lost or reason

    def close(self) -> None:
        """The others' next wait for this rank ends with `GroupLost`."""
        self.abort(f"rank {self.rank} has left its group")
        self._leave()

    def _sum(self, mine: torch.Tensor) -> _Message:
        algorithm = next((name for most, name in self._table if mine.nbytes <= most), self._table[-1][1])
        if algorithm == GATHER:
            return self._gather(mine, list(mine.new_empty(self.size, mine.numel())))
        return _Message(self._start("allreduce", [mine]), [mine])

    def _gather(self, mine: torch.Tensor, rows: list[torch.Tensor]) -> _Message:
        return _Message(self._start("allgather", [rows], [mine]), rows)

    def _start(self, what: str, *tensors: Any) -> Any:
        self.check()
        try:
            return getattr(self._group, what)(*tensors)
        except RuntimeError as error:
            self._lose(error)

    def _landed(self, message: _Message) -> Sequence[torch.Tensor]:
        """Its parts, once they are there."""
        work = message.work
        while True:
            try:
                # A wait that ends too early raises as well, and what was begun goes on.
                work.wait(timedelta(seconds=1) if work.is_completed() else _SLICE)
                return message.parts
            except RuntimeError as error:
                if work.is_completed() and not _early(error):
                    self._lose(error)
            try:
                self.check()
            except GroupLost:
                self._leave()
                raise

    def _lose(self, error: RuntimeError) -> None:
        self.abort(f"a rank has ended or does not come: {_first_line(error)}")
        self._leave()
        raise GroupLost(self._lost) from None

    def _leave(self) -> None:
        """Close our connections. What is under way may hold that up, so nobody waits for it."""
        held, self._group = [self._group], None
        threading.Thread(target=held.clear, daemon=True).start()

    # The functions of `exchange`.

    def _room(self, floats: int, kind: int) -> int:
        self._open = torch.empty(floats), kind
        return self._open[0].data_ptr()

    def _begin(self) -> None:
        assert self._open is not None
        mine, kind = self._open
        try:
            if kind == abi.SUM:
                self._flying.append(self._sum(mine))
            else:
                self._flying.append(self._gather(mine, list(mine.new_empty(self.size, mine.numel()))))
        except GroupLost:
            pass  # which whoever waits for it is told

    def _land(self, landed: Any) -> None:
        try:
            self.check()
            parts = self._landed(self._flying[0])
        except GroupLost:
            landed.contents.parts = 0
            return
        landed.contents.parts = len(parts)
        for i, part in enumerate(parts):
            landed.contents.part[i] = ctypes.c_void_p(part.data_ptr()).value

    def _release(self) -> None:
        if self._flying:
            self._flying.popleft()


def _early(error: RuntimeError) -> bool:
    """It says that what is waited for is not ready, rather than that it failed."""
    return str(error).startswith("Operation timed out!")


def _first_line(error: RuntimeError) -> str:
    text = str(error).split("\n")[0]
    return text.split("] ", 1)[-1].split(". This is typically")[0][:200]
