"""The gate of rank 0: which frames of which scheduler may run (docs/protocol.md §3).

Pure: no clock, no I/O. A fresh incarnation number is an argument. Numbers of one instance must rise over
all its lives, so that a result of a former life can never match; the shell draws them from the clock.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from shared.ids import MAX_EPOCH

CLAIMS_REMEMBERED = 16
"""Answers kept by claim id. A repetition older than that draws a new incarnation, which is safe."""


class Verdict(Enum):
    RUN = "run"
    DUPLICATE = "duplicate"
    GAP = "gap"
    STALE = "stale"


class ClaimVerdict(Enum):
    ACCEPTED = "accepted"
    """A new session begins: clear the slots."""
    REPEATED = "repeated"
    """The answer of this claim id again; nothing changed."""
    REFUSED = "refused"


@dataclass(frozen=True)
class Leadership:
    """One leadership of a scheduler. A higher epoch outranks; of equal epochs the smaller owner does."""

    epoch: int
    owner: str

    def outranks(self, other: "Leadership") -> bool:
        return self.epoch > other.epoch or (self.epoch == other.epoch and self.owner < other.owner)


NOBODY = Leadership(0, "")
"""Before anything was heard: schedulers begin with epoch 1."""


class Gate:
    """State: the highest leadership seen, who holds the session, its incarnation and highest frame seen."""

    __slots__ = ("_claims", "highest", "holder", "incarnation", "seen_seq")

    def __init__(self, incarnation: int) -> None:
        self.highest = NOBODY
        self.holder: Leadership | None = None
        self.incarnation = incarnation
        self.seen_seq = 0
        self._claims: OrderedDict[str, int] = OrderedDict()

    def judge(self, epoch: int, owner: str, incarnation: int, seq: int) -> Verdict:
        """Verdict on a step frame; RUN moves `seen_seq` on.

        An incarnation is a session *with the scheduler it was given to*: somebody else naming it is stale
        too, also from above, because whoever leads has to claim first.
        """
        holder = self.holder
        if (
            holder is None
            or incarnation != self.incarnation
            or epoch != holder.epoch
            or owner != holder.owner
            or self.highest is not holder
        ):
            return Verdict.STALE
        expected = self.seen_seq + 1
        if seq == expected:
            self.seen_seq = seq
            return Verdict.RUN
        return Verdict.DUPLICATE if seq < expected else Verdict.GAP

    def claim(self, epoch: int, owner: str, claim_id: str, fresh: int) -> tuple[ClaimVerdict, int]:
        """Verdict on a claim, and the incarnation to answer with. `fresh` is used only when accepted."""
        claimant = Leadership(epoch, owner)
        if epoch > MAX_EPOCH or self.highest.outranks(claimant):
            return ClaimVerdict.REFUSED, self.incarnation
        if claimant == self.holder and claim_id in self._claims:
            return ClaimVerdict.REPEATED, self._claims[claim_id]
        if claimant != self.holder:
            self._claims.clear()
        self.highest = self.holder = claimant
        self._begin(fresh)
        self._claims[claim_id] = self.incarnation
        if len(self._claims) > CLAIMS_REMEMBERED:
            self._claims.popitem(last=False)
        return ClaimVerdict.ACCEPTED, self.incarnation

    def observe(self, epoch: int, owner: str) -> None:
        """A beacon was heard: whoever is below it is fenced from now on, before the claim arrives.

        Epochs above `MAX_EPOCH` are ignored, as schedulers ignore them: remembered, one such would fence all.
        """
        heard = Leadership(epoch, owner)
        if epoch <= MAX_EPOCH and heard.outranks(self.highest):
            self.highest = heard

    def abandon(self, fresh: int) -> None:
        """End the session from our side: its frames are stale from now on, and a claim must follow."""
        self.holder = None
        self._claims.clear()
        self._begin(fresh)

    def _begin(self, fresh: int) -> None:
        if fresh <= self.incarnation:
            raise ValueError(f"incarnation {fresh} does not follow {self.incarnation}: it must rise")
        self.incarnation = fresh
        self.seen_seq = 0
