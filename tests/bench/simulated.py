"""The real scheduler core driving a simulated instance in virtual time: policies compared without noise.

The instance is the worker's own gate, session and batch; only the model is replaced by a cost in seconds per
step, so block tables, slots and frames are the real ones.
"""

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from services.scheduler.admission import Reservation
from services.scheduler.core import Core, Rules
from services.scheduler.desk import DeskRules
from services.scheduler.events import (
    AskClaim,
    AskInventory,
    ClaimAnswer,
    Hint,
    LeaseSeen,
    LookUp,
    SendStep,
    SendTokens,
    Tick,
    Turn,
)
from services.scheduler.instances import State
from services.scheduler.policy import BatchPolicy
from services.scheduler.preempt import Preemption
from services.worker.compute import BrokenSession, Compute
from services.worker.session import Session
from services.worker.slots import Batch, BatchShape
from services.worker.step import ExecutorInfo, SlotArrays, StepInput, StepOutput
from shared.wire import Ack, Claimed, Fetch, Fetched, InstanceInfo, Sampling, Step, Submit, SubmitSeq
from tests.bench.books import Books

MODEL, CLIENT, INSTANCE = "simulated", "bench", "i0"
END_ID, VOCAB = 1, 1000
ROW = "tier-simulated"
LOOKUP_S = 0.001
PATIENT_DESK = DeskRules(queue_bound=100_000)


@dataclass(frozen=True)
class StepCost:
    """Seconds. The defaults are a float16 SmolLM2-135M on two cores."""

    fixed_s: float = 0.018
    per_decode_s: float = 0.0035
    per_token_s: float = 0.00155


@dataclass(frozen=True)
class Size:
    """Of the instance."""

    slots: int
    blocks: int
    block_tokens: int = 16
    max_len: int = 8192
    max_step_tokens: int = 2048


@dataclass
class Request:
    """`output` tokens come before it ends itself; `limit` is what the client allows (max_tokens)."""

    prompt: list[int]
    output: int
    limit: int
    at: float = 0.0
    priority: int = 0
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    reason: str = ""
    preemptions: int = 0
    waited_s: float = 0.0
    """In the queue, the time after a preemption included."""
    fetch_s: float = 0.0
    """Of this, while its beginning came from the second tier."""
    ahead: int = 0
    """The last frame in flight when it arrived."""
    admitted: int = 0
    """The frame that first admitted it."""


@dataclass
class SimulatedTier:
    """A second tier of so many blocks that keeps every block that became full, the least recently used go
    first. Writing is free, as it is done in the background; a fetch takes `fixed_s` and `block_s` each."""

    blocks: int
    fixed_s: float
    block_s: float
    held: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    fetched: int = 0
    """Blocks that came back."""

    def keep(self, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            self.held[block_hash] = None
            self.held.move_to_end(block_hash)
        while len(self.held) > self.blocks:
            self.held.popitem(last=False)

    def depth(self, hashes: Sequence[bytes]) -> int:
        """How many of the chain's leading blocks it has."""
        return next((n for n, block_hash in enumerate(hashes) if block_hash not in self.held), len(hashes))


class CostExecutor:
    """Draws filler ids, and the end id where the request's own length says so. Time is a number."""

    def __init__(self, info: ExecutorInfo, cost: StepCost, requests: Sequence[Request]) -> None:
        self.info = info
        self.spent_s = 0.0
        self._cost = cost
        self._requests = requests

    def run(self, step: StepInput, slots: SlotArrays) -> StepOutput:
        decodes = int(np.count_nonzero((step.counts == 1) & step.samples))
        cost = self._cost
        prefill = int(step.counts.sum()) - decodes
        self.spent_s += cost.fixed_s + cost.per_decode_s * decodes + cost.per_token_s * prefill
        tokens = np.full(len(step.slots), -1, np.int32)
        for row in np.flatnonzero(step.samples).tolist():
            slot = int(step.slots[row])
            sampling = slots.sampling[slot]
            assert sampling is not None
            written = int(slots.known[slot]) - int(slots.prompt_len[slot]) + 1
            last = sampling.stop_token_ids and written >= self._requests[sampling.seed].output
            tokens[row] = END_ID if last else 2
        return StepOutput(tokens)

    def close(self) -> None:
        """Nothing is held."""


class SimulatedMesh:
    """One scheduler, one instance, one client; the broker takes no time (frames in flight hide it anyway)."""

    def __init__(
        self,
        policy: BatchPolicy,
        reservation: Reservation,
        size: Size,
        seed: int,
        cost: StepCost = StepCost(),
        preemption: Preemption | None = None,
        tier: SimulatedTier | None = None,
        desk: DeskRules = PATIENT_DESK,
    ) -> None:
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._turning = False
        self._busy = False
        self._frames: list[Step] = []
        self.requests: list[Request] = []
        self._open = 0
        self.books = Books(size.block_tokens)
        self.tier = tier
        self.step_ends: dict[int, float] = {}
        """frame → when its result came."""
        self._told: list[Fetched] = []
        info = ExecutorInfo(
            "simulated", size.block_tokens, size.blocks, size.max_len, VOCAB, 1 / cost.per_token_s,
            cost.fixed_s + cost.per_decode_s,
        )  # fmt: skip
        self._executor = CostExecutor(info, cost, self.requests)
        shape = BatchShape(size.slots, size.max_len, size.block_tokens, size.blocks, VOCAB)
        self._compute = Compute(
            self._executor, Batch(shape, "simulated"), clock=lambda: self._now + self._executor.spent_s
        )
        self._session = Session(
            InstanceInfo(INSTANCE, MODEL, "simulated", "mixed", "ready", 1, size.block_tokens, size.blocks,
                         size.slots, size.max_len, VOCAB, size.max_step_tokens, info.prefill_tok_s,
                         info.decode_step_s, tier=ROW if tier else "",
                         tier_fixed_s=tier.fixed_s if tier else 0.0,
                         tier_block_s=tier.block_s if tier else 0.0)
        )  # fmt: skip
        rules = Rules(model=MODEL, desk=desk)
        self.core = Core(
            "s0", rules, policy, reservation, rng=random.Random(seed), now=0.0, preemption=preemption
        )

    def run(self, requests: Sequence[Request]) -> float:
        """Serve all requests; returns the seconds from the first arrival to the last token.

        Raises AssertionError if any of them ends in another way than by its own length.
        """
        self._every(0.05, lambda: self._feed(Tick()))
        self._every(0.5, self._beat)
        self._every(0.5, lambda: self._feed(LeaseSeen(known=True)))
        self._every(0.25, self._acknowledge)
        self._acked = (0, "", 0)
        while not self._is_ready():
            self._next()
        begin = self._now
        instance = self.core.fleet.instances[INSTANCE]
        self.books = Books(self.books.block_tokens, set_aside=lambda: instance.reserved)
        self.requests[:] = requests
        self._open = len(requests)
        for number, request in enumerate(requests):
            self._at(begin + request.at, lambda n=number: self._submit(n))
        while self._open:
            self._next()
        for request in requests:
            assert request.tokens == request.output, f"{request.tokens} tokens, wanted {request.output}"
            request.first = (request.first or 0.0) - begin
            request.last = (request.last or 0.0) - begin
        self.step_ends = {seq: when - begin for seq, when in self.step_ends.items()}
        self.core.check()
        return max((request.last or 0.0) for request in requests) - min(request.at for request in requests)

    # Time

    def _at(self, when: float, do: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (max(when, self._now), self._order, do))

    def _every(self, seconds: float, do: Callable[[], None]) -> None:
        def fire() -> None:
            do()
            self._at(self._now + seconds, fire)

        self._at(self._now, fire)

    def _next(self) -> None:
        self._now, _, do = heapq.heappop(self._heap)
        do()

    def _is_ready(self) -> bool:
        instance = self.core.fleet.instances.get(INSTANCE)
        return instance is not None and instance.state is State.READY

    # Scheduler and client

    def _feed(self, event: Any) -> None:
        self._carry_out(self.core.handle(event, self._now))
        if not self._turning:
            self._turning = True
            self._at(self._now, self._turn)

    def _turn(self) -> None:
        self._turning = False
        self._carry_out(self.core.handle(Turn(), self._now))

    def _carry_out(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, SendStep):
                _, reaction = self._session.on_step(effect.step, self._now)
                if reaction.run:
                    self.books.on_step(effect.step)
                    self._frames.append(effect.step)
                    self._compute_next()
            elif isinstance(effect, SendTokens):
                self._receive(effect)
            elif isinstance(effect, LookUp):
                depth = self.tier.depth(effect.hashes) if self.tier else 0
                hint = Hint(effect.client, effect.handles, {ROW: depth})
                self._at(self._now + LOOKUP_S, partial(self._feed, hint))
            elif isinstance(effect, AskClaim):
                _, incarnation = self._session.on_claim(effect.claim, 2)
                self._compute.session = incarnation
                blocks, after = self._compute.begin()
                self._answer(effect.claim.claim_id, incarnation, blocks, after)
            elif isinstance(effect, AskInventory):
                blocks, after = self._compute.page(effect.inventory.offset)
                self._answer("", effect.inventory.incarnation, blocks, after)

    def _answer(self, claim_id: str, incarnation: int, blocks: list[Any], after: int) -> None:
        highest = self._session.gate.highest
        claimed = Claimed(
            ok=True, epoch=highest.epoch, owner=highest.owner, incarnation=incarnation,
            info=self._session.info, claim_id=claim_id, blocks=blocks, next_offset=after,
        )  # fmt: skip
        self._at(self._now, lambda: self._feed(ClaimAnswer(INSTANCE, claimed)))

    def _submit(self, number: int) -> None:
        request = self.requests[number]
        ends = (END_ID,) if request.output < request.limit else ()
        sampling = Sampling(max_tokens=request.limit, seed=number, temperature=0.0, stop_token_ids=ends)
        seqs = [SubmitSeq(number, 0)]
        request.ahead = self.core.fleet.instances[INSTANCE].next_seq - 1
        self._feed(
            Submit(
                client=CLIENT, request_id=f"r{number}", prompt=request.prompt, seqs=seqs, sampling=sampling,
                timeout_s=80_000.0, queue_timeout_s=80_000.0, priority=request.priority,
            )
        )  # fmt: skip

    def _receive(self, effect: SendTokens) -> None:
        frame = effect.tokens
        if effect.client != CLIENT:
            return
        self._acked = (frame.epoch, frame.owner, frame.seq)
        for row in frame.rows:
            request = self.requests[row.handle]
            assert row.index == request.tokens, "an index came twice or was left out"
            request.tokens += len(row.ids)
            request.first = self._now if request.first is None else request.first
            request.last = self._now
        for end in frame.ends:
            request = self.requests[end.handle]
            request.reason = end.reason
            request.preemptions = end.preemptions
            times = end.times
            request.fetch_s = times.transfer_s
            request.waited_s = times.queue_s + times.preempted_s + times.transfer_s
            self._open -= 1

    def _acknowledge(self) -> None:
        epoch, owner, seq = self._acked
        if epoch:
            self._feed(Ack(client=CLIENT, epoch=epoch, owner=owner, seq=seq))

    # Instance

    def _compute_next(self) -> None:
        if self._busy or not self._frames:
            return
        frame = self._frames.pop(0)
        for admit in frame.admit:
            request = self.requests[admit.sampling.seed] if self.requests else None
            if request is not None and not request.admitted:
                request.admitted = frame.seq
        self._before(frame)
        outcome = self._compute.step(frame, self._now)
        took_s, self._executor.spent_s = self._executor.spent_s, 0.0
        assert outcome is not None
        assert not isinstance(outcome, BrokenSession), outcome
        self._busy = True
        done = outcome.done
        if self.tier is not None:
            self.tier.keep(row.hash for row in done.stored)
        for fetch in frame.fetch:
            self._fetch(fetch)

        def computed() -> None:
            self._busy = False
            self._session.on_result(done)
            self.books.on_done(done)
            self.step_ends[done.seq] = self._now
            self._feed(done)
            self._compute_next()

        self._at(self._now + max(took_s, 0.0002), computed)

    # The second tier

    def _before(self, frame: Step) -> None:
        if self.tier is not None and frame.offload:
            hashes = (self._compute.batch.hashes.of(block) for block in frame.offload)
            self.tier.keep(block_hash for block_hash in hashes if block_hash is not None)

    def _fetch(self, fetch: Fetch) -> None:
        tier = self.tier
        assert tier is not None

        def ended() -> None:
            count = tier.depth(fetch.hashes)
            tier.keep(fetch.hashes[:count])
            tier.fetched += count
            self._compute.batch.fetched(fetch.op, count)
            self._told.append(Fetched(fetch.op, count))
            self._beat()

        self._at(self._now + tier.fixed_s + len(fetch.hashes) * tier.block_s, ended)

    def _beat(self) -> None:
        self._feed(msgspec.structs.replace(self._session.beat(), fetched=self._told[-8:]))
