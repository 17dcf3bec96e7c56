"""Which algorithm sums of which size go by: measured by all ranks of a group at once, and remembered.

What is decided is decided by what rank 0 measured.
"""

import hashlib
import os
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.worker.collective.port import Collective
from services.worker.engine.remembered import Remembered, cpu_name
from services.worker.parallel.crossover import CrossoverTable, Timing, sizes_to_measure

_TIMES = (7, 3)
"""How often a sum is timed, of few and of many bytes; each time counts eight in a row."""
_LONG_S = 0.4
"""Sizes are measured up to one at which all algorithms together take so long."""


@runtime_checkable
class Timed(Protocol):
    """A transport with several algorithms of sums."""

    def algorithms(self) -> tuple[str, ...]:
        """By which sums can go here."""
        ...

    def time(self, algorithm: str, floats: int, repeats: int) -> tuple[float, float]:
        """(least, median) seconds of one sum of so many floats; all ranks call it."""
        ...

    def set_table(self, table: list[tuple[int, str]]) -> None: ...


@runtime_checkable
class Watched(Protocol):
    """A transport that tells what its messages took."""

    def busy_s(self) -> float:
        """Seconds in which a message was under way on a link."""
        ...

    def drift(self) -> dict[str, dict[int, float]]:
        """By algorithm: c → least seconds of messages of 2^c … 2^(c+1) - 1 bytes since the last call."""
        ...


def from_rank_0(collective: Collective, told: bytes) -> bytes:
    """What rank 0 told, on every rank; of the others `told` does not matter."""
    length = int(collective.gather(np.array([len(told)], np.int64).view(np.uint8))[0].view(np.int64)[0])
    mine = np.zeros(length, np.uint8)
    if collective.rank == 0:
        mine[:] = np.frombuffer(told, np.uint8)
    return collective.gather(mine)[0].tobytes()


def told_by_rank_0(collective: Collective) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Numbers → those of rank 0, on every rank."""
    return lambda mine: collective.gather(mine.view(np.uint8))[0].view(np.float64)


def measure_crossovers(
    collective: Timed,
    sizes: tuple[int, ...],
    shared: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    former: CrossoverTable | None = None,
) -> CrossoverTable:
    """This rank's times of every algorithm at every size in bytes, as a table. All ranks call it.

    Sizes that take long, as on slow links, are left out: what they take follows from the last ones measured.
    """
    timings: list[Timing] = []
    for size in sizes:
        here = []
        for algorithm in collective.algorithms():
            _, typical = collective.time(algorithm, size // 4, _TIMES[size > 1 << 16])
            here.append(Timing(algorithm, size, typical))
        timings += here
        took_s = np.array([8 * sum(timing.seconds for timing in here)])
        if float(shared(took_s)[0]) > _LONG_S:
            break
    return CrossoverTable.build(timings, former=former)


def crossovers(
    collective: Collective,
    most_bytes: int,
    depends_on: dict[str, object],
    anew: bool = False,
    through: object = None,
) -> CrossoverTable | None:
    """The table of this group, in use afterwards: remembered by what it depends on, or measured.

    The same on all ranks; None of a transport that knows one way only. `through`: what sums go through, if it
    is not the collective itself.
    """
    timed = collective if through is None else through
    if not isinstance(timed, Timed):
        return None
    memory = Remembered(CrossoverTable, "crossovers", depends_on)
    known = memory.recall() if collective.rank == 0 and not anew else None
    told = from_rank_0(collective, msgspec.msgpack.encode(known))
    table = msgspec.msgpack.decode(told, type=CrossoverTable | None)
    if table is None:
        measured = measure_crossovers(timed, sizes_to_measure(most_bytes), told_by_rank_0(collective))
        told = from_rank_0(collective, msgspec.msgpack.encode(measured))
        table = msgspec.msgpack.decode(told, type=CrossoverTable)
        if collective.rank == 0:
            memory.keep(table)
    use(timed, table)
    return table


def use(collective: Timed, table: CrossoverTable) -> None:
    """Sums go by `table` from now on."""
    collective.set_table([(entry.up_to_bytes, entry.algorithm) for entry in table.entries])


def group_facts(collective: Collective, pinned: bool, cores: Sequence[int]) -> dict[str, object]:
    """What the times of this group's messages depend on: on all ranks what rank 0 finds of all of them."""
    mine = f"{socket.gethostname()} {sorted(cores) if pinned else len(os.sched_getaffinity(0))} {cpu_name()}"
    digest = np.frombuffer(hashlib.sha256(mine.encode()).digest(), np.uint8)
    places = [row.tobytes().hex()[:16] for row in collective.gather(digest)]
    algorithms = collective.algorithms() if isinstance(collective, Timed) else ()
    return {"ranks": collective.size, "places": places, "algorithms": algorithms}
