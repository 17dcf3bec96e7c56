"""Random legal frames, as a scheduler would send them that is ahead of what it knows, and ways to compute.

Not a test: imported by the tests of the worker's batch.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.worker.compute import Begun, Compute, Outcome
from services.worker.shape import BatchShape
from shared.blocks import chain, root_hash
from shared.wire import Admit, Extend, KvOp, Sampling, Step, StepTiming, Stopped, Work

SHAPE = BatchShape(max_slots=6, max_len=40, block_tokens=4, blocks_total=70, vocab_size=64)
NAME = "fp"


def frame(**content: object) -> Step:
    fields = {"instance": "w", "epoch": 1, "owner": "o", "incarnation": 1, "seq": 1} | content
    return Step(**fields)  # type: ignore[arg-type]


@dataclass
class Planned:
    """A sequence as a scheduler plans it: ahead of what it knows."""

    slot: int
    ids: list[int]
    prompt_len: int
    sampling: Sampling
    salt: str
    blocks: list[int]
    computed: int
    known: int
    # both including what the frames under way will bring, should nothing stop it
    stopped: bool = False


@dataclass
class RandomScheduler:
    """Sends legal frames, `depth` of them before it sees a result; shares prefixes, preempts, copies."""

    rng: random.Random
    depth: int
    calm: float = 0.0
    """How often nobody may come or go: such frames may be begun early."""
    top_k: tuple[int, ...] = (0,)
    temperature: tuple[float, ...] = (1.0,)
    slots: list[int] = field(default_factory=lambda: list(range(SHAPE.max_slots)))
    blocks: list[int] = field(default_factory=lambda: list(range(SHAPE.blocks_total)))
    running: dict[int, Planned] = field(default_factory=dict)
    known: dict[bytes, int] = field(default_factory=dict)
    hash_of: dict[int, bytes] = field(default_factory=dict)
    resting: deque[tuple[int, list[int], int]] = field(default_factory=deque)
    # (number of the last frame that names them, blocks, slot): reusable when its result is in
    sent: int = 0
    got: int = 0

    def plan(self) -> Step:
        rng = self.rng
        calm = rng.random() < self.calm
        while self.resting and self.resting[0][0] <= self.got:
            _, blocks, slot = self.resting.popleft()
            self.slots.append(slot)
            # Others may have come to share them meanwhile.
            self.blocks += [block for block in blocks if self.is_left(block)]
        chances = (0.0, 0.0) if calm else (0.02, 0.6)
        release = [s for s, seq in self.running.items() if rng.random() < chances[seq.stopped]]
        for slot in release:
            seq = self.running.pop(slot)
            self.resting.append((self.sent, seq.blocks, slot))
        copies: list[KvOp] = []
        admit = [self.admit(copies) for _ in range(0 if calm else rng.randint(0, 2)) if self.can_admit()]
        work, extend = [], []
        for slot, seq in self.running.items():
            left = seq.known - seq.computed
            count = 1
            if left > 1:
                count = rng.choice([0, rng.randint(1, left), left])
                if count or rng.random() < 0.3:
                    work.append(Work(slot, count))
            elif rng.random() < 0.1:
                count = rng.randint(0, 1)
                work.append(Work(slot, count))
            missing = -(-(seq.computed + count) // SHAPE.block_tokens) - len(seq.blocks)
            # Admission saw that they exist; a little ahead of need at times.
            if missing > 0:
                more = self.take(missing)
                seq.blocks += more
                extend.append(Extend(slot, more))
            if seq.known + 1 > SHAPE.max_len:
                continue
            seq.computed += count
            if seq.computed == seq.known and count:
                seq.known += 1
        self.sent += 1
        return frame(seq=self.sent, admit=admit, work=work, blocks=extend, release=release, kv_ops=copies)

    def is_left(self, block: int) -> bool:
        held = any(block in seq.blocks for seq in self.running.values())
        return not held and not any(block in blocks for _, blocks, _ in self.resting)

    def can_admit(self) -> bool:
        reserve = (len(self.running) + 1) * SHAPE.max_blocks
        return bool(self.slots) and len(self.blocks) > reserve - sum(
            len(s.blocks) for s in self.running.values()
        )

    def take(self, count: int) -> list[int]:
        taken = [self.blocks.pop(self.rng.randrange(len(self.blocks))) for _ in range(count)]
        for block in taken:
            self.forget(block)
        return taken

    def forget(self, block: int) -> None:
        block_hash = self.hash_of.pop(block, None)
        if block_hash is not None and self.known.get(block_hash) == block:
            del self.known[block_hash]

    def admit(self, copies: list[KvOp]) -> Admit:
        rng = self.rng
        length = rng.randint(1, 20)
        salt = rng.choice(["", "tenant"])
        ids = [7] * length if rng.random() < 0.5 else [rng.randrange(64) for _ in range(length)]
        hashes = chain(root_hash(NAME, SHAPE.block_tokens, salt), ids[: length - 1], SHAPE.block_tokens)
        shared: list[int] = []
        for block_hash in hashes:
            if block_hash not in self.known:
                break
            shared.append(self.known[block_hash])
        for block in shared:
            if block in self.blocks:
                self.blocks.remove(block)
        computed = len(shared) * SHAPE.block_tokens
        fresh = self.take(rng.randint(1, 2) if len(self.blocks) > 2 else 1)
        room = (len(shared) + len(fresh)) * SHAPE.block_tokens
        if shared and computed < length - 1 and rng.random() < 0.3:
            # Part of somebody's block, copied (its content is of no concern here).
            copies.append(KvOp("copy", shared[-1], fresh[0]))
            computed = rng.randint(computed, min(length - 1, computed + SHAPE.block_tokens - 1, room))
        sampling = Sampling(
            max_tokens=rng.randint(1, 30),
            seed=rng.randrange(1 << 64),
            min_tokens=rng.choice([0, 0, 3]),
            stop_token_ids=tuple(rng.sample(range(64), rng.choice([0, 1, 6]))),
            top_k=rng.choice(self.top_k),
            temperature=rng.choice(self.temperature),
        )
        prompt_len = rng.randint(max(1, length - sampling.max_tokens + 1), length)
        slot = self.slots.pop(rng.randrange(len(self.slots)))
        self.running[slot] = Planned(slot, ids, prompt_len, sampling, salt, shared + fresh, computed, length)
        return Admit(slot, rng.randrange(3), prompt_len, ids, computed, shared + fresh, sampling, salt)

    def learn(self, stopped: list[Stopped], stored: list[tuple[int, bytes]], number: int) -> None:
        self.got = number
        for row in stopped:
            if row.slot in self.running:
                self.running[row.slot].stopped = True
        for block, block_hash in stored:
            if block_hash not in self.known:
                self.known[block_hash] = block
                self.hash_of[block] = block_hash


def told(outcome: Outcome) -> tuple[Any, ...]:
    """All that leaves the worker, but for how long it took."""
    timing = StepTiming(
        prefill_tokens=outcome.done.timing.prefill_tokens, decode_tokens=outcome.done.timing.decode_tokens
    )
    done = msgspec.structs.replace(outcome.done, timing=timing)
    return done, outcome.stored, outcome.removed, outcome.running


def in_pairs(compute: Compute, frames: list[Step], has_come: Callable[[], bool]) -> list[Outcome]:
    """Each frame begun before the one before is finished, if it `has_come` by then and may be."""
    outcomes: list[Outcome] = []
    under_way: Begun | None = None
    for step in frames:
        early = under_way is not None and has_come() and compute.may_follow(step, under_way)
        if under_way is not None and not early:
            outcomes.append(compute.finish(under_way))
        begun = compute.start(step, 0.0)
        assert isinstance(begun, Begun)
        if under_way is not None and early:
            outcomes.append(compute.finish(under_way))
        under_way = begun
    return outcomes if under_way is None else [*outcomes, compute.finish(under_way)]


def schedule(compute: Compute, scheduler: RandomScheduler, count: int) -> tuple[list[Step], list[Outcome]]:
    """Frames as they come of results, and those results, one frame after the other."""
    sent: deque[Step] = deque()
    frames: list[Step] = []
    outcomes: list[Outcome] = []
    for _ in range(count):
        sent.append(scheduler.plan())
        if len(sent) <= scheduler.depth:
            continue
        frames.append(sent.popleft())
        outcome = compute.step(frames[-1], 0.0)
        assert isinstance(outcome, Outcome)
        outcomes.append(outcome)
        done = outcome.done
        scheduler.learn(done.stopped, [(row.block, row.hash) for row in done.stored], done.seq)
    return frames, outcomes
