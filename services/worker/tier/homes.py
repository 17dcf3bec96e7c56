"""Which second tiers there are, and which of them the instance's blocks go to. Pure."""

import socket
from dataclasses import dataclass, field

from shared.subjects import tier_row
from shared.wire import TierOffer

SILENT_S = 4.0
"""An offer comes every second; one that has not come for so long holds no more."""

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})


@dataclass(frozen=True)
class TierState:
    """What every rank of an instance is told; the same on all."""

    offers: tuple[TierOffer, ...] = ()
    home: str = ""
    """Row of the tier that blocks go to; empty: none."""
    wanted: bool = False
    """Blocks are to go there: it was reached, and a fetch from it takes less than computing them again."""

    def of(self, row: str, model: str) -> TierOffer | None:
        return next((offer for offer in self.offers if tier_row(offer.instance, model) == row), None)


@dataclass
class _Heard:
    offer: TierOffer
    at: float
    latency_s: float | None = None


@dataclass
class Homes:
    """Offers heard, by row."""

    model: str
    own_hosts: frozenset[str] = field(default_factory=lambda: LOOPBACK | {socket.gethostname()})
    _heard: dict[str, _Heard] = field(default_factory=dict)

    def hear(self, offer: TierOffer, now: float) -> bool:
        """Whether it says something new. One of an earlier life than we know is ignored."""
        row = tier_row(offer.instance, self.model)
        known = self._heard.get(row)
        if known is not None and known.offer.born > offer.born:
            return False
        if known is None or known.offer != offer:
            self._heard[row] = _Heard(offer, now)
            return True
        known.at = now
        return False

    def expire(self, now: float) -> bool:
        """Forget who has fallen silent; whether anybody has."""
        silent = [row for row, heard in self._heard.items() if now > heard.at + SILENT_S]
        for row in silent:
            del self._heard[row]
        return bool(silent)

    def unmeasured(self) -> list[TierOffer]:
        """Offers whose latency has to be known to choose among them: none if there is but one."""
        if len(self._heard) < 2:
            return []
        return [heard.offer for heard in self._heard.values() if heard.latency_s is None]

    def measured(self, offer: TierOffer, latency_s: float) -> None:
        for heard in self._heard.values():
            if heard.offer == offer:
                heard.latency_s = latency_s

    def offers(self) -> tuple[TierOffer, ...]:
        return tuple(heard.offer for _, heard in sorted(self._heard.items()))

    def home(self) -> str:
        """Row of the nearest tier: on this host first, then by latency, then by name; empty: none."""

        def distance(row: str) -> tuple[bool, float, str]:
            heard = self._heard[row]
            latency = float("inf") if heard.latency_s is None else heard.latency_s
            return heard.offer.host not in self.own_hosts, latency, row

        return min(self._heard, key=distance, default="")
