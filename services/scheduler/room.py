"""Blocks for running sequences, and who gives theirs back when there are none left."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from operator import attrgetter

from services.scheduler.admission import Reservation, peak_growth
from services.scheduler.counters import Counters
from services.scheduler.draft import Draft
from services.scheduler.fetching import FetchRules
from services.scheduler.instances import Instance, Lane
from services.scheduler.preempt import Candidate, LeastHarm, Preemption
from services.scheduler.seat import Seat
from services.scheduler.sequences import Sequence
from shared.wire import Extend, Work

SOON_FRAMES = 4
"""Who reaches its last token within so many frames is waited for: that takes less than computing again."""

FREE_OF_IT = 4
"""So many preemptions make up for one level of priority, as waiting for `aging_s` does."""

_PRIORITY_OF = attrgetter("request.priority")


@dataclass(frozen=True, slots=True)
class Loss:
    """What sending a running sequence back costs."""

    computed: int
    """Tokens whose KV it has."""
    kept: int
    """Leading blocks that others hold, too: they stay."""
    named: int
    """Leading blocks that have a hash: `kept`, and those that a second tier can keep."""
    back_s: float
    offload: bool
    """Whether it is cheaper to fetch them than to compute them again."""


class Room:
    """Stateless but for its rules: it works on the instance and the draft it is given."""

    def __init__(
        self, reservation: Reservation, counters: Counters, requeue: Callable[[Sequence], None]
    ) -> None:
        """`requeue` takes preempted sequences back."""
        self.reservation = reservation
        self.counters = counters
        self.policy: Preemption = LeastHarm()
        self.aging_s = 30.0
        """Waiting that makes up for one level of priority."""
        self.fetch = FetchRules()
        self._requeue = requeue

    # Running sequences

    def grow(self, instance: Instance, draft: Draft, due: Many[Sequence], now: float) -> None:
        """Give blocks to those whose table is full, oldest first; those that get none skip this frame."""
        hungry = list(instance.stalled)
        for sequence in dict.fromkeys(due):
            # Twice in it: readmitted, and due at the frame it was once due at before.
            if sequence.due != draft.seq or instance.running.get(sequence) is not Lane.DECODE:
                continue
            computed = sequence.planned + draft.seq - sequence.since
            if computed >= sequence.end:
                instance.running[sequence] = Lane.SPENT
                instance.decoding -= 1
                instance.spent += 1
                continue
            sequence.planned, sequence.since = computed, draft.seq
            hungry.append(sequence)
        hungry.sort(key=urgency)
        for sequence in hungry:
            was_stalled = instance.running[sequence] is Lane.STALLED
            taken = instance.pool.take(1)
            if taken is None:
                if not was_stalled:
                    instance.running[sequence] = Lane.STALLED
                    instance.decoding -= 1
                    instance.stalled.append(sequence)
                    sequence.stalled_at = now
                continue
            if was_stalled:
                instance.stalled.remove(sequence)
                sequence.go_on(now)
            else:
                instance.decoding -= 1
            sequence.blocks = sequence.blocks + taken
            draft.extend.append(Extend(sequence.slot, taken))
            if sequence.reserved:
                sequence.reserved -= 1
                instance.reserved -= 1
            instance.start_decoding(sequence, draft.seq, sequence.planned)
        if instance.stalled:
            self._relieve(instance, draft)
            draft.work.extend(Work(sequence.slot, 0) for sequence in instance.stalled)

    def _relieve(self, instance: Instance, draft: Draft) -> None:
        """Preempt until the blocks on their way back will do. Those that are spent, or will be in a moment,
        return theirs by themselves.

        The oldest of the most urgent class stays whatever it holds: it ends, and so does everybody in turn.
        """
        if instance.spent or any(
            lane is Lane.DECODE and seq.end - instance.computed(seq, lane) <= SOON_FRAMES
            for seq, lane in instance.running.items()
        ):
            return
        admitted = {row.slot for row in draft.admit}
        while instance.stalled:
            missing = len(instance.stalled) - on_their_way(instance)
            if missing <= 0:
                return
            first = min(instance.running, key=lambda seq: (self._level(seq), seq.order))
            # Whom this very frame admits cannot be taken off by it.
            others = [seq for seq in instance.running if seq is not first and seq.slot not in admitted]
            candidates = self._candidates(
                instance, [seq for seq in others if not seq.request.pin] or others, missing
            )
            victims = self.policy.choose(candidates, missing)
            if not victims:
                return
            for victim in victims:
                self._preempt(instance, draft, victim.who)
                self.reservation.preempted()

    # A more urgent newcomer

    def outranks(self, instance: Instance, sequence: Sequence, now: float) -> bool:
        """Whether somebody runs there that would have to make way for it."""
        if max(map(_PRIORITY_OF, instance.running), default=0) <= sequence.request.priority:
            return False
        return next(self._below(instance, sequence, now), None) is not None

    def make_way(
        self, instance: Instance, draft: Draft, sequence: Sequence, seat: Seat, slots: int, now: float
    ) -> bool:
        """Let strictly less urgent running sequences make way for a waiting one. `slots`: how many may join.

        True: it may be seated. Blocks merely set aside for their output are its own at once. For those that
        they hold some are preempted, the least harmful, as few as will do, and nobody if even all of them
        would not do; what they held can be had when the frames in flight are done, so `draft.awaited`.
        """
        admitted = {row.slot for row in draft.admit}
        # Whom this very frame admits cannot be taken off by it.
        below = [seq for seq in self._below(instance, sequence, now) if seq.slot not in admitted]
        if not below:
            return False
        pool = instance.pool
        candidates = self._candidates(instance, below, seat.need)
        shared = seat.shared if seat.copy_from < 0 else [*seat.shared, seat.copy_from]
        # Whoever stalls and need not make way takes one each before it.
        before = sum(1 for seq in instance.stalled if seq not in below)
        free = pool.free - pool.idle(shared) - before
        coming = on_their_way(instance)
        rows = [seq.outlook for seq in instance.running if seq not in below]
        growth = peak_growth([*rows, (seat.reserve, seat.need)])
        all_in_all = free + coming + sum(candidate.frees for candidate in candidates)
        if seat.need + growth > all_in_all:
            return False
        if seat.need <= free and slots > 0:
            return True
        missing = seat.need - free - coming
        crowded = slots <= 0 and not any(row.slot >= 0 for row in instance.resting)
        if missing > 0 or crowded:
            if missing <= 0:
                candidates = [replace(candidate, frees=1) for candidate in candidates]
            for victim in self.policy.choose(candidates, missing):
                self._preempt(instance, draft, victim.who)
                self.counters.preemptions_urgent += 1
        draft.awaited = bool(instance.in_flight)
        # With nothing in flight all of it is back already.
        return not draft.awaited and seat.need <= pool.free - pool.idle(shared) and bool(instance.free_slots)

    def _below(self, instance: Instance, sequence: Sequence, now: float) -> Iterator[Sequence]:
        """Who runs and has to make way: of lower priority, and not so long kept waiting or so often sent back
        as to make up for it. Equals never do, so two of them cannot take turns at sending each other back."""
        request = sequence.request
        if request.pin:
            return
        for other, lane in instance.running.items():
            levels = other.request.priority - request.priority
            if levels <= 0 or lane is Lane.SPENT or other.request.pin:
                continue
            suffered_s = other.waited_s + other.preemptions * self.aging_s / FREE_OF_IT
            if suffered_s - sequence.waited_s - (now - sequence.changed) < levels * self.aging_s:
                yield other

    # Victims

    def _level(self, sequence: Sequence) -> int:
        return sequence.request.priority - int(sequence.times.get("preempted_s", 0.0) / self.aging_s)

    def _candidates(
        self, instance: Instance, sequences: Iterable[Sequence], blocks: int
    ) -> list[Candidate[Sequence]]:
        """`blocks`: how many are wanted. So many of a victim's are handed out anew, and those that the others
        grow into until one of them ends, which is about what each has before it; the rest it finds again."""
        running = [seq for seq in sequences if instance.running[seq] is not Lane.SPENT]
        left = [self._left(seq) for seq in running]
        taken = blocks + round(sum(left) / max(1, len(left)) / instance.info.block_tokens)
        fixed_s = instance.fit.cost.fixed_s
        candidates = []
        for sequence, more in zip(running, left):
            frees = sum(1 for block in sequence.blocks if instance.pool.holders(block) == 1)
            lost_s = find_loss(instance, sequence, self.fetch).back_s - fixed_s
            candidates.append(
                Candidate(
                    who=sequence,
                    level=self._level(sequence),
                    order=sequence.order,
                    frees=frees + (instance.running[sequence] is Lane.STALLED),
                    back_s=fixed_s + lost_s * min(1.0, taken / max(1, frees)),
                    written=len(sequence.out),
                    left=more,
                    preemptions=sequence.preemptions,
                )
            )
        return candidates

    def _left(self, sequence: Sequence) -> int:
        """Output tokens it is expected to write yet."""
        written = len(sequence.out)
        return max(
            1, self.reservation.expected_tokens(sequence.request.sampling.max_tokens, written) - written
        )

    def _preempt(self, instance: Instance, draft: Draft, victim: Sequence) -> None:
        """Off it goes, with what the second tier is to keep of it; nothing of it stays in the frame."""
        loss = find_loss(instance, victim, self.fetch)
        size = instance.info.block_tokens
        if loss.offload:
            instance.keeping += victim.blocks[loss.kept : loss.named]
            victim.offloaded = (instance.info.tier, loss.named)
            self.counters.preemptions_offload += 1
            self.counters.offloaded_tokens += (loss.named - loss.kept) * size
        else:
            victim.offloaded = None
        draft.preempted = True
        self.counters.preemptions += 1
        draft.drop(victim)
        instance.leave(victim)
        self._requeue(victim)


def urgency(sequence: Sequence) -> tuple[int, int]:
    """Most urgent first, then the first to arrive."""
    return sequence.request.priority, sequence.order


def on_their_way(instance: Instance) -> int:
    """Blocks that are free once nothing in flight names them."""
    if not instance.returning:
        return 0
    resting = Counter(block for row in instance.resting for block in row.blocks)
    return sum(1 for block, times in resting.items() if instance.pool.holders(block) == times)


def find_loss(instance: Instance, sequence: Sequence, rules: FetchRules) -> Loss:
    """What would be lost with it, and the cheaper way to bring that back, by measured rates and the rules by
    which a fetch will then be found worth it."""
    pool, info, cost = instance.pool, instance.info, instance.fit.cost
    size = info.block_tokens
    computed = instance.computed(sequence, instance.running[sequence])
    request = sequence.request
    # Of equal blocks only the first has the hash; its twin can go without a loss.
    twins = pool.find(request.hashes or ()) if request.hash_kind == (info.fingerprint, size) else []
    kept = 0
    for block in sequence.blocks:
        if pool.holders(block) == 1 and (kept >= len(twins) or twins[kept] == block):
            break
        kept += 1
    named = kept
    for block in sequence.blocks[kept:]:
        if not pool.is_hashed(block):
            break
        named += 1
    again_s = (named - kept) * size * cost.per_token_s
    fetch_s = info.tier_fixed_s + (named - kept) * info.tier_block_s
    rest_s = cost.fixed_s + max(0, computed - named * size) * cost.per_token_s
    offload = (
        info.tier != ""
        and info.tier_block_s > 0.0
        and named - kept >= rules.least_blocks
        and fetch_s <= rules.share * again_s - cost.fixed_s
    )
    return Loss(computed, kept, named, rest_s + (fetch_s if offload else again_s), offload)
