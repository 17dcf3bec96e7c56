"""Virtual time over a load that never lets up: nobody waits for ever, and nobody urgent for the others."""

import random

import pytest

from services.scheduler.admission import ExpectedOutput, ReserveNothing
from services.scheduler.desk import DeskRules
from services.scheduler.policy import ContinuousPolicy
from services.scheduler.preempt import LeastHarm
from tests.bench.preemption import overdue, quantile
from tests.bench.simulated import SimulatedMesh
from tests.bench.simulation import VOCAB, Request, SimulatedTier, Size, StepCost

AGING_S = 5.0
COST = StepCost(fixed_s=0.05, per_decode_s=0.001, per_token_s=0.001)


def crowd(seconds: float, urgent_load: float, seed: int, level: int = 1) -> list[Request]:
    """Requests of which the urgent take `urgent_load` of what four slots can do, others half that."""
    rng = random.Random(seed)
    made: list[Request] = []
    service_s = 12 * (COST.fixed_s + 4 * COST.per_decode_s) / 4
    for priority, load in ((-level, urgent_load), (0, urgent_load / 2)):
        now = 0.0
        while (now := now + rng.expovariate(load / service_s)) < seconds:
            prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randint(20, 60))]
            made.append(Request(prompt, rng.randint(4, 20), 200, now, priority))
    return made


def serve(requests: list[Request], aging_s: float, slots: int = 4, blocks: int = 40) -> SimulatedMesh:
    size = Size(slots=slots, blocks=blocks, max_len=400, max_step_tokens=512)
    desk = DeskRules(queue_bound=100_000, aging_s=aging_s)
    simulated = SimulatedMesh(
        ContinuousPolicy(), ReserveNothing(), size, 1, COST, preemption=LeastHarm(), desk=desk
    )
    simulated.run(requests)
    return simulated


def waits(requests: list[Request], priority: int) -> list[float]:
    return [request.waited_s for request in requests if request.priority == priority]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_stream_of_urgent_requests_delays_others_by_no_more_than_the_aging_of_their_level(seed: int):
    requests = crowd(25.0, 1.1, seed)
    serve(requests, AGING_S)
    urgent, usual = waits(requests, -1), waits(requests, 0)
    assert len(urgent) > 60
    assert len(usual) > 30
    # One aging in the queue, one more if sent back; the load is above what can be done, so all wait.
    assert quantile(usual, 0.99) <= max(urgent) + 2 * AGING_S + 1.0
    assert max(request.preemptions for request in requests) <= 6


def test_without_aging_they_would_wait_until_the_stream_ends():
    requests = crowd(25.0, 1.1, 1)
    serve(requests, 1e6)
    assert quantile(waits(requests, 0), 0.99) > max(waits(requests, -1)) + 2 * AGING_S + 1.0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_urgent_wait_for_steps_in_flight_and_their_own_prompt_only(seed: int):
    requests = crowd(20.0, 0.3, seed, level=100)
    rest = crowd(20.0, 3.0, seed + 10)
    for request in rest:
        request.priority = 0
    requests = [request for request in requests if request.priority] + rest
    simulated = serve(requests, AGING_S, slots=12, blocks=60)
    ratios = [overdue(simulated, request) for request in requests if request.priority]
    assert len(ratios) > 15
    assert simulated.core.counters.preemptions_urgent >= 3
    # Of two that come within one step the second may wait for the step that the first begins in.
    assert quantile(ratios, 0.9) <= 1.1


def test_expectation_is_learnt_until_few_are_preempted_and_little_is_computed_again():
    requests = crowd(60.0, 0.9, 5)
    for request in requests:
        request.priority = 0
    size = Size(slots=16, blocks=60, max_len=400, max_step_tokens=512)
    simulated = SimulatedMesh(ContinuousPolicy(), ExpectedOutput(), size, 1, COST)
    simulated.run(requests)
    counters = simulated.core.counters
    assert counters.recomputed_tokens < 0.03 * counters.computed_tokens


@pytest.mark.parametrize("seed", range(4))
def test_frames_hold_and_all_is_served_where_blocks_are_scarce_and_priorities_many(seed: int):
    rng = random.Random(seed)
    requests = crowd(4.0, 2.0, seed)
    for request in requests:
        request.priority = rng.choice((-3, -1, 0, 0, 0, 2))
    simulated = serve(requests, rng.choice((0.5, AGING_S, 100.0)), slots=10, blocks=rng.choice((18, 24, 30)))
    counters = simulated.core.counters
    assert counters.preemptions > counters.preemptions_urgent > 0
    assert not simulated.core.fleet.instances["i0"].running


def test_victims_have_their_blocks_back_from_the_second_tier_and_compute_little_again():
    recomputed = []
    for tier in (None, SimulatedTier(1000, fixed_s=0.005, block_s=0.0005)):
        rng = random.Random(3)
        requests = [
            Request([rng.randrange(2, VOCAB) for _ in range(rng.randint(50, 90))], 80, 200, number / 10)
            for number in range(30)
        ]
        size = Size(slots=8, blocks=36, max_len=400, max_step_tokens=512)
        cost = StepCost(fixed_s=0.02, per_decode_s=0.001, per_token_s=0.005)
        simulated = SimulatedMesh(ContinuousPolicy(), ReserveNothing(), size, 1, cost, LeastHarm(), tier)
        simulated.run(requests)
        counters = simulated.core.counters
        assert counters.preemptions > 10
        assert (counters.preemptions_offload > 5) == (tier is not None)
        assert (counters.offload_saved_tokens > 0) == (tier is not None)
        recomputed.append(counters.recomputed_tokens / counters.preemptions)
    assert recomputed[1] < 0.6 * recomputed[0]
