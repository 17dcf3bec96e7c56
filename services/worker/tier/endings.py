"""When a fetch has ended on all ranks of an instance, and with how many blocks. Pure; rank 0's."""

from dataclasses import dataclass, field

from services.worker.tier.arrivals import Key
from shared.wire import Fetched

LIMIT_S = 9.5
"""A rank that has not said by then how its part of a fetch ended has got nothing."""


@dataclass
class _Open:
    began: float
    said: dict[int, tuple[int, int]] = field(default_factory=dict)
    # rank → (count, microseconds)


class Endings:
    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: dict[Key, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, key: Key, now: float) -> None:
        """The frame that says so was passed on."""
        self._open[key] = _Open(now)

    def said(self, rank: int, key: Key, count: int, us: int) -> Fetched | None:
        """A rank's part has ended. The fetch's end, once all have: blocks that every rank has got."""
        fetch = self._open.get(key)
        if fetch is None:
            return None
        fetch.said[rank] = count, us
        if len(fetch.said) < self._ranks:
            return None
        del self._open[key]
        ends = fetch.said.values()
        return Fetched(key[1], min(count for count, _ in ends), max(us for _, us in ends))

    def expire(self, now: float) -> list[tuple[Key, Fetched]]:
        """Fetches that took too long; they end with nothing."""
        late = [(key, fetch) for key, fetch in self._open.items() if now > fetch.began + LIMIT_S]
        for key, _ in late:
            del self._open[key]
        return [(key, Fetched(key[1], 0, int((now - fetch.began) * 1e6))) for key, fetch in late]

    def forget(self) -> None:
        """The session is over: its fetches have no end."""
        self._open.clear()
