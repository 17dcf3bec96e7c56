"""Which of several instances a waiting sequence goes to."""

import random
from typing import Any

import pytest
from sched_rig import FakeInstance, Rig

from services.scheduler.budget import Cost
from services.scheduler.placement import (
    Candidate,
    FirstTokenSoonest,
    LeastLoad,
    Placement,
    RoundRobin,
    first_token_s,
)

COST = Cost(fixed_s=0.02, per_decode_s=0.0005, per_token_s=0.001)


def candidate(name: str, **fields: Any) -> Candidate:
    base = {"lacking_tokens": 500, "cost": COST, "step_tokens": 400}
    return Candidate(instance=name, **(base | fields))


def chosen(*candidates: Candidate, planning: str = "", placement: Placement | None = None) -> str:
    placement = placement or FirstTokenSoonest()
    return placement.choose(candidates, 1, planning, random.Random(1)).instance


def test_a_sequence_goes_where_its_beginning_is():
    assert chosen(candidate("a"), candidate("b", lacking_tokens=100, running=4), planning="a") == "b"


@pytest.mark.parametrize(
    "crowd", [{"queue_tokens": 2000}, {"ahead_s": 1.0}, {"room_s": 1.0}, {"soon_s": 1.0}], ids=str
)
def test_a_cached_beginning_does_not_outweigh_a_long_wait(crowd: dict[str, Any]):
    assert chosen(candidate("a"), candidate("b", lacking_tokens=100, **crowd), planning="b") == "a"


def test_decodes_take_their_share_of_the_steps_that_compute_a_prompt():
    crowded = candidate("b", lacking_tokens=450, decoding=20, step_tokens=40)
    assert first_token_s(crowded) == pytest.approx(12 * (0.02 + 20 * 0.0005) + 0.45)
    assert chosen(candidate("a"), crowded, planning="b") == "a"


def test_a_fetch_counts_where_it_is_sooner_than_computing():
    fetching = {"fetch_tokens": 400, "fetch_s": 0.1}
    assert first_token_s(candidate("a", **fetching)) == pytest.approx(0.1 + 0.02 + 0.02 + 0.1)
    assert first_token_s(candidate("a", **(fetching | {"fetch_s": 9.0}))) == first_token_s(candidate("a"))
    assert chosen(candidate("a", **fetching), candidate("b"), planning="b") == "a"


def test_a_new_prefix_goes_where_it_pushes_nothing_out():
    assert chosen(candidate("a", evicted_tokens=480), candidate("b"), planning="a") == "b"


def test_equal_instances_share_the_load():
    rng, pair = random.Random(1), [candidate("a"), candidate("b")]
    names = [FirstTokenSoonest().choose(pair, n, "c", rng).instance for n in range(100)]
    assert 30 < names.count("a") < 70
    assert {FirstTokenSoonest().choose(pair, n, "b", rng).instance for n in range(20)} == {"b"}


def test_the_policies_for_comparison_look_at_nothing_but_turns_and_load():
    pair = [candidate("b", lacking_tokens=1, running=3), candidate("a")]
    turns = [RoundRobin().choose(pair, n, "a", random.Random(1)).instance for n in range(4)]
    assert turns == ["a", "b", "a", "b"]
    assert chosen(*pair, planning="b", placement=LeastLoad()) == "a"


def test_requests_spread_over_instances_and_follow_their_prefix():
    rig = Rig(FakeInstance("w0"), FakeInstance("w1")).ready()
    for number in range(6):
        rig.submit(f"r{number}", 6, 12, turn=False)
    rig.turn()
    counts = [sum(len(f.admit) for f in i.seen) for i in rig.instances.values()]
    rig.run()
    assert min(counts) >= 2
    prompt = list(range(800, 840))
    rig.submit("first", prompt, 4)
    rig.run()
    home = next(n for n, i in rig.instances.items() for f in i.seen for a in f.admit if a.ids == prompt)
    for number in range(4):
        rig.submit(f"p{number}", [*prompt, number], 4)
        rig.run()
        end = rig.end(f"p{number}")
        assert end is not None
        assert end.cached_tokens == 40, home
