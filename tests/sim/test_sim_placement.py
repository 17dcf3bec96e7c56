"""What placement promises, on simulated fleets in virtual time; `tests.bench.placement` has it all."""

import pytest

from tests.bench.placement import burst, mooncake, offline, serve, system_prompts

AMPLE = 80_000


@pytest.mark.parametrize("count", [300, pytest.param(1500, marks=pytest.mark.slow)])
def test_nearly_all_is_found_cached_that_a_single_cache_without_end_would_find(count: int):
    trace = mooncake(count, slower=1.5)
    served = serve("ttft", trace, 2, AMPLE, seed=0)
    assert served.hit_rate >= offline(trace, 1) - 0.02
    assert served.imbalance < 1.2


def test_round_robin_finds_what_two_caches_in_turn_find():
    trace = mooncake(200, slower=3.0)
    served = serve("round-robin", trace, 2, AMPLE, seed=0)
    assert served.hit_rate == pytest.approx(offline(trace, 2), abs=0.01)


def test_system_prompts_that_do_not_all_fit_one_instance_are_divided():
    requests = system_prompts(180, 1.2, seed=1)
    ours, turns = (serve(policy, requests, 2, 1000, seed=1) for policy in ("ttft", "round-robin"))
    assert ours.mean_ttft * 2 <= turns.mean_ttft
    assert ours.imbalance < 1.2


def test_a_burst_with_one_prefix_is_no_herd():
    requests = burst(24, seed=2)
    ours, turns = (serve(policy, requests, 2, AMPLE, seed=2) for policy in ("ttft", "round-robin"))
    assert ours.mean_ttft <= 1.1 * turns.mean_ttft
    assert min(load.requests for load in ours.loads) >= 6
