"""In which order blocks leave: the longest unused first, and chains from their end. Pure.

A rank follows two rules. Whoever is used takes along what comes before it in its chain, so that no block was
used later than the one before it. Of those used in the same stretch of time, the deepest is first. Stretches
keep that cheap: within one, a block is moved once.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar


class Rank(NamedTuple):
    """The least leaves first."""

    stretch: int
    """Of time, in which it was used last; 0: what comes before it in its chain is not here."""
    height: int
    """Blocks before it in its chain, negated."""
    use: int
    """Every use has a number; no two ranks are equal."""


NOT_USED = Rank(0, 0, 0)


class Ranked(Protocol):
    rank: Rank


R = TypeVar("R", bound=Ranked)


class Order(Generic[R]):
    """Those in one place. O(log n) amortised for each operation, and for each that `first` passes over."""

    def __init__(self) -> None:
        self._members: set[R] = set()
        self._heap: list[tuple[Rank, R]] = []
        # of those that left, or that rank otherwise now, old rows remain for a while

    def __contains__(self, one: R) -> bool:
        return one in self._members

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[R]:
        """In no order."""
        return iter(self._members)

    def put(self, one: R) -> None:
        """It is here, or is and ranks otherwise."""
        self._members.add(one)
        heapq.heappush(self._heap, (one.rank, one))
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(each.rank, each) for each in self._members]
            heapq.heapify(self._heap)

    def discard(self, one: R) -> None:
        self._members.discard(one)

    def first(self, may: Callable[[R], bool]) -> R | None:
        """The first to leave of those that may."""
        passed: list[tuple[Rank, R]] = []
        found: R | None = None
        while self._heap and found is None:
            rank, one = heapq.heappop(self._heap)
            if one in self._members and one.rank is rank:
                passed.append((rank, one))
                found = one if may(one) else None
        for row in passed:
            heapq.heappush(self._heap, row)
        return found
