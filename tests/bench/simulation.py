"""The real scheduler core driving simulated instances in virtual time: what experiments without noise share.

An instance is the worker's own gate, session and batch; only the model is replaced by a cost in seconds per
step, so block tables, slots and frames are the real ones. The broker takes no time: frames in flight hide it.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from services.scheduler.core import Core
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
from services.worker.compute import Compute, Outcome
from services.worker.session import Session
from services.worker.slots import Batch, BatchShape
from services.worker.step import ExecutorInfo, SlotArrays, StepInput, StepOutput
from shared.wire import Ack, Claimed, Done, Fetch, Fetched, InstanceInfo, Sampling, Step, Submit, SubmitSeq

MODEL, CLIENT = "simulated", "bench"
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


SMOLLM = StepCost()


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
    cached: int = 0
    """Prompt tokens that were not computed."""


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


@dataclass
class Load:
    """What one instance had to do."""

    requests: int = 0
    busy_s: float = 0.0
    prefill_tokens: int = 0


@dataclass(eq=False)
class Machine:
    """One simulated instance."""

    name: str
    executor: CostExecutor
    compute: Compute
    session: Session
    frames: list[Step] = field(default_factory=list)
    busy: bool = False
    load: Load = field(default_factory=Load)


class Simulation:
    """`core`, `count` equal instances, one client. Subclasses watch by `arriving`, `received`, `computed`."""

    def __init__(
        self, core: Core, count: int, size: Size, cost: StepCost, tier: SimulatedTier | None = None
    ) -> None:
        self.core = core
        self.tier = tier
        self.requests: list[Request] = []
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._turning = False
        self._acked = (0, "", 0)
        self._open = 0
        self.machines = {name: self._machine(name, size, cost) for name in (f"i{n}" for n in range(count))}

    def _machine(self, name: str, size: Size, cost: StepCost) -> Machine:
        info = ExecutorInfo(
            "simulated", size.block_tokens, size.blocks, size.max_len, VOCAB, 1 / cost.per_token_s,
            cost.fixed_s + cost.per_decode_s,
        )  # fmt: skip
        shape = BatchShape(size.slots, size.max_len, size.block_tokens, size.blocks, VOCAB)
        executor = CostExecutor(info, cost, self.requests)
        compute = Compute(executor, Batch(shape, "simulated"), clock=lambda: self._now + executor.spent_s)
        tier = self.tier
        row = InstanceInfo(
            name, MODEL, "simulated", "mixed", "ready", 1, size.block_tokens, size.blocks, size.slots,
            size.max_len, VOCAB, size.max_step_tokens, info.prefill_tok_s, info.decode_step_s,
            tier=ROW if tier else "", tier_fixed_s=tier.fixed_s if tier else 0.0,
            tier_block_s=tier.block_s if tier else 0.0,
        )  # fmt: skip
        return Machine(name, executor, compute, Session(row))

    # What subclasses watch

    def arriving(self, request: Request) -> None:
        """Before it is submitted."""

    def received(self, frame: Step) -> None:
        """An instance takes a frame of the scheduler."""

    def computed(self, machine: Machine, done: Done) -> None:
        """Before the scheduler hears of it."""

    # A run

    def start(self) -> float:
        """Until every instance is ready. Returns when that is."""
        self._every(0.05, lambda: self._feed(Tick()))
        for machine in self.machines.values():
            self._every(0.5, partial(self._beat, machine))
        self._every(0.5, lambda: self._feed(LeaseSeen(known=True)))
        self._every(0.25, self._acknowledge)
        while [i.state for i in self.core.fleet.instances.values()] != [State.READY] * len(self.machines):
            self._next()
        return self._now

    def serve(self, requests: Sequence[Request]) -> float:
        """Serve them all from now on; their times then count from now. Returns the seconds it took.

        Raises AssertionError if any of them ends in another way than by its own length.
        """
        begin = self._now
        self.requests[:] = requests
        self._open = len(requests)
        for number, request in enumerate(requests):
            self._at(begin + request.at, partial(self._submit, number))
        while self._open:
            self._next()
        for request in requests:
            assert request.tokens == request.output, f"{request.tokens} tokens, wanted {request.output}"
            request.first = (request.first or 0.0) - begin
            request.last = (request.last or 0.0) - begin
        self.core.check()
        return self._now - begin

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
                machine = self.machines[effect.step.instance]
                if machine.session.on_step(effect.step, self._now)[1].run:
                    self.received(effect.step)
                    machine.frames.append(effect.step)
                    self._compute_next(machine)
            elif isinstance(effect, SendTokens):
                self._receive(effect)
            elif isinstance(effect, LookUp):
                depth = self.tier.depth(effect.hashes) if self.tier else 0
                hint = Hint(effect.client, effect.handles, {ROW: depth})
                self._at(self._now + LOOKUP_S, partial(self._feed, hint))
            elif isinstance(effect, AskClaim):
                machine = self.machines[effect.instance]
                _, incarnation = machine.session.on_claim(effect.claim, 2)
                machine.compute.session = incarnation
                self._answer(machine, effect.claim.claim_id, incarnation, *machine.compute.begin())
            elif isinstance(effect, AskInventory):
                machine = self.machines[effect.instance]
                page = machine.compute.page(effect.inventory.offset)
                self._answer(machine, "", effect.inventory.incarnation, *page)

    def _answer(
        self, machine: Machine, claim_id: str, incarnation: int, blocks: list[Any], after: int
    ) -> None:
        highest = machine.session.gate.highest
        claimed = Claimed(
            ok=True, epoch=highest.epoch, owner=highest.owner, incarnation=incarnation,
            info=machine.session.info, claim_id=claim_id, blocks=blocks, next_offset=after,
        )  # fmt: skip
        self._at(self._now, partial(self._feed, ClaimAnswer(machine.name, claimed)))

    def _submit(self, number: int) -> None:
        request = self.requests[number]
        self.arriving(request)
        ends = (END_ID,) if request.output < request.limit else ()
        sampling = Sampling(max_tokens=request.limit, seed=number, temperature=0.0, stop_token_ids=ends)
        self._feed(
            Submit(
                client=CLIENT, request_id=f"r{number}", prompt=request.prompt, seqs=[SubmitSeq(number, 0)],
                sampling=sampling, timeout_s=80_000.0, queue_timeout_s=80_000.0, priority=request.priority,
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
            request, times = self.requests[end.handle], end.times
            request.reason = end.reason
            request.cached = end.cached_tokens
            request.preemptions = end.preemptions
            request.fetch_s = times.transfer_s
            request.waited_s = times.queue_s + times.preempted_s + times.transfer_s
            self._open -= 1

    def _acknowledge(self) -> None:
        epoch, owner, seq = self._acked
        if epoch:
            self._feed(Ack(client=CLIENT, epoch=epoch, owner=owner, seq=seq))

    # Instances

    def _compute_next(self, machine: Machine) -> None:
        if machine.busy or not machine.frames:
            return
        frame = machine.frames.pop(0)
        for admit in frame.admit if self.requests else ():
            request = self.requests[admit.sampling.seed]
            request.admitted = request.admitted or frame.seq
        self._offload(machine, frame)
        outcome = machine.compute.step(frame, self._now)
        assert isinstance(outcome, Outcome), outcome
        took_s, machine.executor.spent_s = machine.executor.spent_s, 0.0
        done = outcome.done
        machine.busy = True
        machine.load.requests += len(frame.admit)
        machine.load.busy_s += took_s
        machine.load.prefill_tokens += done.timing.prefill_tokens
        if self.tier is not None:
            self.tier.keep(row.hash for row in done.stored)
        for fetch in frame.fetch:
            self._fetch(machine, fetch)

        def computed() -> None:
            machine.busy = False
            machine.session.on_result(done)
            self.computed(machine, done)
            self._feed(done)
            self._compute_next(machine)

        self._at(self._now + max(took_s, 0.0002), computed)

    def _beat(self, machine: Machine) -> None:
        self._feed(machine.session.beat())

    # The second tier

    def _offload(self, machine: Machine, frame: Step) -> None:
        if self.tier is not None and frame.offload:
            self.tier.keep(held for _, held in machine.compute.batch.hashes.held(frame.offload))

    def _fetch(self, machine: Machine, fetch: Fetch) -> None:
        tier = self.tier
        assert tier is not None
        session = machine.compute.session

        def ended() -> None:
            count = tier.depth(fetch.hashes)
            tier.keep(fetch.hashes[:count])
            tier.fetched += count
            machine.compute.batch.fetched(fetch.op, count)
            machine.session.on_fetched(session, Fetched(fetch.op, count))
            self._beat(machine)

        self._at(self._now + tier.fixed_s + len(fetch.hashes) * tier.block_s, ended)
