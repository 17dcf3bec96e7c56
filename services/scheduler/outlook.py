"""What placement can know of the instances: candidates for a waiting sequence, made from their books."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from services.scheduler.admission import Reservation
from services.scheduler.budget import BudgetRules
from services.scheduler.draft import Draft
from services.scheduler.fetching import Fetching, soon_cached
from services.scheduler.instances import Instance
from services.scheduler.placement import Candidate
from services.scheduler.policy import BatchPolicy
from services.scheduler.seat import Look, Seat, find_seat
from services.scheduler.sequences import Sequence
from services.scheduler.validate import misfit

SLOW_START_S = 10.0
"""An instance that joins others may be filled only as fast as this: its costs are claims until measured."""
SLOW_START_LEAST = 2

ROOM_DOUBT = 1.5
"""When others will end is a guess; room there is now counts for more."""


@dataclass
class Promised:
    """What earlier ones in the queue will bring to an instance."""

    sequences: int = 0
    tokens: int = 0


NOTHING = Promised()


@dataclass(frozen=True, slots=True)
class _Base:
    """An instance at this moment, whoever asks."""

    ahead_s: float
    queue_tokens: int
    fetching: int
    prompt_share: float
    step_tokens: int


@dataclass
class Outlook:
    """Of one walk through the queue. It remembers who was left to whom, so that the next in the queue sees
    them there: a burst does not all go after the same gap."""

    fleet: Many[Instance]
    policy: BatchPolicy
    reservation: Reservation
    fetching: Fetching
    budget: BudgetRules
    max_running: int
    now: float
    planning: Instance
    draft: Draft
    """The frame of that instance in the making."""
    _promised: dict[str, Promised] = field(default_factory=dict)
    _oldest: float = -1.0
    """When the first of the fleet was ready; -1: not looked at."""
    _bases: dict[str, _Base] = field(default_factory=dict)
    _ends: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def candidates(self, sequence: Sequence, seat: Seat) -> list[Candidate]:
        """The sequence on each instance that could ever run it; `seat` is the one on `planning`."""
        request = sequence.request
        return [
            self.candidate(other, sequence, seat if other is self.planning else None)
            for other in self.fleet
            if other is self.planning
            or not misfit(len(request.prompt), request.sampling.max_tokens, other.info)
        ]

    def candidate(self, instance: Instance, sequence: Sequence, seat: Seat | None = None) -> Candidate:
        """The sequence on that instance; `seat` if it has been looked for."""
        look = self._look(instance, sequence, seat)
        base = self._base_of(instance)
        size = instance.info.block_tokens
        tokens = len(sequence.request.prompt) + len(sequence.out)
        promised = self._promised.get(instance.id, NOTHING)
        waiting = base.fetching + promised.sequences
        return Candidate(
            instance=instance.id,
            lacking_tokens=tokens - max(look.seat.cached, min(look.soon * size, tokens - 1)),
            fetch_tokens=look.fetch * size,
            fetch_s=self.fetching.fetch_s(instance, look.fetch, self.now) if look.fetch else 0.0,
            soon_s=max(0.0, look.soon_at - self.now),
            ahead_s=base.ahead_s,
            room_s=self._room_s(instance, sequence, look.seat, waiting),
            queue_tokens=base.queue_tokens + promised.tokens,
            running=len(instance.running) + waiting,
            decoding=instance.decoding,
            evicted_tokens=max(0, look.seat.need - instance.pool.plain) * size,
            prompt_share=base.prompt_share,
            cost=instance.fit.cost,
            step_tokens=base.step_tokens,
        )

    def _look(self, instance: Instance, sequence: Sequence, seat: Seat | None) -> Look:
        """Of another instance the last one will do until a frame, a result or a fetch has changed it there;
        `seat`: look anew."""
        stamp = (instance.incarnation, instance.next_seq, instance.expected, len(instance.fetches))
        known = sequence.looks.get(instance.id)
        if seat is None and known is not None and known.stamp == stamp:
            return known
        if seat is None:
            seat = find_seat(instance, sequence, self.reservation)
        size = instance.info.block_tokens
        soon, soon_s = self.soon(instance, sequence)
        fetch = 0
        if sequence.fetch is None and soon * size <= seat.cached:
            fetch = self.fetching.blocks_to_fetch(instance, sequence, seat.cached // size, self.now)
        look = sequence.looks[instance.id] = Look(stamp, seat, soon, self.now + soon_s, fetch)
        return look

    def _base_of(self, instance: Instance) -> _Base:
        """What does not depend on the sequence. Of the instance being planned it changes as it is filled."""
        base = self._bases.get(instance.id)
        if base is None or instance is self.planning:
            fit, fetchers = instance.fit, instance.fetchers
            base = self._bases[instance.id] = _Base(
                ahead_s=self._ahead_s(instance),
                queue_tokens=instance.backlog + sum(fetch.left_tokens for fetch in fetchers),
                fetching=len(fetchers),
                prompt_share=instance.prompt_share(self.now),
                step_tokens=self.budget.prefill_tokens(
                    fit.cost, instance.decoding, instance.info.max_step_tokens, fit.overrun
                ),
            )
        return base

    def soon(self, instance: Instance, sequence: Sequence) -> tuple[int, float]:
        """`soon_cached`, the frame in the making included."""
        drafted = self.draft.firsts if instance is self.planning else ()
        return soon_cached(instance, sequence, self.now, drafted)

    def promise(self, candidate: Candidate) -> None:
        """The sequence is left to that instance."""
        promised = self._promised.setdefault(candidate.instance, Promised())
        promised.sequences += 1
        promised.tokens += candidate.lacking_tokens - candidate.fetch_tokens

    def openings(self, instance: Instance) -> int:
        """How many may join it now."""
        limit = self.slots(instance)
        taken = len(instance.fetchers)
        return min(
            self.policy.may_join(len(instance.running) + taken, limit), len(instance.free_slots) - taken
        )

    def slots(self, instance: Instance) -> int:
        """Sequences it may run at once, fewer while it is new among others."""
        limit = min(self.max_running or len(instance.table), len(instance.table))
        age_s = self.now - instance.ready_at
        if self._oldest < 0.0:
            self._oldest = min((other.ready_at for other in self.fleet), default=self.now)
        if age_s < SLOW_START_S and self._oldest <= instance.ready_at - SLOW_START_S:
            return min(limit, max(SLOW_START_LEAST, int(limit * age_s / SLOW_START_S)))
        return limit

    def _ahead_s(self, instance: Instance) -> float:
        """Expected time of its frames: in flight, overdue, and in the making."""
        ahead_s = instance.ahead_s
        if instance.in_flight:
            ahead_s += max(0.0, self.now - instance.progress_at - instance.in_flight[0].cost_s)
        if instance is self.planning and self.draft.prompt_tokens:
            ahead_s += instance.fit.cost.step_s(instance.decoding, self.draft.prompt_tokens)
        return ahead_s

    def _room_s(self, instance: Instance, sequence: Sequence, seat: Seat, waiting: int) -> float:
        """Seconds until enough of the running have ended, by what they are expected to write, or have made
        way for a more urgent one."""
        slots = 1 + waiting - min(len(instance.free_slots), self.slots(instance) - len(instance.running))
        blocks = (
            0 if seat.fits else max(1, seat.need + seat.reserve + instance.set_aside - instance.pool.free)
        )
        if slots <= 0 and not blocks:
            return 0.0
        if any(other.request.priority > sequence.request.priority for other in instance.running):
            # What they hold comes back with the frames in flight; then they have to be computed again.
            return instance.ahead_s + 2.0 * instance.fit.step_s
        frames = 0
        for left, held in self._ends_of(instance):
            if slots <= 0 and blocks <= 0:
                break
            frames = left
            slots -= 1
            blocks -= held
        return ROOM_DOUBT * frames * instance.fit.step_s

    def _ends_of(self, instance: Instance) -> list[tuple[int, int]]:
        """(frames until its expected end, blocks that come back) of the running, soonest first."""
        known = self._ends.get(instance.id)
        if known is None:
            known = self._ends[instance.id] = []
            for sequence in instance.running:
                written = len(sequence.out)
                most = sequence.request.sampling.max_tokens
                # Whoever has written more than was expected may go on for long.
                left = max(1, self.reservation.expected_tokens(most, written) - written, written // 4)
                insort(known, (left, len(sequence.blocks) + sequence.reserved))
        return known
