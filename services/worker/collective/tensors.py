"""Sums of tensors over the ranks of a group, where the tensors are: what torch code computes a shard with."""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

from services.worker.collective.port import Collective


class Reducer(Protocol):
    """One rank's end of a group, for tensors. Called in the same order with the same shapes by every rank."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def queues(self) -> bool:
        """Sums are queued on the device's current stream and nobody waits, so that a graph can hold them."""
        ...

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """`part`, contiguous floats, replaced by the sum over all ranks: the same bits everywhere.

        May raise `GroupLost`.
        """
        ...


class HostReducer:
    """`Reducer` over a `Collective`: in place on CPUs; from other devices by way of the host, waiting.

    Parts of 16 bit are added up in float32 and rounded once.
    """

    queues = False

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self.rank, self.size = collective.rank, collective.size

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        if self.size == 1 or not part.numel():
            return part
        host = part.detach().to("cpu", torch.float32)
        self._collective.all_reduce(host.numpy())
        return part if host.data_ptr() == part.data_ptr() else part.copy_(host)


@dataclass(frozen=True)
class Way:
    """One algorithm of sums, and what it can take."""

    sum: Callable[[torch.Tensor], torch.Tensor]
    """As `Reducer.all_reduce`."""
    most_bytes: int | None = None
    formats: tuple[torch.dtype, ...] | None = None
    granule: int = 1
    """If more than 1: messages are of a multiple of this many bytes, and begin where their memory does."""

    def takes(self, part: torch.Tensor) -> bool:
        """Told by shapes and formats alone, so that all ranks find the same."""
        return (
            (self.most_bytes is None or part.nbytes <= self.most_bytes)
            and (self.formats is None or part.dtype in self.formats)
            and (self.granule == 1 or (part.nbytes % self.granule == 0 and part.storage_offset() == 0))
        )


class ChosenReducer:
    """`Reducer` that sums each message by the algorithm its size is fastest with.

    The first of `ways` takes everything, and is used before there is a table and for what others cannot take.
    `queues` as of `Reducer`, of all of them.
    """

    def __init__(
        self, rank: int, size: int, ways: Mapping[str, Way], device: torch.device, queues: bool
    ) -> None:
        self.rank, self.size, self.queues = rank, size, queues
        self._ways, self._device = dict(ways), device
        self._first = next(iter(ways))
        self._limits: list[int] = []
        self._chosen = [self._first]

    def algorithms(self) -> tuple[str, ...]:
        """By which sums can go here."""
        return tuple(self._ways)

    def set_table(self, table: Sequence[tuple[int, str]]) -> None:
        """Sums of at most so many bytes go by that algorithm, ascending; longer ones by the last.

        The same on all ranks, at the same place in the order of messages. Raises ValueError.
        """
        for _, algorithm in table:
            if algorithm not in self._ways:
                known = ", ".join(self._ways)
                raise ValueError(f"no sums by {algorithm!r} in this group, only by {known}")
        self._limits = [limit for limit, _ in table[:-1]]
        self._chosen = [algorithm for _, algorithm in table]

    def time(self, algorithm: str, floats: int, repeats: int) -> tuple[float, float]:
        """(least, median) seconds of one sum of so many floats; all ranks call it."""
        part = torch.zeros(floats, device=self._device)
        way = self._way(algorithm, part)
        laps = Laps(self._device)
        for _ in range(repeats + 2):
            way.sum(part)
            laps.mark()
        # The first may set things up, and ends whenever the last rank has come.
        taken = laps.seconds()[1:]
        return min(taken), median(taken)

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        if not part.numel():
            return part
        return self._way(self._chosen[bisect_left(self._limits, part.nbytes)], part).sum(part)

    def _way(self, algorithm: str, part: torch.Tensor) -> Way:
        way = self._ways[algorithm]
        return way if way.takes(part) else self._ways[self._first]


class Laps:
    """Times between marks, on a device those at which it comes to them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        if self._cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each mark and the next; waits for the last."""
        if self._cuda:
            self._events[-1].synchronize()
            pairs = zip(self._events, self._events[1:])
            return [begun.elapsed_time(ended) * 1e-3 for begun, ended in pairs]
        return [ended - begun for begun, ended in zip(self._times, self._times[1:])]
