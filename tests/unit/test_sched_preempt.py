"""Who is preempted: the pure choice against a brute-force oracle, and what it promises."""

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.admission import peak_growth
from services.scheduler.preempt import UNITS, Candidate, LastCome, LeastHarm, cover, harm

candidates = st.builds(
    Candidate,
    who=st.just(None),
    level=st.integers(-1, 1),
    order=st.integers(0, 1000),
    frees=st.integers(0, 9),
    back_s=st.floats(0.01, 5.0),
    written=st.integers(0, 500),
    left=st.integers(1, 500),
    preemptions=st.integers(0, 4),
)
crowds = st.lists(candidates, min_size=1, max_size=8, unique_by=lambda c: c.order)


def freed(victims: list[Candidate[None]]) -> int:
    return sum(victim.frees for victim in victims)


def burden(victims: list[Candidate[None]]) -> tuple[float, ...]:
    """Harm by class, the most urgent first: what a choice has to keep small, in this order."""
    return tuple(round(sum(harm(v) for v in victims if v.level == level), 9) for level in (-1, 0, 1))


def best(crowd: list[Candidate[None]], blocks: int) -> tuple[float, ...]:
    """The oracle: every set that frees enough."""
    sets = (list(some) for n in range(1, len(crowd) + 1) for some in combinations(crowd, n))
    return min(burden(some) for some in sets if freed(some) >= blocks)


@given(crowds, st.integers(1, 40))
def test_the_chosen_set_does_least_harm_to_the_most_urgent_first(crowd: list[Candidate[None]], blocks: int):
    victims = LeastHarm().choose(crowd, blocks)
    if sum(c.frees for c in crowd) >= blocks:
        assert freed(victims) >= blocks
        assert burden(victims) == pytest.approx(best(crowd, blocks), abs=1e-6)


@given(crowds, st.integers(0, 40))
def test_nobody_is_sent_back_whom_the_others_make_superfluous(crowd: list[Candidate[None]], blocks: int):
    victims = LeastHarm().choose(crowd, blocks)
    if freed(victims) >= blocks and len(victims) > 1:
        for victim in victims:
            assert freed(victims) - victim.frees < blocks


@given(crowds, st.integers(1, 40))
def test_nobody_whose_blocks_are_all_shared_is_sent_back_where_others_help(
    crowd: list[Candidate[None]], blocks: int
):
    victims = LeastHarm().choose(crowd, blocks)
    assert victims, "somebody always goes"
    if any(candidate.frees for candidate in crowd):
        assert all(victim.frees for victim in victims)


@given(st.integers(0, 10_000))
def test_a_large_need_is_covered_at_little_more_than_the_least_harm(seed: int):
    rng = random.Random(seed)
    crowd = [
        Candidate(
            None,
            0,
            n,
            rng.randint(0, 360),
            rng.uniform(0.01, 5.0),
            rng.randint(0, 500),
            rng.randint(1, 500),
            0,
        )
        for n in range(rng.randint(20, 60))
    ]
    blocks = rng.randint(UNITS + 1, freed(crowd))
    victims = cover(crowd, blocks)
    assert freed(victims) >= blocks
    # No set that frees as much costs less than filling the need with the cheapest blocks, in parts too.
    bound, rest = 0.0, float(blocks)
    for one in sorted((c for c in crowd if c.frees), key=lambda c: harm(c) / c.frees):
        part = min(1.0, rest / one.frees)
        bound, rest = bound + part * harm(one), rest - part * one.frees
        if rest <= 0:
            break
    dearest = max(harm(c) for c in crowd)
    assert bound - 1e-9 <= sum(harm(v) for v in victims) <= 1.3 * bound + 2 * dearest


@given(candidates, st.integers(1, 5))
def test_harm_grows_with_preemptions_with_what_is_written_and_with_nearness_to_the_end(
    candidate: Candidate[None], more: int
):
    def but(**fields: int) -> float:
        names = Candidate.__dataclass_fields__
        return harm(Candidate(**{name: getattr(candidate, name) for name in names} | fields))

    before = harm(candidate)
    assert but(preemptions=candidate.preemptions + more) > before
    assert but(written=candidate.written + more) >= before
    assert but(left=candidate.left + more) <= before


@given(crowds, st.integers(1, 20), st.data())
def test_one_preempted_more_often_is_no_likelier_victim(
    crowd: list[Candidate[None]], blocks: int, data: st.DataObject
):
    index = data.draw(st.integers(0, len(crowd) - 1))
    spared = crowd[index] not in LeastHarm().choose(crowd, blocks)
    fields = {name: getattr(crowd[index], name) for name in Candidate.__dataclass_fields__}
    again = Candidate(**fields | {"preemptions": crowd[index].preemptions + 1})
    victims = LeastHarm().choose([*crowd[:index], again, *crowd[index + 1 :]], blocks)
    feasible = sum(c.frees for c in crowd) >= blocks
    if spared and feasible:
        same = burden(LeastHarm().choose(crowd, blocks)) == burden(victims)
        assert again not in victims or same


@given(crowds, st.integers(1, 20))
def test_last_come_takes_the_latest_of_the_least_urgent_until_it_is_enough(
    crowd: list[Candidate[None]], blocks: int
):
    victims = LastCome().choose(crowd, blocks)
    rest = [c for c in crowd if c not in victims]
    assert all((v.level, v.order) > (c.level, c.order) for v in victims for c in rest)
    assert freed(victims[:-1]) < blocks
    assert freed(victims) >= blocks or not rest


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=8))
def test_the_peak_of_growth_is_what_growing_step_by_step_shows(rows: list[tuple[int, int]]):
    need = peak = 0
    alive = list(rows)
    for step in range(1, 14):
        alive_now = [row for row in alive if row[0] >= step]
        # Those that have reached what was expected give back what they held and what they grew by.
        need -= sum(growth + held for growth, held in alive if growth == step - 1 and growth)
        need += len(alive_now)
        peak = max(peak, need)
        alive = alive_now
    assert peak_growth(rows) == peak
