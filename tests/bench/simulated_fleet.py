"""Several simulated instances under the real scheduler core: placements compared."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.admission import ExpectedOutput
from services.scheduler.core import Core, Rules
from services.scheduler.placement import Placement
from services.scheduler.policy import ContinuousPolicy
from tests.bench.simulation import (
    MODEL,
    PATIENT_DESK,
    SMOLLM,
    Load,
    Request,
    SimulatedTier,
    Simulation,
    Size,
    StepCost,
)


@dataclass
class FleetOutcome:
    """Of one run."""

    requests: list[Request]
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
        return sum(r.cached for r in self.requests) / sum(len(r.prompt) for r in self.requests)

    @property
    def imbalance(self) -> float:
        """Busy time of the busiest instance over the mean."""
        busy = [load.busy_s for load in self.loads]
        return max(busy) * len(busy) / sum(busy)


class SimulatedFleet(Simulation):
    """One scheduler, `count` equal instances, one client."""

    def __init__(
        self,
        count: int,
        placement: Placement,
        size: Size,
        seed: int,
        cost: StepCost = SMOLLM,
        tier: SimulatedTier | None = None,
    ) -> None:
        rules = Rules(model=MODEL, desk=PATIENT_DESK)
        core = Core(
            "s0", rules, ContinuousPolicy(), ExpectedOutput(), rng=random.Random(seed), now=0.0,
            placement=placement,
        )  # fmt: skip
        super().__init__(core, count, size, cost, tier)

    def run(self, requests: Sequence[Request]) -> FleetOutcome:
        """Serve all requests. Raises AssertionError if any of them ends in another way than by its length."""
        self.start()
        for machine in self.machines.values():
            machine.load = Load()
        wall_s = self.serve(requests)
        return FleetOutcome(self.requests, [machine.load for machine in self.machines.values()], wall_s)
