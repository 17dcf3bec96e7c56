"""Plans the next frame of one instance: grow, preempt, chunk prompts, admit, issue.

A steady decode frame costs nothing per sequence: decoding is implicit on the wire, and a calendar keyed by
frame number says which sequences then need a block or have drawn their last token.
"""

import random
from collections.abc import Callable
from collections.abc import Sequence as Many

from services.scheduler.admission import Reservation
from services.scheduler.budget import BudgetRules
from services.scheduler.counters import Counters
from services.scheduler.draft import Draft
from services.scheduler.fetching import Fetching, FetchRules
from services.scheduler.instances import Frame, Instance, Lane, State
from services.scheduler.outlook import Outlook
from services.scheduler.placement import FirstTokenSoonest, Placement
from services.scheduler.policy import BatchPolicy
from services.scheduler.queues import WaitQueue
from services.scheduler.room import Room, urgency
from services.scheduler.seat import Seat, find_seat
from services.scheduler.sequences import Phase, Sequence
from services.scheduler.validate import misfit
from shared.wire import Admit, KvOp, Step, Work

MAX_PASSED_OVER = 16
"""Waiting sequences that may be left to other instances, or to wait for others' prompts, before a plan stops
looking."""

MAX_FRAME_IDS = 100_000
"""Ids that the admissions of one frame carry at most: 5 bytes each stay well below the broker's 1 MiB.
A single longer sequence still goes, alone."""


class Planner:
    """Stateless but for its rules: what it plans on is the instance and the queue it is given."""

    def __init__(
        self,
        policy: BatchPolicy,
        reservation: Reservation,
        rules: BudgetRules,
        counters: Counters,
        requeue: Callable[[Sequence], None],
    ) -> None:
        """`requeue` takes preempted sequences back."""
        self.policy = policy
        self.reservation = reservation
        self.rules = rules
        self.counters = counters
        self.max_running = 0
        """Sequences per instance; 0: as many as it has slots."""
        self.rng = random.Random(0)
        """Settles ties between instances; the core puts its own here."""
        self.epoch = 0
        self.owner = ""
        """The leadership that frames are issued under."""
        self.room = Room(reservation, counters, requeue)
        self.placement: Placement = FirstTokenSoonest()
        self.fetching = Fetching(FetchRules())

    def plan(self, instance: Instance, queue: WaitQueue, fleet: Many[Instance], now: float) -> Frame | None:
        """Issue the next frame, or None if there is nothing to do. `fleet` are the instances among which a
        waiting sequence may choose."""
        draft = Draft(instance.next_seq)
        budget = -1
        if len(queue):
            # Those whom others make way for; their prompts then go before the prompts of others.
            budget = self._admit(instance, draft, queue, fleet, budget, now, urgent=True)
            if draft.awaited and not draft.admit and not draft.fetch:
                # A frame more would only keep them waiting: what they need comes with those in flight.
                return None
        due = instance.calendar.pop(draft.seq, None)
        if due or instance.stalled:
            self.room.grow(instance, draft, due or (), now)
        if instance.prefilling:
            budget = self._budget(instance) if budget < 0 else budget
            budget -= self._chunks(instance, draft, budget)
        if len(queue) and not draft.preempted and not instance.stalled:
            self._admit(instance, draft, queue, fleet, budget, now)
        if not (
            draft.prompt_tokens
            or instance.decoding
            or draft.extend
            or draft.admit
            or draft.fetch
            or instance.leaving
        ):
            return None
        self.counters.computed_tokens += instance.decoding
        return self._issue(instance, draft, now)

    def _budget(self, instance: Instance) -> int:
        fit = instance.fit
        return self.rules.prefill_tokens(
            fit.cost, instance.decoding, instance.info.max_step_tokens, fit.overrun
        )

    # Running sequences: prompts

    def _chunks(self, instance: Instance, draft: Draft, budget: int) -> int:
        """Cut prompts into what the budget leaves, the most urgent first. Returns tokens planned."""
        used = 0
        admitted = {row.slot for row in draft.admit}
        for sequence in sorted(instance.prefilling, key=urgency):
            if sequence.slot in admitted:
                continue
            count = min(sequence.known - sequence.planned, budget - used)
            if count > 0:
                self._chunk(instance, draft, sequence, count)
                used += count
            elif sequence.known - sequence.planned == 1:
                # With one id left the slot would decode by itself.
                draft.work.append(Work(sequence.slot, 0))
        return used

    def _chunk(self, instance: Instance, draft: Draft, sequence: Sequence, count: int) -> None:
        draft.work.append(Work(sequence.slot, count))
        draft.prompt_tokens += count
        self.counters.computed_tokens += count
        self.counters.recomputed_tokens += sequence.repeats(sequence.planned, count)
        sequence.planned += count
        instance.backlog -= count
        if sequence.planned == sequence.known:
            instance.prefilling.remove(sequence)
            draft.firsts.append(sequence)
            # Drawn before, and lost with the results that were under way when it was sent back.
            self.counters.recomputed_tokens += sequence.repeats(sequence.known, sequence.reached)
            instance.start_decoding(sequence, draft.seq + 1, sequence.known)

    # Waiting sequences

    def _admit(
        self,
        instance: Instance,
        draft: Draft,
        queue: WaitQueue,
        fleet: Many[Instance],
        budget: int,
        now: float,
        urgent: bool = False,
    ) -> int:
        """Seat waiting sequences. `urgent`: only those that somebody who runs has to make way for, if need
        be. Returns what is left of the budget (-1: not looked at)."""
        outlook = Outlook(
            fleet, self.policy, self.reservation, self.fetching, self.rules, self.max_running, now, instance,
            draft,
        )  # fmt: skip
        room = outlook.openings(instance)
        if instance.state is State.DRAINING or (urgent and self.policy.joins_together):
            return budget
        passed_over = 0
        for sequence in queue:
            if not urgent and (room <= 0 or (budget == 0 and not self.policy.joins_together)):
                return budget
            if passed_over == MAX_PASSED_OVER:
                return budget
            if not self._welcome(instance, sequence, fleet) or self.fetching.waits(sequence, now):
                continue
            if urgent and not self.room.outranks(instance, sequence, now):
                return budget
            if budget < 0:
                budget = self._budget(instance)
            if draft.ids and draft.ids + len(sequence.request.prompt) + len(sequence.out) > MAX_FRAME_IDS:
                return budget
            seat = find_seat(instance, sequence, self.reservation)
            if len(fleet) > 1 and not sequence.request.pin:
                candidates = outlook.candidates(sequence, seat)
                chosen = self.placement.choose(candidates, sequence.order, instance.id, self.rng)
                if chosen.instance != instance.id:
                    outlook.promise(chosen)
                    passed_over += 1
                    continue
            if not self.policy.joins_together and self._comes_by_itself(instance, outlook, sequence, seat):
                passed_over += 1
                continue
            if (room <= 0 or not seat.fits) and not (
                urgent and self.room.make_way(instance, draft, sequence, seat, room, now)
            ):
                # Nobody overtakes the first in the queue, or a long request would wait for ever.
                return budget
            if self.fetching.begin(instance, draft, sequence, seat, now):
                room -= 1
                continue
            queue.remove(sequence)
            budget = max(0, budget - self._seat(instance, draft, sequence, seat, budget, now))
            room -= 1
        return budget

    def _comes_by_itself(self, instance: Instance, outlook: Outlook, sequence: Sequence, seat: Seat) -> bool:
        """Whether more of its beginning is being computed or fetched for somebody else there, enough that
        waiting for the result pays. Others may pass meanwhile."""
        soon, _ = outlook.soon(instance, sequence)
        missing_s = (soon - len(seat.shared)) * instance.info.block_tokens * instance.fit.cost.per_token_s
        return missing_s > instance.fit.cost.fixed_s

    def _welcome(self, instance: Instance, sequence: Sequence, fleet: Many[Instance]) -> bool:
        request = sequence.request
        if request.warming is not None or request.pin not in ("", instance.id):
            return False
        if request.canary:
            return True
        chosen = instance.state is State.READY if request.pin else instance in fleet
        return chosen and not misfit(len(request.prompt), request.sampling.max_tokens, instance.info)

    def _seat(
        self, instance: Instance, draft: Draft, sequence: Sequence, seat: Seat, budget: int, now: float
    ) -> int:
        """Give it a slot and blocks and its first chunk. Returns prompt tokens planned."""
        request = sequence.request
        pool = instance.pool
        pool.share(seat.shared)
        if seat.copy_from >= 0:
            # The source must not be handed out before the copy has been made.
            pool.share([seat.copy_from])
            instance.rest([seat.copy_from], -1, draft.seq)
        taken = pool.take(seat.need)
        if taken is None:
            raise RuntimeError(f"{instance.id}: a sequence was seated without room")
        if seat.copy_from >= 0:
            draft.kv_ops.append(KvOp("copy", seat.copy_from, taken[0]))
        slot = instance.free_slots.pop()
        ids = sequence.ids()
        draft.ids += len(ids)
        sequence.instance = instance
        sequence.slot = slot
        sequence.blocks = seat.shared + taken
        sequence.shared = len(seat.shared)
        sequence.known = len(ids)
        sequence.planned = seat.cached
        sequence.reserved = seat.reserve
        sequence.hashes = None
        instance.reserved += seat.reserve
        instance.table[slot] = sequence
        sequence.enter(Phase.PREFILL, now)
        if sequence.cached < 0:
            sequence.cached = min(seat.cached, len(request.prompt))
            self.counters.prompt_tokens += len(request.prompt)
            self.counters.prefix_hit_tokens += sequence.cached
        if (
            len(request.sequences) > 1
            and request.sampling.prompt_logprobs is None
            and seat.cached + instance.info.block_tokens <= len(request.prompt)
        ):
            request.warming = sequence
        draft.admit.append(
            Admit(
                slot, sequence.choice, len(request.prompt), ids, seat.cached, sequence.blocks,
                request.sampling, request.salt,
            )
        )  # fmt: skip
        if seat.cached == len(ids) - 1:
            self.counters.recomputed_tokens += sequence.repeats(seat.cached, sequence.reached)
            draft.firsts.append(sequence)
            instance.start_decoding(sequence, draft.seq, seat.cached)
            return 1
        instance.running[sequence] = Lane.PREFILL
        instance.prefilling.append(sequence)
        instance.backlog += len(ids) - seat.cached
        count = min(len(ids) - seat.cached, budget)
        if count > 0:
            self._chunk(instance, draft, sequence, count)
        return count

    def _issue(self, instance: Instance, draft: Draft, now: float) -> Frame:
        released, instance.leaving = instance.leaving, []
        kept, instance.keeping = instance.keeping, []
        step = Step(
            instance=instance.id,
            epoch=self.epoch,
            owner=self.owner,
            incarnation=instance.incarnation,
            seq=draft.seq,
            admit=draft.admit,
            work=draft.work,
            blocks=draft.extend,
            release=released,
            kv_ops=draft.kv_ops,
            offload=kept,
            fetch=draft.fetch,
        )
        cost_s = instance.fit.cost.step_s(instance.decoding, draft.prompt_tokens)
        frame = Frame(step, now, draft.firsts, cost_s)
        instance.ahead_s += cost_s
        instance.next_seq += 1
        if not instance.in_flight:
            instance.progress_at = now
        instance.in_flight.append(frame)
        return frame
