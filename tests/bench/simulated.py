"""One simulated instance under the real scheduler core: batching, admission and preemption compared."""

import random
from collections.abc import Sequence

from services.scheduler.admission import Reservation
from services.scheduler.core import Core, Rules
from services.scheduler.desk import DeskRules
from services.scheduler.policy import BatchPolicy
from services.scheduler.preempt import Preemption
from shared.wire import Done, Step
from tests.bench.books import Books
from tests.bench.simulation import (
    MODEL,
    PATIENT_DESK,
    SMOLLM,
    Machine,
    Request,
    SimulatedTier,
    Simulation,
    Size,
    StepCost,
)

INSTANCE = "i0"


class SimulatedMesh(Simulation):
    """One scheduler, one instance, one client."""

    def __init__(
        self,
        policy: BatchPolicy,
        reservation: Reservation,
        size: Size,
        seed: int,
        cost: StepCost = SMOLLM,
        preemption: Preemption | None = None,
        tier: SimulatedTier | None = None,
        desk: DeskRules = PATIENT_DESK,
    ) -> None:
        rules = Rules(model=MODEL, desk=desk)
        core = Core("s0", rules, policy, reservation, rng=random.Random(seed), now=0.0, preemption=preemption)
        super().__init__(core, 1, size, cost, tier)
        self.books = Books(size.block_tokens)
        self.step_ends: dict[int, float] = {}
        """frame → when its result came."""

    def run(self, requests: Sequence[Request]) -> float:
        """Serve all requests; returns the seconds from the first arrival to the last token.

        Raises AssertionError if any of them ends in another way than by its own length.
        """
        begin = self.start()
        instance = self.core.fleet.instances[INSTANCE]
        self.books = Books(self.books.block_tokens, set_aside=lambda: instance.reserved)
        self.serve(requests)
        self.step_ends = {seq: when - begin for seq, when in self.step_ends.items()}
        return max((request.last or 0.0) for request in requests) - min(request.at for request in requests)

    def arriving(self, request: Request) -> None:
        request.ahead = self.core.fleet.instances[INSTANCE].next_seq - 1

    def received(self, frame: Step) -> None:
        self.books.on_step(frame)

    def computed(self, machine: Machine, done: Done) -> None:
        self.books.on_done(done)
        self.step_ends[done.seq] = self._now
