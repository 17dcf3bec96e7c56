"""Chunk plans against an oracle that follows the definition, and against every other way to cut."""

import json
import random
import time
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_support import GIGABIT, MEMORY, QUARTER, smollm

from services.worker.parallel.crossover import Line
from services.worker.parallel.overlap import (
    Correction,
    Corrector,
    Costs,
    Link,
    Measured,
    Planner,
    Work,
    plan_chunks,
    simulate,
)

times = st.one_of(st.just(0.0), st.floats(1e-7, 1e-3))


@st.composite
def works(draw: st.DrawFn) -> Work:
    return Work(draw(times), draw(st.floats(1e-7, 1e-4)), draw(times))


@st.composite
def costs(draw: st.DrawFn, most_layers: int = 12) -> Costs:
    by_byte = st.one_of(st.just(0.0), st.floats(1e-12, 1e-7))
    link = Link(draw(times), draw(by_byte), draw(times))
    embed = Work(draw(times), 0.0)
    return Costs(
        draw(st.integers(1, most_layers)),
        draw(works()),
        draw(works()),
        link,
        4 * draw(st.integers(1, 1000)),
        draw(times),
        embed,
    )


@st.composite
def plans(draw: st.DrawFn, most_rows: int = 60, most_chunks: int = 12) -> tuple[int, ...]:
    rows = draw(st.integers(1, most_rows))
    inner = draw(st.sets(st.integers(1, rows), max_size=most_chunks - 1)) - {rows}
    return (0, *sorted(inner), rows)


def by_definition(plan: tuple[int, ...], c: Costs) -> tuple[float, float]:
    """(total, time with a message under way): each event as the brief has it, one asking for another."""
    sizes = [b - a for a, b in pairwise(plan)]
    stages = [c.embed, *[c.attend, c.feed] * c.layers]

    @cache
    def computed(stage: int, chunk: int) -> float:
        start = 0.0
        if chunk or stage:
            start = computed(stage, chunk - 1) if chunk else computed(stage - 1, len(sizes) - 1)
        if stage:
            start = max(start, landed(stage - 1, chunk))
        work, rows = stages[stage], sizes[chunk]
        return start + max(work.least_s, work.fixed_s + work.row_s * rows) + c.message_s

    @cache
    def left(stage: int, chunk: int) -> float:
        start = computed(stage, chunk)
        if chunk or stage:
            start = max(start, left(stage, chunk - 1) if chunk else left(stage - 1, len(sizes) - 1))
        return start + c.link.busy_s + c.link.s_per_byte * c.row_bytes * sizes[chunk]

    def landed(stage: int, chunk: int) -> float:
        return left(stage, chunk) + c.link.latency_s

    spans = [
        (computed(stage, chunk), landed(stage, chunk))
        for stage in range(len(stages))
        for chunk in range(len(sizes))
    ]
    under_way, reached = 0.0, 0.0
    for start, stop in spans:
        under_way += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return spans[-1][1], under_way


@settings(max_examples=50, deadline=None)
@given(plans(), costs())
def test_a_wavefront_is_what_its_definition_says(plan: tuple[int, ...], c: Costs) -> None:
    found = simulate(plan, c)
    total_s, under_way_s = by_definition(plan, c)
    assert found.total_s == pytest.approx(total_s, rel=1e-6)
    assert found.communication_s == pytest.approx(under_way_s, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(plans(), costs(most_layers=64))
def test_a_step_takes_at_least_either_part_and_at_most_both(plan: tuple[int, ...], c: Costs) -> None:
    found = simulate(plan, c)
    slack = 1 + 1e-6
    assert max(found.compute_s, found.communication_s, found.link_s) <= found.total_s * slack
    assert found.total_s <= (found.compute_s + found.communication_s) * slack
    assert found.exposed_s == pytest.approx(found.total_s - found.compute_s, abs=1e-12)
    assert found.link_s <= found.communication_s * slack


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 100), costs())
def test_one_chunk_pays_the_sum(rows: int, c: Costs) -> None:
    found = simulate((0, rows), c)
    assert found.total_s == pytest.approx(found.compute_s + found.communication_s)
    lone_s = c.link.busy(c.row_bytes * rows) + c.link.latency_s
    assert found.communication_s == pytest.approx((1 + 2 * c.layers) * lone_s)


@settings(max_examples=50, deadline=None)
@given(plans(), costs(), st.floats(1, 3))
def test_nothing_gets_faster_by_anything_taking_longer(plan: tuple[int, ...], c: Costs, times: float) -> None:
    before = simulate(plan, c).total_s
    link = c.link
    for slower in (
        Correction(reading=times),
        Correction(multiplying=times),
        Correction(messages=times),
        Correction(bytes=times),
        Correction(latency_s=link.latency_s * (times - 1)),
    ):
        assert simulate(plan, slower.apply(c)).total_s >= before * (1 - 1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), costs(most_layers=8))
def test_no_other_way_to_cut_a_step_saves_more_than_a_twentieth(rows: int, c: Costs) -> None:
    best_s = min(
        simulate((0, *inner, rows), c).total_s
        for count in range(rows)
        for inner in combinations(range(1, rows), count)
    )
    assert simulate(plan_chunks(rows, c), c).total_s <= 1.05 * best_s + 1e-12


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 600), costs(most_layers=30), st.integers(1, 32))
def test_a_plan_is_as_good_as_the_best_of_all_numbers_of_chunks(rows: int, c: Costs, most: int) -> None:
    plan = plan_chunks(rows, c, most)
    assert (plan[0], plan[-1]) == (0, rows)
    assert all(a < b for a, b in pairwise(plan))
    assert len(plan) - 1 <= most
    even = [
        tuple(sorted({rows * i // count for i in range(count + 1)}))
        for count in range(1, min(most, rows) + 1)
    ]
    best_s = min(simulate(cut, c).total_s for cut in even)
    # Chunks of whole tiles of 6 rows are less even than these.
    assert simulate(plan, c).total_s <= 1.05 * best_s + 1e-12


def test_prefill_hides_a_gigabit_link_behind_its_computation() -> None:
    c = smollm(GIGABIT)
    found, one = simulate(plan_chunks(512, c), c), simulate((0, 512), c)
    assert one.total_s > 1.3 * found.total_s
    assert found.total_s <= 1.02 * max(one.compute_s, one.link_s)


def test_prefill_hides_its_computation_behind_a_slow_link() -> None:
    c = smollm(QUARTER)
    found, one = simulate(plan_chunks(512, c), c), simulate((0, 512), c)
    assert one.link_s > one.compute_s
    assert found.total_s <= 1.02 * one.link_s


def test_a_decoding_step_is_one_chunk_where_messages_are_cheap() -> None:
    c = smollm(MEMORY)
    assert [plan_chunks(rows, c) for rows in (1, 2, 8)] == [(0, 1), (0, 2), (0, 8)]


def test_without_communication_nothing_is_cut() -> None:
    c = replace(smollm(MEMORY), link=Link(0.0, 0.0))
    assert all(len(plan_chunks(rows, c)) == 2 for rows in (1, 7, 100, 512))


def test_long_chunks_are_cut_between_tiles() -> None:
    inner = plan_chunks(512, smollm(QUARTER))[1:-1]
    assert inner
    assert all(cut % 6 == 0 for cut in inner)
    wide = plan_chunks(512, replace(smollm(QUARTER), tile=16))[1:-1]
    assert wide
    assert all(cut % 16 == 0 for cut in wide)


def test_impossible_steps_and_plans_are_refused() -> None:
    c = smollm(GIGABIT)
    with pytest.raises(ValueError, match="0 rows"):
        plan_chunks(0, c)
    for plan in ((), (0,), (1, 2), (0, 0), (0, 5, 3)):
        with pytest.raises(ValueError, match="ascend from 0"):
            simulate(plan, c)


@settings(max_examples=50, deadline=None)
@given(costs())
def test_costs_survive_being_sent(c: Costs) -> None:
    assert Costs.from_plain(json.loads(json.dumps(c.to_plain()))) == c


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3000))
def test_a_planner_cuts_every_step_completely_and_nearly_as_well(rows: int) -> None:
    c = smollm(QUARTER)
    plan = Planner(c).plan(rows)
    assert (plan[0], plan[-1]) == (0, rows)
    assert all(a < b for a, b in pairwise(plan))
    assert simulate(plan, c).total_s <= 1.03 * simulate(plan_chunks(rows, c), c).total_s


def test_plans_do_not_depend_on_what_was_planned_before() -> None:
    c = smollm(GIGABIT)
    rows = list(range(1, 400, 3))
    one, other = Planner(c), Planner(c)
    assert [one.plan(n) for n in rows] == [other.plan(n) for n in rows[::-1]][::-1]
    other.use(smollm(MEMORY))
    other.use(c)
    assert one.plan(200) == other.plan(200)


def test_planning_a_decoding_step_takes_no_time_worth_mentioning() -> None:
    c = smollm(QUARTER)
    fresh: list[float] = []
    known: list[float] = []
    for _ in range(30):
        planner = Planner(c)
        for took in (fresh, known):
            start = time.perf_counter()
            planner.plan(8)
            took.append(time.perf_counter() - start)
    # 0.1-0.2 ms and 2 µs when nothing else runs.
    assert min(fresh) < 1e-3
    assert min(known) < 1e-4


@pytest.mark.parametrize("line", [GIGABIT, QUARTER])
@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_correction_finds_plans_nearly_as_good_as_with_the_truth(line: Line, asked: bool, seed: int) -> None:
    rng = random.Random(seed)
    reading, multiplying, messages, by_byte = (rng.uniform(0.4, 2.5) for _ in range(4))
    believed = smollm(line)
    true = Correction(reading, multiplying, messages, by_byte, rng.uniform(0, 100e-6)).apply(believed)
    corrector, planner = Corrector(believed), Planner(believed)
    lost, steps = [], (1, 2, 4, 8, 8, 8, 64, 300, 512)
    best = {rows: simulate(plan_chunks(rows, true), true).total_s for rows in steps}
    for _ in range(150):
        rows = rng.choice(steps)
        planner.use(corrector.costs)
        plan = planner.plan(rows)
        took = simulate(plan, true)
        lost.append(took.total_s / best[rows])
        noisy = [part * rng.uniform(0.97, 1.03) for part in (took.compute_s, took.exposed_s, took.link_s)]
        corrector.observe(Measured(plan, noisy[0], noisy[1], noisy[2] if asked else None))
    assert sum(lost[-50:]) / 50 < 1.03
    assert corrector.correction.multiplying == pytest.approx(multiplying, rel=0.1)
    if asked:
        assert corrector.correction.bytes == pytest.approx(by_byte, rel=0.1)


def test_a_slower_link_that_nobody_can_ask_is_noticed_by_waiting_although_all_steps_are_cut() -> None:
    believed = smollm(QUARTER)
    true = Correction(bytes=2.0).apply(believed)
    corrector = Corrector(believed)
    for _ in range(100):
        plan = plan_chunks(512, corrector.costs)
        assert len(plan) > 2
        took = simulate(plan, true)
        corrector.observe(Measured(plan, took.compute_s, took.exposed_s))
    assert corrector.correction.bytes == pytest.approx(2.0, rel=0.05)
    assert simulate(plan, corrector.costs).total_s == pytest.approx(took.total_s, rel=0.05)


def test_waiting_says_nothing_of_messages_that_are_hidden() -> None:
    believed = replace(smollm(GIGABIT), link=Link(1e-6, 1e-9))
    corrector = Corrector(believed)
    plan = (0, 174, 348, 512)
    took = simulate(plan, believed)
    for _ in range(50):
        corrector.observe(Measured(plan, took.compute_s, took.exposed_s + 0.05 * took.total_s))
    assert corrector.correction.bytes == 1.0


def test_without_a_link_to_ask_waiting_of_uncut_steps_tells_what_messages_take() -> None:
    believed = smollm(MEMORY)
    true = Correction(messages=2.0, bytes=3.0).apply(believed)
    corrector = Corrector(believed)
    for rows in (1, 8, 32, 300) * 100:
        took = simulate((0, rows), true)
        corrector.observe(Measured((0, rows), took.compute_s, took.exposed_s))
    assert corrector.correction.messages == pytest.approx(2.0, rel=0.1)
    assert corrector.correction.bytes == pytest.approx(3.0, rel=0.1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10)), max_size=30))
def test_corrections_stay_within_bounds_whatever_is_measured(steps: list[tuple[float, float, float]]) -> None:
    corrector = Corrector(smollm(GIGABIT))
    for compute_s, exposed_s, link_s in steps:
        corrector.observe(Measured((0, 100, 200), compute_s, exposed_s, link_s))
    found = corrector.correction
    for factor in (found.reading, found.multiplying, found.messages, found.bytes):
        assert 0.25 <= factor <= 4.0
    assert 0.0 <= corrector.costs.link.latency_s < 1e-3


def test_one_step_that_was_disturbed_hardly_changes_a_correction() -> None:
    c = smollm(GIGABIT)
    corrector = Corrector(c)
    took = simulate((0, 256, 512), c)
    for _ in range(100):
        corrector.observe(Measured((0, 256, 512), took.compute_s, took.exposed_s, took.link_s))
    corrector.observe(Measured((0, 256, 512), took.compute_s * 20, took.exposed_s * 20, took.link_s * 20))
    assert corrector.correction.multiplying == pytest.approx(1.0, abs=0.06)
    assert corrector.correction.bytes == pytest.approx(1.0, abs=0.06)
