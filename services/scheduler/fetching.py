"""Bringing the beginning of a waiting sequence from the second tier instead of computing it.

A fetch is begun where the sequence would otherwise be admitted: a frame hands out blocks to it, and the
sequence keeps its place in the queue, while others may pass. Once the instance has told how it ended, what
came is an ordinary prefix hit; what did not come is computed. Each attempt has one fetch.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

from services.scheduler.draft import Draft
from services.scheduler.instances import FetchUnderWay, Instance
from services.scheduler.seat import Seat, prefix_hashes
from services.scheduler.sequences import Sequence
from shared.ids import BlockHash
from shared.wire import Fetch


@dataclass(frozen=True)
class FetchRules:
    """When a fetch is worth it, and for how long it is waited for."""

    lookup_s: float = 0.005
    """What the shared index may take to answer; sequences are held back for it that long at most,"""
    lookup_share: float = 0.02
    """or for this part of the time that computing what they lack would take,"""
    lookup_most_s: float = 0.05
    """up to this: a machine that is busy answers late when most is at stake, too."""
    lookup_worth: float = 4.0
    """They are looked up if computing what they lack takes so many times `lookup_s`."""
    refresh_s: float = 5.0
    """Those at the head of the queue are looked up anew after so long."""
    refresh_first: int = 16
    share: float = 0.75
    """Of the time of computing the same, a fetch may be expected to take at most this."""
    least_blocks: int = 2
    patience_s: float = 1.0
    """A sequence waits for a fetch as long as was expected, once more as long as computing it would have
    taken, and so much longer."""
    most_s: float = 15.0
    """But never longer than this."""
    end_s: float = 30.0
    """An instance that never tells how a fetch ended, which takes 10 s at most, is claimed anew."""


def blocks_in_tier(instance: Instance, sequence: Sequence) -> int:
    """How many of its leading blocks the tier of that instance is believed to hold; 0 while the instance
    cannot say what a fetch takes."""
    info = instance.info
    tier = info.tier
    measured = tier and info.tier_fixed_s >= 0.0 and info.tier_block_s >= 0.0
    measured = measured and info.tier_fixed_s + info.tier_block_s > 0.0
    if not measured or sequence.request.sampling.prompt_logprobs is not None:
        return 0
    held = sequence.hints.get(tier, 0)
    if sequence.offloaded is not None and sequence.offloaded[0] == tier:
        held = max(held, sequence.offloaded[1])
    return held


class Fetching:
    """Stateless but for its rules: what is under way is the instance's."""

    def __init__(self, rules: FetchRules) -> None:
        self.rules = rules

    def waits(self, sequence: Sequence, now: float) -> bool:
        """Whether it is held back: for its hints, or for a fetch that has not been given up."""
        if sequence.fetch is not None:
            if now < sequence.fetch.give_up:
                return True
            sequence.stop_fetching(now)
        return now < sequence.hold_until

    def hold_s(self, sequence: Sequence, fleet: Many[Instance]) -> float:
        """For how long it may be held back to hear what a tier holds of it; 0: that could change nothing, by
        what the instances hold themselves."""
        request, rules = sequence.request, self.rules
        if request.canary or request.sampling.prompt_logprobs is not None or sequence.offloaded is not None:
            return 0.0
        tokens = len(request.prompt) + len(sequence.out)
        lacking_s = 0.0
        for instance in fleet:
            if instance.info.tier:
                known = len(instance.pool.find(prefix_hashes(instance, sequence)))
                missing = tokens - known * instance.info.block_tokens
                lacking_s = max(lacking_s, missing * instance.fit.cost.per_token_s)
        if lacking_s <= rules.lookup_worth * rules.lookup_s:
            return 0.0
        return max(rules.lookup_s, min(rules.lookup_share * lacking_s, rules.lookup_most_s))

    def blocks_to_fetch(self, instance: Instance, sequence: Sequence, cached: int, now: float) -> int:
        """How many blocks after the `cached` ones it pays to fetch; 0: none."""
        if sequence.fetch_tried == sequence.attempt:
            return 0
        count = min(blocks_in_tier(instance, sequence), len(prefix_hashes(instance, sequence))) - cached
        if count < self.rules.least_blocks:
            return 0
        cost = instance.fit.cost
        compute_s = count * instance.info.block_tokens * cost.per_token_s
        fetch_s = self.fetch_s(instance, count, now)
        # It also costs the frame that begins it.
        return count if fetch_s <= self.rules.share * compute_s - cost.fixed_s else 0

    def fetch_s(self, instance: Instance, count: int, now: float) -> float:
        """Seconds until a fetch begun now would be over, those under way first."""
        info = instance.info
        ahead_s = max((fetch.due - now for fetch in instance.fetches.values()), default=0.0)
        return max(0.0, ahead_s) + info.tier_fixed_s + count * info.tier_block_s

    def begin(self, instance: Instance, draft: Draft, sequence: Sequence, seat: Seat, now: float) -> bool:
        """Begin a fetch for a sequence that could be admitted now, if that pays. False: it does not."""
        if not blocks_in_tier(instance, sequence):
            return False
        rules, pool, size = self.rules, instance.pool, instance.info.block_tokens
        kept = seat.shared
        count = self.blocks_to_fetch(instance, sequence, len(kept), now) if seat.copy_from < 0 else 0
        if not count:
            return False
        hashes = prefix_hashes(instance, sequence)[len(kept) : len(kept) + count]
        due = now + instance.ahead_s + self.fetch_s(instance, count, now)
        compute_s = count * size * instance.fit.cost.per_token_s
        pool.share(kept)
        taken = pool.take(count)
        if taken is None:
            raise RuntimeError(f"{instance.id}: a fetch was begun without room")
        known = len(sequence.request.prompt) + len(sequence.out)
        fetch = FetchUnderWay(
            op=instance.next_op,
            sequence=sequence,
            kept=kept,
            blocks=taken,
            hashes=hashes,
            reserve=seat.need + seat.reserve - count,
            left_tokens=max(1, known - (len(kept) + count) * size),
            begun=now,
            due=due,
            give_up=min(due + compute_s + rules.patience_s, now + rules.most_s),
            end_by=now + rules.end_s,
        )
        instance.next_op += 1
        instance.fetches[fetch.op] = fetch
        sequence.fetch = fetch
        sequence.fetch_tried = sequence.attempt
        wire_hashes: list[bytes] = list(hashes)
        draft.fetch.append(Fetch(fetch.op, instance.info.tier, list(taken), wire_hashes))
        return True


def soon_cached(
    instance: Instance, sequence: Sequence, now: float, drafted: Many[Sequence] = ()
) -> tuple[int, float]:
    """(blocks, seconds): how many of its leading blocks are being computed or fetched on the instance right
    now, and for how long a fetch among these goes on. `drafted`: whose ids the frame in the making computes.
    """
    request = sequence.request
    computing = [*drafted, *instance.unconfirmed()]
    if not (computing or instance.fetches) or request.sampling.prompt_logprobs is not None:
        return 0, 0.0
    hashes = prefix_hashes(instance, sequence)
    most = 0
    for other in computing:
        if other.request.priority <= request.priority:
            most = max(most, common_beginning(hashes, prefix_hashes(instance, other)))
    wait_s = 0.0
    for fetch in instance.fetches.values():
        if now < fetch.give_up:
            first = len(fetch.kept)
            also = common_beginning(hashes[first:], fetch.hashes)
            if also and first + also > most:
                most, wait_s = first + also, max(0.0, fetch.due - now)
    return most, wait_s


def common_beginning(a: Many[BlockHash], b: Many[BlockHash]) -> int:
    """Length of the common beginning of two chains: equal somewhere is equal before."""
    low, high = 0, min(len(a), len(b))
    if not high or a[0] != b[0]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
