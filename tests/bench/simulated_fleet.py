"""The real scheduler core driving several simulated instances in virtual time: placements compared without
noise. Each instance is what `tests/bench/simulated.py` has one of; the broker takes no time."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from services.scheduler.admission import ExpectedOutput
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
from services.scheduler.placement import Placement
from services.scheduler.policy import ContinuousPolicy
from services.worker.compute import Compute, Outcome
from services.worker.session import Session
from services.worker.slots import Batch, BatchShape
from services.worker.step import ExecutorInfo
from shared.wire import Ack, Claimed, Fetch, Fetched, InstanceInfo, Sampling, Step, Submit, SubmitSeq
from tests.bench.simulated import (
    CLIENT,
    END_ID,
    LOOKUP_S,
    MODEL,
    ROW,
    VOCAB,
    CostExecutor,
    Request,
    SimulatedTier,
    Size,
    StepCost,
)


@dataclass
class Load:
    """What one instance had to do."""

    requests: int = 0
    busy_s: float = 0.0
    prefill_tokens: int = 0


@dataclass
class FleetOutcome:
    """Of one run."""

    requests: list[Request]
    cached: list[int]
    """Prompt tokens of each that were not computed."""
    loads: list[Load]
    wall_s: float

    @property
    def ttft(self) -> list[float]:
        return sorted((r.first or 0.0) - r.at for r in self.requests)

    @property
    def mean_ttft(self) -> float:
        return sum(self.ttft) / len(self.requests)

    def percentile(self, share: float) -> float:
        return self.ttft[min(len(self.requests) - 1, int(share * len(self.requests)))]

    @property
    def hit_rate(self) -> float:
        return sum(self.cached) / sum(len(r.prompt) for r in self.requests)

    @property
    def imbalance(self) -> float:
        """Busy time of the busiest instance over the mean."""
        busy = [load.busy_s for load in self.loads]
        return max(busy) * len(busy) / sum(busy)


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


class SimulatedFleet:
    """One scheduler, `count` equal instances, one client."""

    def __init__(
        self,
        count: int,
        placement: Placement,
        size: Size,
        seed: int,
        cost: StepCost | None = None,
        tier: SimulatedTier | None = None,
    ) -> None:
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._turning = False
        self._acked = (0, "", 0)
        self._open = 0
        self.requests: list[Request] = []
        self.cached: list[int] = []
        self.tier = tier
        cost = cost or StepCost()
        info = ExecutorInfo(
            "simulated", size.block_tokens, size.blocks, size.max_len, VOCAB, 1 / cost.per_token_s,
            cost.fixed_s + cost.per_decode_s,
        )  # fmt: skip
        shape = BatchShape(size.slots, size.max_len, size.block_tokens, size.blocks, VOCAB)
        self.machines = {}
        for number in range(count):
            name = f"i{number}"
            executor = CostExecutor(info, cost, self.requests)
            compute = Compute(executor, Batch(shape, "simulated"), clock=partial(self._clock, executor))
            row = InstanceInfo(
                name, MODEL, "simulated", "mixed", "ready", 1, size.block_tokens, size.blocks, size.slots,
                size.max_len, VOCAB, size.max_step_tokens, info.prefill_tok_s, info.decode_step_s,
                tier=ROW if tier else "", tier_fixed_s=tier.fixed_s if tier else 0.0,
                tier_block_s=tier.block_s if tier else 0.0,
            )  # fmt: skip
            self.machines[name] = Machine(name, executor, compute, Session(row))
        rules = Rules(model=MODEL, desk=DeskRules(queue_bound=100_000))
        self.core = Core(
            "s0", rules, ContinuousPolicy(), ExpectedOutput(), rng=random.Random(seed), now=0.0,
            placement=placement,
        )  # fmt: skip

    def _clock(self, executor: CostExecutor) -> float:
        return self._now + executor.spent_s

    def run(self, requests: Sequence[Request]) -> FleetOutcome:
        """Serve all requests. Raises AssertionError if any of them ends in another way than by its length."""
        self._every(0.05, lambda: self._feed(Tick()))
        self._every(0.5, lambda: self._feed(LeaseSeen(known=True)))
        self._every(0.25, self._acknowledge)
        for machine in self.machines.values():
            self._every(0.5, partial(self._beat, machine))
        while not self._is_ready():
            self._next()
        # Long past the slow start of instances that join later.
        begin = self._now
        for machine in self.machines.values():
            machine.load = Load()
        self.requests[:] = requests
        self.cached = [0] * len(requests)
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
        loads = [machine.load for machine in self.machines.values()]
        return FleetOutcome(self.requests, self.cached, loads, self._now - begin)

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
        return [i.state for i in self.core.fleet.instances.values()] == [State.READY] * len(self.machines)

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
        ends = (END_ID,) if request.output < request.limit else ()
        sampling = Sampling(max_tokens=request.limit, seed=number, temperature=0.0, stop_token_ids=ends)
        self._feed(
            Submit(
                client=CLIENT, request_id=f"r{number}", prompt=request.prompt, seqs=[SubmitSeq(number, 0)],
                sampling=sampling, timeout_s=80_000.0, queue_timeout_s=80_000.0,
            )
        )  # fmt: skip

    def _receive(self, effect: SendTokens) -> None:
        frame = effect.tokens
        if effect.client != CLIENT:
            return
        self._acked = (frame.epoch, frame.owner, frame.seq)
        for row in frame.rows:
            request = self.requests[row.handle]
            request.tokens += len(row.ids)
            request.first = self._now if request.first is None else request.first
            request.last = self._now
        for end in frame.ends:
            self.requests[end.handle].reason = end.reason
            self.cached[end.handle] = end.cached_tokens
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
            self._feed(done)
            self._compute_next(machine)

        self._at(self._now + max(took_s, 0.0002), computed)

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

    def _beat(self, machine: Machine) -> None:
        self._feed(machine.session.beat())
