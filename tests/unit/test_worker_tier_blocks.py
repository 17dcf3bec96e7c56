"""Random frames with fetches, offloads and claims, and a tier that moves whenever it can do most harm.

The mock's blocks have contents that depend on every id before: going on from a wrong one raises `WrongKv`.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from random_frames import NAME, SHAPE, RandomScheduler

from services.worker.compute import Compute, Outcome
from services.worker.mock import MockCosts, MockExecutor
from services.worker.mock_kv import MockKv
from services.worker.slots import AppliedStep, Batch
from services.worker.step import ExecutorInfo, SlotArrays, StepInput, StepOutput
from services.worker.tier.arrivals import Arrival, Arrivals
from services.worker.tier.outbox import Job, Outbox
from shared.blocks import chain, root_hash
from shared.tier.frames import Link
from shared.wire import Admit, Fetch, KvOp, Step, Stored

PLACES = 3


class InlineTier:
    """`SecondTier` without threads: `move` is one step of either of them, chosen by chance."""

    def __init__(self, rng: random.Random, memory: MockKv) -> None:
        self.rng = rng
        self.memory = memory
        self.outbox = Outbox(PLACES, 1000)
        self.outbox.wanted = True
        self.arrivals = Arrivals()
        self.staging = [b""] * PLACES
        self.held: dict[bytes, bytes] = {}
        """What the tier has."""
        self.right: dict[bytes, bytes] = {}
        """What each hash named when it was confirmed."""
        self.ended: deque[tuple[tuple[int, int], int]] = deque()
        self.job: Job | None = None
        self.digest: bytes | None = None
        self.arrival: Arrival | None = None
        self.fetched = 0

    # What the engine says.

    def knows(self, link: Callable[[int], Link]) -> None:
        self.outbox.link = link

    def apply(self, work: AppliedStep, session: int) -> None:
        for each in work.reused:
            self.outbox.renew(each, self.rng.random() * 100)
        for block, block_hash in work.offload:
            self.outbox.urge(block, block_hash)
        for block, block_hash in work.evicted:
            saving = self.outbox.give_up(block, block_hash)
            if saving is not None:
                self.staging[saving.place] = bytes(self.memory.view(block))
                self.outbox.save(saving)
        for fetch in work.fetch:
            self.arrivals.begin(session, fetch, 0.0)

    def stored(self, stored: list[Stored]) -> None:
        for row in stored:
            content = bytes(self.memory.view(row.block))
            assert self.right.setdefault(row.hash, content) == content
            self.outbox.offer(row.block, row.hash)  # type: ignore[arg-type]

    def computed(self, tokens: int, seconds: float) -> None: ...

    def end(self, key: tuple[int, int]) -> None:
        self.arrivals.end(key)

    def begin(self) -> None:
        self.arrivals.end_all()

    def broken(self) -> None:
        self.outbox.tear()

    def close(self) -> None: ...

    # The threads.

    def move(self) -> None:
        self.rng.choice([self.send, self.send, self.send, self.fetch])()
        assert all(content == self.right[named] for named, content in self.held.items())

    def send(self) -> None:
        job = self.job
        if job is None:
            self.job = self.outbox.take()
        elif self.digest is None:
            self.digest = sha256(self.content(job)).digest()
            # The look at `torn` and the sending are one move or two.
            if self.rng.random() < 0.5:
                self.send()
        else:
            content = self.content(job)
            kept = not job.torn and sha256(content).digest() == self.digest
            if kept:
                self.held[job.block_hash] = content
            self.outbox.done(job, kept)
            self.job = self.digest = None

    def content(self, job: Job) -> bytes:
        return self.staging[job.place] if job.place >= 0 else bytes(self.memory.view(job.block))

    def fetch(self) -> None:
        if self.arrival is None:
            self.arrival = self.arrivals.take()
            return
        arrival = self.arrival
        fetch, at = arrival.fetch, arrival.count
        content = self.held.get(fetch.hashes[at]) if at < len(fetch.hashes) else None
        if arrival.over or content is None or self.rng.random() < 0.1:
            self.ended.append((arrival.key, at))
            self.arrival = None
            return
        self.memory.write(fetch.blocks[at], memoryview(content))
        arrival.count += 1
        self.fetched += 1


@dataclass
class FetchingScheduler(RandomScheduler):
    seen: list[list[bytes]] = field(default_factory=list)
    """Chains of all sequences admitted so far."""
    fetches: dict[int, Fetch] = field(default_factory=dict)
    op: int = 0

    def plan(self) -> Step:
        rng = self.rng
        offload = [block for block in self.hash_of if rng.random() < 0.05]
        fetch = [self.bring()] if self.seen and rng.random() < 0.4 and self.can_admit() else []
        step = super().plan()
        return msgspec.structs.replace(step, offload=offload, fetch=[each for each in fetch if each])

    def bring(self) -> Fetch | None:
        hashes = [each for each in self.rng.choice(self.seen) if each not in self.known]
        spare = len(self.blocks) - (len(self.running) + 2) * SHAPE.max_blocks
        if not hashes or len(hashes) > spare:
            return None
        self.op += 1
        self.fetches[self.op] = Fetch(self.op, "tier-t", self.take(len(hashes)), hashes)
        return self.fetches[self.op]

    def is_left(self, block: int) -> bool:
        return super().is_left(block) and not any(block in each.blocks for each in self.fetches.values())

    def admit(self, copies: list[KvOp]) -> Admit:
        made = super().admit(copies)
        hashes: list[bytes] = list(
            chain(root_hash(NAME, SHAPE.block_tokens, made.salt), made.ids, SHAPE.block_tokens)
        )
        if hashes:
            self.seen.append(hashes)
        return made

    def end(self, op: int, count: int) -> None:
        fetch = self.fetches.pop(op)
        self.blocks += fetch.blocks
        for block, block_hash in list(zip(fetch.blocks, fetch.hashes, strict=True))[:count]:
            if block_hash not in self.known:
                self.known[block_hash] = block
                self.hash_of[block] = block_hash

    def claim(self, inventory: list[Any]) -> None:
        """A new session: what the instance says it holds is all there is."""
        self.slots = list(range(SHAPE.max_slots))
        self.blocks = list(range(SHAPE.blocks_total))
        for each in (self.running, self.resting, self.fetches, self.known, self.hash_of):
            each.clear()
        for block, block_hash in inventory:
            if block_hash not in self.known:
                self.known[block_hash] = block
                self.hash_of[block] = block_hash
        self.got = self.sent
        self.op = 0


class Moving:
    """An executor beside which the tier's threads go on, just before it computes."""

    def __init__(self, inner: MockExecutor, before: Callable[[], None]) -> None:
        self.inner = inner
        self.before = before
        self.info = inner.info

    def run(self, step: StepInput, slots: SlotArrays) -> StepOutput:
        self.before()
        return self.inner.run(step, slots)

    def close(self) -> None: ...


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), depth=st.integers(0, 3))
def test_no_hash_ever_names_wrong_content_here_or_in_the_tier(seed: int, depth: int) -> None:
    play(seed, depth, 150)


def test_the_random_worlds_do_fetch_and_share_what_they_fetched() -> None:
    assert sum(play(seed, 2, 150) for seed in range(5)) > 10


def play(seed: int, depth: int, frames: int) -> int:
    """Blocks that were fetched."""
    rng = random.Random(seed)
    info = ExecutorInfo(NAME, SHAPE.block_tokens, SHAPE.blocks_total, SHAPE.max_len, SHAPE.vocab_size, 0, 0)
    mock = MockExecutor(info, SHAPE.max_slots, MockCosts(token_s=1e-12))
    memory = mock.kv_memory
    assert memory is not None
    tier = InlineTier(rng, memory)

    def moves() -> None:
        for _ in range(rng.choice([0, 0, 1, 3, 10])):
            tier.move()

    compute = Compute(Moving(mock, moves), Batch(SHAPE, NAME), tier=tier)  # type: ignore[arg-type]
    scheduler = FetchingScheduler(rng, depth)
    session = compute.session = 1
    waiting: deque[Step] = deque()
    for _ in range(frames):
        waiting.append(msgspec.structs.replace(scheduler.plan(), incarnation=session))
        if len(waiting) > depth:
            outcome = compute.step(waiting.popleft(), 0.0)
            assert isinstance(outcome, Outcome), outcome
            done = outcome.done
            scheduler.learn(done.stopped, [(row.block, row.hash) for row in done.stored], done.seq)
        moves()
        while tier.ended:
            key, count = tier.ended.popleft()
            # Another rank may have got less.
            count = rng.choice([count, count, rng.randint(0, count)])
            end = compute.end_fetch(key, count)
            assert (end is not None) == (key[0] == session)
            if end is not None:
                scheduler.end(key[1], count)
        if rng.random() < 0.06:
            session += 1
            compute.session = session
            compute.begin()
            waiting.clear()
            scheduler.claim(compute.batch.hashes.all_blocks())
        for block, block_hash in compute.batch.hashes.all_blocks():
            assert bytes(memory.view(block)) == tier.right[block_hash]
    return tier.fetched
