"""The waiting sequences in the order in which they are admitted.

Order: by `priority * aging_s + queue deadline`, then arrival. Within one priority the one that must be
admitted first goes first; between priorities a waiting one gains on later arrivals, `aging_s` a level, so
none starves. A preempted sequence has the key of its arrival and so keeps its place.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from services.scheduler.sequences import Sequence


class WaitQueue:
    """Sorted list; a thousand entries at most, so inserting costs microseconds."""

    def __init__(self, aging_s: float = 30.0) -> None:
        self._aging_s = aging_s
        self._rows: list[tuple[float, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Sequence]:
        """A snapshot, first to be admitted first."""
        for row in self._rows.copy():
            yield row[2]

    def _key(self, sequence: Sequence) -> tuple[float, int]:
        request = sequence.request
        return request.priority * self._aging_s + request.queue_deadline, sequence.order

    def push(self, sequence: Sequence) -> None:
        """At its place; a preempted sequence finds its old one."""
        insort(self._rows, (*self._key(sequence), sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take it out. Raises KeyError if it is not waiting."""
        at = bisect_left(self._rows, self._key(sequence), key=lambda row: (row[0], row[1]))
        if at == len(self._rows) or self._rows[at][2] is not sequence:
            raise KeyError(f"sequence {sequence.handle} is not waiting")
        del self._rows[at]
