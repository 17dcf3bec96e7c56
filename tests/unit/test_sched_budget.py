import random

import pytest

from services.scheduler.budget import BudgetRules, Cost, CostFit
from shared.wire import StepTiming


def timing(cost: Cost, decodes: int, prefill: int, noise: float = 1.0) -> StepTiming:
    return StepTiming(int(1e6 * noise * cost.step_s(decodes, prefill)), 0, 0, prefill, decodes)


def test_the_fit_finds_the_costs_behind_noisy_mixed_steps():
    rng = random.Random(3)
    true = Cost(0.020, 0.003, 0.0016)
    fit = CostFit(5000.0, 0.004)
    for _ in range(600):
        decodes, prefill = rng.randint(0, 32), rng.choice((0, 0, 16, 64, 128))
        fit.observe(timing(true, decodes, prefill, rng.uniform(0.9, 1.1)))
    for decodes, prefill in ((1, 0), (32, 0), (32, 64), (0, 256)):
        assert abs(fit.cost.step_s(decodes, prefill) / true.step_s(decodes, prefill) - 1) < 0.1


def test_what_a_prompt_token_costs_is_not_forgotten_while_only_decodes_run():
    true = Cost(0.020, 0.003, 0.0016)
    fit = CostFit(5000.0, 0.004)
    rng = random.Random(4)
    for _ in range(100):
        fit.observe(timing(true, rng.randint(0, 8), 64))
    for _ in range(5000):
        fit.observe(timing(true, rng.randint(1, 8), 0))
    assert abs(fit.cost.per_token_s / true.per_token_s - 1) < 0.15


def test_costs_stay_usable_when_every_step_is_the_same():
    fit = CostFit(1000.0, 0.02)
    for _ in range(2000):
        fit.observe(StepTiming(50_000, 0, 0, 0, 8))
    assert abs(fit.cost.step_s(8, 0) - 0.05) < 0.005
    assert fit.cost.per_token_s > 0


def test_a_slower_machine_is_noticed_within_a_hundred_steps():
    fit = CostFit(1000.0, 0.02)
    rng = random.Random(5)
    for factor in (1.0, 3.0):
        cost = Cost(0.01 * factor, 0.001 * factor, 0.001 * factor)
        for _ in range(100):
            fit.observe(timing(cost, rng.randint(0, 8), rng.choice((16, 64))))
    assert abs(fit.cost.step_s(4, 64) / Cost(0.03, 0.003, 0.003).step_s(4, 64) - 1) < 0.15


def test_prompts_get_what_decodes_leave_of_the_target():
    rules = BudgetRules(itl_target_s=0.25)
    tokens = rules.prefill_tokens(Cost(0.02, 0.003, 0.0016), 32, 2048)
    assert Cost(0.02, 0.003, 0.0016).step_s(32, tokens) <= 0.25
    assert tokens == int((0.25 - 0.02 - 0.096) / 0.0016)


def test_nearly_all_gaps_keep_the_target_on_a_machine_whose_speed_varies():
    rules, true, rng = BudgetRules(itl_target_s=0.25), Cost(0.02, 0.003, 0.0016), random.Random(6)
    fit, gaps = CostFit(600.0, 0.1), []
    for _ in range(3000):
        tokens = rules.prefill_tokens(fit.cost, 32, 2048, fit.overrun)
        measured = timing(true, 32, tokens, rng.gauss(1.0, 0.06))
        fit.observe(measured)
        gaps.append(measured.run_us * 1e-6)
    late = sum(gap > 0.25 for gap in gaps[100:]) / len(gaps[100:])
    assert late < 0.01
    assert sum(gaps) / len(gaps) > 0.19


def test_without_decodes_a_step_fills_the_cap():
    tokens = BudgetRules().prefill_tokens(Cost(0.02, 0.003, 0.0016), 0, 2048)
    assert tokens == int((0.5 - 0.02) / 0.0016)


def test_prompts_have_a_quarter_of_the_step_where_decodes_fill_the_target():
    cost = Cost(0.05, 0.003, 0.002)
    tokens = BudgetRules(itl_target_s=0.25).prefill_tokens(cost, 70, 2048)
    assert cost.per_token_s * tokens / cost.step_s(70, tokens) == pytest.approx(0.25, abs=0.01)
    assert cost.step_s(70, tokens) < 0.5


def test_prompts_get_on_even_where_decodes_fill_the_target():
    assert BudgetRules().prefill_tokens(Cost(0.3, 0.01, 0.01), 64, 2048) == BudgetRules().floor_tokens


def test_the_instance_s_own_limit_counts_decodes_too():
    assert BudgetRules().prefill_tokens(Cost(1e-5, 1e-6, 1e-6), 100, 512) == 412


def test_prompts_get_on_even_where_decodes_alone_reach_the_instance_s_limit():
    assert BudgetRules().prefill_tokens(Cost(1e-5, 1e-6, 1e-6), 32, 16) == 1


def test_more_frames_are_in_flight_the_shorter_steps_are():
    rules = BudgetRules()
    depths = [rules.depth(step_s) for step_s in (0.5, 0.05, 0.004, 0.002, 0.001, 0.0001)]
    assert depths == [2, 2, 2, 2, 4, 16]


def test_a_deep_window_is_refilled_half_at_a_time_and_a_shallow_one_at_once():
    rules = BudgetRules()
    assert [n for n in range(20) if rules.refills(n, 0.0001)] == list(range(9))
    assert [n for n in range(10) if rules.refills(n, 0.1)] == [0, 1]
