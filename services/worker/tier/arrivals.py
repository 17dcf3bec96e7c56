"""Fetches of one rank, as its threads know them: what has arrived, and which are over. Pure; the caller holds
one lock around each call, and around the copy that a call allows.
"""

from collections import deque
from dataclasses import dataclass

from shared.wire import Fetch

Key = tuple[int, int]
"""(incarnation, op): nothing of a former session is taken for one of this."""


@dataclass(eq=False)
class Arrival:
    """One fetch. Its blocks may be written as long as it is not `over`, by the fetching thread alone."""

    key: Key
    fetch: Fetch
    began: float
    over: bool = False
    count: int = 0
    """Blocks written so far, from the first on."""


class Arrivals:
    def __init__(self) -> None:
        self._open: dict[Key, Arrival] = {}
        self._waiting: deque[Arrival] = deque()

    def __len__(self) -> int:
        """Fetches that are not over."""
        return len(self._open)

    def begin(self, session: int, fetch: Fetch, now: float) -> None:
        arrival = Arrival((session, fetch.op), fetch, now)
        self._open[arrival.key] = arrival
        self._waiting.append(arrival)

    def take(self) -> Arrival | None:
        """The next to be carried out."""
        while self._waiting:
            arrival = self._waiting.popleft()
            if not arrival.over:
                return arrival
        return None

    def end(self, key: Key) -> None:
        """From now on nothing is written for it."""
        arrival = self._open.pop(key, None)
        if arrival is not None:
            arrival.over = True

    def end_all(self) -> None:
        """The session is over."""
        for arrival in self._open.values():
            arrival.over = True
        self._open.clear()
        self._waiting.clear()
