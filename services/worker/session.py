"""What rank 0 answers to its scheduler: frames, beacons and claims in, messages out (docs/protocol.md §3).

Pure: `now` and fresh incarnations are arguments, nothing is awaited. What is to be computed goes to the
runner; this is about who may command it, what was lost on the way, and what is said about it.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import msgspec

from services.worker.gate import ClaimVerdict, Gate, Verdict
from shared.wire import (
    Beacon,
    Beat,
    Claim,
    Done,
    Fetched,
    FromInstance,
    Goodbye,
    InstanceInfo,
    Refused,
    Resync,
    Step,
)

RESULTS_KEPT = 64
"""Results kept for a scheduler that missed them; more frames than that are never in flight."""

FETCHES_TOLD = 64
"""Ends of fetches in each beat, the latest: a beat may be lost."""

COMPLAIN_EVERY_S = 0.1
"""A gap or a stale sender is named at most this often."""


@dataclass
class Reaction:
    """Messages for the scheduler, in order; and whether the frame at hand is to be computed."""

    run: bool = False
    done: Done | None = None
    """A stored result, to be sent again."""
    say: list[FromInstance] = field(default_factory=list)


RUN = Reaction(run=True)
NOTHING = Reaction()


class Session:
    """Gate, stored results and state of one instance; `info` is what its beats announce."""

    def __init__(self, info: InstanceInfo) -> None:
        self._base = info
        self.gate = Gate(info.born)
        self.info = info
        self.done_seq = 0
        self._results: OrderedDict[int, Done] = OrderedDict()
        self._fetched: deque[Fetched] = deque(maxlen=FETCHES_TOLD)
        self._draining = False
        self._failure = ""
        self._complained_at = {"gap": float("-inf"), "stale": float("-inf")}

    # What comes in.

    def on_step(self, frame: Step, now: float) -> tuple[Verdict, Reaction]:
        verdict = self.gate.judge(frame.epoch, frame.owner, frame.incarnation, frame.seq)
        if verdict is Verdict.RUN:
            return verdict, RUN
        if verdict is Verdict.DUPLICATE:
            # Not there: it is still being computed and comes by itself.
            return verdict, Reaction(done=self._results.get(frame.seq))
        if verdict is Verdict.GAP:
            return verdict, self._gap(now)
        return verdict, self._stale(now)

    def on_beacon(self, beacon: Beacon, now: float) -> Reaction:
        """A beacon exposes lost last frames, and that the leader does not know us (or a former us)."""
        if beacon.model != self.info.model:
            return NOTHING
        self.gate.observe(beacon.epoch, beacon.owner)
        highest = self.gate.highest
        if (beacon.epoch, beacon.owner) != (highest.epoch, highest.owner):
            return self._stale(now)
        listed = beacon.instances.get(self.info.instance)
        if listed is None or listed[0] != self.gate.incarnation or self.gate.holder != highest:
            return Reaction(say=[self.beat()])
        return self._gap(now) if listed[1] > self.gate.seen_seq else NOTHING

    def on_claim(self, claim: Claim, fresh: int) -> tuple[ClaimVerdict, int]:
        """The verdict and the incarnation to answer with; ACCEPTED: the runner must begin anew."""
        verdict, incarnation = self.gate.claim(claim.epoch, claim.owner, claim.claim_id, fresh)
        if verdict is ClaimVerdict.ACCEPTED:
            self._forget()
            self._failure = ""
            self._announce()
        return verdict, incarnation

    def on_result(self, done: Done) -> bool:
        """Keep a result for repetition; False: it belongs to a session that is over."""
        if done.incarnation != self.gate.incarnation:
            return False
        self.done_seq = done.seq
        self._results[done.seq] = done
        if len(self._results) > RESULTS_KEPT:
            self._results.popitem(last=False)
        return True

    def on_broken(self, incarnation: int, reason: str, fresh: int) -> bool:
        """The session cannot go on; a new incarnation says so to the scheduler, which claims anew."""
        if incarnation != self.gate.incarnation:
            return False
        self.gate.abandon(fresh)
        self._forget()
        self.fail(reason)
        return True

    def drain(self, undo: bool) -> None:
        self._draining = not undo
        self._announce()

    def on_fetched(self, incarnation: int, fetched: Fetched) -> bool:
        """Tell it in this and in later beats; False: it belongs to a session that is over."""
        if incarnation != self.gate.incarnation:
            return False
        self._fetched.append(fetched)
        return True

    def use_tier(self, row: str, fixed_s: float, block_s: float) -> None:
        """Where blocks go, and what a fetch from there takes; empty: no second tier is in reach, or pays."""
        self._base = msgspec.structs.replace(self._base, tier=row, tier_fixed_s=fixed_s, tier_block_s=block_s)
        self._announce()

    def fail(self, reason: str) -> None:
        self._failure = reason
        self._announce()

    # What goes out.

    def beat(self) -> Beat:
        gate = self.gate
        return Beat(
            info=self.info,
            incarnation=gate.incarnation,
            epoch=gate.highest.epoch,
            owner=gate.highest.owner,
            seen_seq=gate.seen_seq,
            done_seq=self.done_seq,
            fetched=list(self._fetched),
        )

    def goodbye(self, reason: str) -> Goodbye:
        return Goodbye(instance=self.info.instance, incarnation=self.gate.incarnation, reason=reason)

    def _gap(self, now: float) -> Reaction:
        if not self._may_complain("gap", now):
            return NOTHING
        gate = self.gate
        return Reaction(
            say=[
                Resync(
                    instance=self.info.instance,
                    epoch=gate.highest.epoch,
                    owner=gate.highest.owner,
                    incarnation=gate.incarnation,
                    have_seq=gate.seen_seq,
                )
            ]
        )

    def _stale(self, now: float) -> Reaction:
        """The sender learns who outranks it; the beat tells a leader that only our incarnation is another."""
        if not self._may_complain("stale", now):
            return NOTHING
        highest = self.gate.highest
        refused = Refused(instance=self.info.instance, epoch=highest.epoch, owner=highest.owner)
        return Reaction(say=[refused, self.beat()])

    def _may_complain(self, about: str, now: float) -> bool:
        if now - self._complained_at[about] < COMPLAIN_EVERY_S:
            return False
        self._complained_at[about] = now
        return True

    def _forget(self) -> None:
        self._results.clear()
        self._fetched.clear()
        self.done_seq = 0

    def _announce(self) -> None:
        state = "failed" if self._failure else "draining" if self._draining else "ready"
        detail = (*self._base.detail, ("failure", self._failure)) if self._failure else self._base.detail
        self.info = msgspec.structs.replace(self._base, state=state, detail=detail)
