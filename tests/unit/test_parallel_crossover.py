"""Which algorithm a table chooses, against the times it was built from; what counts as drift."""

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.parallel.crossover import (
    UNLIMITED,
    CrossoverTable,
    Entry,
    Line,
    Timing,
    fingerprint,
    fit,
    sizes_to_measure,
)
from services.worker.parallel.drift import Drift

SIZES = sizes_to_measure(100_000_000)
# Latency and bandwidth of algorithms that cross at 48 KB and about 2 MB.
DIRECT, RING, TREE = Line(20e-6, 3e-9), Line(140e-6, 0.5e-9), Line(70e-6, 2e-9)


def timed(lines: dict[str, Line], noise: float = 0.0, seed: int = 0) -> list[Timing]:
    rng = random.Random(seed)
    return [
        Timing(name, size, line.seconds(size) * rng.uniform(1 - noise, 1 + noise))
        for name, line in lines.items()
        for size in SIZES
    ]


@st.composite
def measured(draw: st.DrawFn) -> list[Timing]:
    sizes = draw(st.lists(st.integers(1, 10**8), min_size=1, max_size=12, unique=True))
    names = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=5, unique=True))
    seconds = st.floats(1e-6, 1.0)
    return [Timing(name, size, draw(seconds)) for name in names for size in sizes]


@settings(max_examples=50, deadline=None)
@given(measured(), st.data())
def test_a_choice_is_nowhere_a_tenth_slower_than_the_best(timings: list[Timing], data: st.DataObject) -> None:
    table = CrossoverTable.build(timings)
    sizes = sorted({timing.bytes for timing in timings})
    between = st.integers(sizes[0], sizes[-1])
    for size in (*sizes, *data.draw(st.lists(between, max_size=10))):
        best = min(table.predict(size, name) for name in {timing.algorithm for timing in timings})
        assert table.predict(size) <= 1.1 * best
    for timing in timings:
        assert table.predict(timing.bytes, timing.algorithm) == pytest.approx(timing.seconds)


@settings(max_examples=50, deadline=None)
@given(measured())
def test_tables_are_the_same_for_timings_in_any_order_and_survive_json(timings: list[Timing]) -> None:
    table = CrossoverTable.build(timings)
    assert CrossoverTable.build(timings[::-1]) == table
    assert CrossoverTable.from_plain(json.loads(json.dumps(table.to_plain()))) == table


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_noise_of_a_few_percent_makes_no_further_crossovers(seed: int) -> None:
    table = CrossoverTable.build(timed({"direct": DIRECT, "ring": RING}, 0.03, seed))
    assert [entry.algorithm for entry in table.entries] == ["direct", "ring"]
    assert 30_000 < table.entries[0].up_to_bytes < 75_000


def test_crossovers_lie_where_the_lines_cross() -> None:
    table = CrossoverTable.build(timed({"direct": DIRECT, "ring": RING}), tolerance=0.0)
    assert table.entries[0].up_to_bytes == pytest.approx(48_000, rel=1e-3)
    assert (table.choose(1), table.choose(40_000)) == ("direct", "direct")
    assert (table.choose(50_000), table.choose(10**9)) == ("ring", "ring")
    assert table.choose(UNLIMITED) == table.choose(UNLIMITED + 1) == "ring"


def test_an_algorithm_that_is_hardly_better_anywhere_is_not_switched_to() -> None:
    close = Line(DIRECT.latency_s * 1.2, DIRECT.s_per_byte * 0.96)
    assert len(CrossoverTable.build(timed({"direct": DIRECT, "close": close})).entries) == 1


def test_measuring_anew_keeps_a_table_that_is_still_good_enough() -> None:
    lines = {"direct": DIRECT, "ring": RING, "tree": TREE}
    former = CrossoverTable.build(timed(lines, 0.02, seed=1))
    again = CrossoverTable.build(timed(lines, 0.02, seed=2), former=former)
    assert again.entries == former.entries
    assert again.timings != former.timings
    slower = CrossoverTable.build(timed(lines | {"ring": Line(3e-3, 0.5e-9)}), former=former)
    assert slower.entries != former.entries
    assert slower.choose(100_000) != "ring"


def test_an_algorithm_is_not_used_where_it_was_never_measured() -> None:
    small = [timing for timing in timed({"direct": Line(20e-6, 0.1e-9)}) if timing.bytes <= 8192]
    table = CrossoverTable.build([*small, *timed({"ring": RING})])
    assert table.choose(8192) == "direct"
    assert table.choose(8193) == "ring"


def test_impossible_tables_and_timings_are_refused() -> None:
    good = CrossoverTable.build(timed({"direct": DIRECT})).to_plain()
    for entries in (
        [],
        [{"up_to_bytes": 5, "algorithm": "direct"}],
        [{"up_to_bytes": UNLIMITED, "algorithm": "magic"}],
        [{"up_to_bytes": UNLIMITED, "algorithm": "direct"}] * 2,
        [{"up_to_bytes": "many", "algorithm": "direct"}],
    ):
        with pytest.raises(ValueError):
            CrossoverTable.from_plain(good | {"entries": entries})
    with pytest.raises(ValueError, match="nothing was measured"):
        CrossoverTable.build([])
    with pytest.raises(ValueError, match="no time of a message"):
        CrossoverTable.build([Timing("direct", 1024, 0.0)])


@settings(max_examples=50, deadline=None)
@given(
    st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7), st.sets(st.integers(0, 17), max_size=3), st.floats(2, 30)
)
def test_a_fit_finds_latency_and_bandwidth_despite_disturbed_measurements(
    latency_s: float, s_per_byte: float, disturbed: set[int], times: float
) -> None:
    line = Line(latency_s, s_per_byte)
    timings = [
        Timing("a", size, line.seconds(size) * (times if i in disturbed else 1))
        for i, size in enumerate(SIZES)
    ]
    found = fit(timings)
    wrong = [
        size
        for i, size in enumerate(SIZES)
        if i not in disturbed and abs(found.seconds(size) / line.seconds(size) - 1) > 0.1
    ]
    assert len(wrong) <= 2, (found, wrong)


def test_a_fit_has_two_lines_where_messages_leave_a_cache() -> None:
    def seconds(size: int) -> float:
        return 2e-6 + (
            size * 0.05e-9 if size <= 1 << 20 else (1 << 20) * 0.05e-9 + (size - (1 << 20)) * 0.5e-9
        )

    found = fit([Timing("one-shot", size, seconds(size)) for size in SIZES])
    assert found.knee == pytest.approx(1 << 20, rel=0.5)
    assert found.small.bytes_per_s == pytest.approx(20e9, rel=0.05)
    assert found.large.bytes_per_s == pytest.approx(2e9, rel=0.05)
    assert all(found.seconds(size) == pytest.approx(seconds(size), rel=0.1) for size in SIZES)
    assert fit(timed({"direct": DIRECT}, 0.03)).knee is None


@settings(max_examples=50, deadline=None)
@given(measured())
def test_fitted_times_never_fall_as_messages_grow(timings: list[Timing]) -> None:
    for found in CrossoverTable.build(timings).fits.values():
        times = [found.seconds(size) for size in range(0, 10**8, 10**6)]
        assert all(a <= b for a, b in pairwise(times))


def test_sizes_to_measure_reach_the_largest_message_in_whole_floats() -> None:
    assert sizes_to_measure(2304) == (1024, 2048, 2304)
    assert sizes_to_measure(576 * 512 * 4)[-1] == 1_179_648
    assert sizes_to_measure(100) == (100,)
    assert all(size % 4 == 0 for size in sizes_to_measure(99_999))


def test_fingerprints_tell_facts_apart_and_nothing_else() -> None:
    assert fingerprint({"size": 2, "links": ["shm"]}) == fingerprint({"links": ["shm"], "size": 2})
    assert fingerprint({"size": 2}) != fingerprint({"size": 3})


TABLE = CrossoverTable.build(timed({"direct": DIRECT, "ring": RING}))


def fed(drift: Drift, size: int, ratio: float, windows: int, seed: int = 0, start: float = 0.0) -> float:
    """Observe messages the shortest taking `ratio` of what is predicted, others up to ten times as long."""
    rng = random.Random(seed)
    now = start
    for _ in range(windows):
        for i in range(20):
            late = 1.0 if i == 7 else rng.uniform(1, 10)
            drift.observe(size - rng.randrange(40), TABLE.predict(size) * ratio * late, now)
            now += 0.5
    return now


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SIZES), st.floats(0.8, 1.2), st.integers(0, 1000))
def test_what_was_measured_is_no_drift_however_late_ranks_come(size: int, ratio: float, seed: int) -> None:
    drift = Drift(TABLE)
    fed(drift, size, ratio, windows=10, seed=seed)
    assert drift.drifted is None


@pytest.mark.parametrize("ratio", [0.5, 1.4])
def test_a_link_that_became_slower_or_faster_is_noticed_after_three_windows(ratio: float) -> None:
    drift = Drift(TABLE)
    now = fed(drift, 2304, ratio, windows=3)
    assert drift.drifted is None
    fed(drift, 2304, ratio, windows=1, start=now)
    assert drift.drifted is not None
    assert drift.drifted.observed_s / drift.drifted.predicted_s == pytest.approx(ratio, rel=0.05)
    assert f"{drift.drifted.observed_s * 1e6:.0f} µs where 27 µs were measured" in drift.drifted.describe()


def test_a_short_disturbance_is_no_drift() -> None:
    drift = Drift(TABLE)
    now = 0.0
    for ratio in (1.0, 1.6, 1.5, 1.0, 1.7, 0.6, 1.4, 1.0):
        now = fed(drift, 2304, ratio, windows=1, start=now)
    assert drift.drifted is None


def test_few_messages_in_a_window_say_nothing() -> None:
    drift = Drift(TABLE)
    for now in range(0, 300, 5):
        drift.observe(2304, TABLE.predict(2304) * 3, float(now))
    assert drift.drifted is None
    for now in range(300, 400, 5):
        drift.observe(2304, TABLE.predict(2304) * 3, float(now), messages=50)
    assert drift.drifted is not None


def test_entries_are_what_a_transport_needs_to_choose_by_itself() -> None:
    assert TABLE.entries == (Entry(TABLE.entries[0].up_to_bytes, "direct"), Entry(UNLIMITED, "ring"))
