"""What an instance tells of its memory: the ledger of every rank, what rank 0 has now, and what is left."""

from collections.abc import Sequence
from typing import Any

from services.worker.engine.resident import resident, room_here
from services.worker.memory.ledger import Ledger


class Holdings:
    """`ranks`: what `Compute.memory` said; none of an instance that keeps no account."""

    def __init__(self, ranks: Sequence[dict[str, Any]] = ()) -> None:
        self.ranks = tuple(ranks)

    def report(self) -> dict[str, Any]:
        """Over all ranks and for each, bytes by class; empty if there is no account."""
        if not self.ranks:
            return {}
        return {
            "predicted": self._sum("predicted").as_dict(),
            "measured": self._sum("measured").as_dict() if all(r["measured"] for r in self.ranks) else None,
            "ranks": list(self.ranks),
            "warnings": self.warnings(),
        } | self.now()

    def now(self) -> dict[str, Any]:
        """Of rank 0, by the system's account: bytes it has, bytes it may still take, and who says so."""
        try:
            room = room_here()
            return {"resident_bytes": resident().total, "free_bytes": room.bytes, "free_of": room.origin}
        except OSError:  # the system does not tell
            return {}

    def warnings(self) -> list[str]:
        """Classes that were predicted more than 3 % off, with their rank where there are several."""
        if len(self.ranks) == 1:
            return list(self.ranks[0]["warnings"])
        return [f"rank {n}: {text}" for n, rank in enumerate(self.ranks) for text in rank["warnings"]]

    def _sum(self, kind: str) -> Ledger:
        total = Ledger()
        for rank in self.ranks:
            total += Ledger.of(rank[kind])
        return total
