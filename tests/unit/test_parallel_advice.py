"""When communication takes too much of a layer, and what other degrees are predicted to take."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_support import SMOLLM, smollm

from services.worker.parallel.advice import (
    Layer,
    Scaled,
    advise,
    neighbours,
    predict,
    steps,
    unchanging,
    work_share,
)
from services.worker.parallel.crossover import Fit, Line, Timing, fit
from services.worker.parallel.overlap import plan_chunks, simulate


def fitted(latency_s: float, s_per_byte: float) -> Fit:
    line = Line(latency_s, s_per_byte)
    return Fit(line, line, None, 0.0)


def test_ten_ms_of_computing_and_two_of_messages_gain_little_from_8_ranks_over_4() -> None:
    advice = advise(Layer(4, 2.5e-3, 2e-3, 2e-3), unchanging)
    assert advice is not None
    assert advice.now.step_s == pytest.approx(4.5e-3)
    took = {other.degree: other.step_s for other in advice.others}
    assert took == pytest.approx({1: 10e-3, 2: 7e-3, 3: 10e-3 / 3 + 2e-3, 8: 3.25e-3})
    assert round(advice.speedup(advice.others[-1]), 2) == 1.38
    assert "communication takes 80% of a layer's compute" in advice.sentence
    assert "8 ranks would take 3.25 ms instead of 4.50 ms a layer (1.38×, not 2×)" in advice.sentence
    assert "one rank alone would take 10.00 ms" in advice.sentence


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 64), st.floats(1e-6, 1.0), st.floats(0, 1.0))
def test_advice_comes_beyond_30_percent_and_never_before(degree: int, compute_s: float, share: float) -> None:
    now = Layer(degree, compute_s, share * compute_s, 0.0)
    assert (advise(now, unchanging) is None) == (now.share <= 0.30)


def test_one_rank_alone_needs_no_advice() -> None:
    assert advise(Layer(1, 1e-3, 1e-3, 1e-3), unchanging) is None


def test_hidden_communication_is_counted_and_told_as_hidden() -> None:
    advice = advise(Layer(2, 5e-3, 4e-3, 0.0, layers=30), unchanging)
    assert advice is not None
    assert advice.now.step_s == pytest.approx(150e-3)
    took = {other.degree: other for other in advice.others}
    assert took[4].exposed_s == pytest.approx(1.5e-3)  # 2.5 ms of computing hide as much of the 4 ms
    assert took[1].step_s == pytest.approx(300e-3)
    assert "; 0.0 µs were waited)" in advice.sentence
    assert "120.00 ms instead of 150.00 ms a step" in advice.sentence


def test_where_fewer_ranks_are_faster_they_are_named() -> None:
    advice = advise(Layer(2, 1e-3, 3e-3, 3e-3), unchanging)
    assert advice is not None
    assert advice.best.degree == 1
    assert "start with --tp 1, which is faster" in advice.sentence


def test_only_degrees_the_model_can_be_split_in_are_compared() -> None:
    assert neighbours(4) == [1, 2, 3, 8]
    assert neighbours(2) == [1, 4]
    assert neighbours(6, SMOLLM) == [1, 3, 5, 9]
    assert neighbours(9, SMOLLM) == [1, 4, 8]


def test_uneven_splits_count_by_their_busiest_rank() -> None:
    assert work_share(None, 4) == 0.25
    assert work_share(SMOLLM, 1) == 1.0
    assert work_share(SMOLLM, 2) > 0.5
    assert work_share(SMOLLM, 3) == pytest.approx(1 / 3, rel=0.01)
    now = Layer(2, 1e-3, 1e-3, 1e-3)
    assert predict(now, 4, unchanging, SMOLLM).compute_s == pytest.approx(
        1e-3 * work_share(SMOLLM, 4) / work_share(SMOLLM, 2)
    )
    with pytest.raises(ValueError, match="only 9 query heads"):
        predict(now, 10, unchanging, SMOLLM)


def test_what_every_rank_does_in_full_is_not_divided() -> None:
    assert predict(Layer(2, 1e-3, 1e-3, 1e-3), 4, unchanging, undivided_s=0.2e-3).compute_s == pytest.approx(
        0.6e-3
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 32), st.integers(2, 32), st.floats(1e-6, 1e-3), st.floats(1e-10, 1e-7))
def test_collectives_grow_with_the_number_of_ranks_as_they_are_made(
    measured: int, degree: int, latency_s: float, s_per_byte: float
) -> None:
    size = 100_000
    for algorithm in ("direct", "one-shot", "two-shot", "scatter", "ring", "tree"):
        hop = steps(algorithm, measured)
        seen = fitted(latency_s * hop.hops, s_per_byte * hop.volume)
        expected = (
            steps(algorithm, degree).hops * latency_s + steps(algorithm, degree).volume * size * s_per_byte
        )
        scaled = Scaled({algorithm: seen}, measured, size)
        assert scaled(degree) == pytest.approx(2 * expected)
        assert scaled(measured) == pytest.approx(2 * seen.seconds(size))
        assert scaled(1) == 0.0


def test_the_algorithm_that_is_best_for_the_other_degree_is_assumed() -> None:
    fits = {"direct": fitted(50e-6, 1e-9), "ring": fitted(100e-6, 1e-9)}
    scaled = Scaled(fits, 2, 1_000_000, messages=1)
    assert scaled(2) == pytest.approx(50e-6 + 1e-3)
    assert scaled(8) == pytest.approx(7 * 100e-6 + 1e-3 * 2 * 7 / 8)


def test_between_ranks_that_send_to_all_others_communication_grows_and_computation_shrinks() -> None:
    communication = Scaled({"direct": fitted(20e-6, 8e-9)}, 2, 65536)
    now = Layer(2, 5e-3, communication(2), communication(2))
    took = [predict(now, degree, communication) for degree in range(2, 9)]
    assert all(a.compute_s > b.compute_s for a, b in pairwise(took))
    assert all(a.communication_s < b.communication_s for a, b in pairwise(took))


@pytest.mark.parametrize("other", [1, 3, 4])
@pytest.mark.parametrize("s_per_byte", [8e-9, 32e-9])
def test_predictions_from_one_degree_come_within_15_percent_of_another(other: int, s_per_byte: float) -> None:
    """Steps of 512 tokens as the planner would cut them and the wavefront makes them, with direct sums."""

    def layer(degree: int) -> Layer:
        grown = steps("direct", degree)
        line = Line(60e-6 * grown.hops, s_per_byte * grown.volume)
        c = smollm(line, degree)
        wave = simulate(plan_chunks(512, c), c)
        return Layer(degree, wave.compute_s / 30, wave.link_s / 30, wave.exposed_s / 30, 30)

    alone = [Timing("direct", size, 60e-6 + s_per_byte * size) for size in (1024, 65536, 1 << 20, 2 << 20)]
    communication = Scaled({"direct": fit(alone)}, 2, 512 * 576 * 4)
    predicted = predict(layer(2), other, communication, SMOLLM)
    assert predicted.step_s == pytest.approx(layer(other).step_s, rel=0.15)
