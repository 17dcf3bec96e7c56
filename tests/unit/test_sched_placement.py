"""Which of several instances a waiting sequence goes to."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sched_rig import FakeInstance, Rig

from services.scheduler.budget import Cost
from services.scheduler.placement import (
    Candidate,
    FirstTokenSoonest,
    LeastLoad,
    Placement,
    RoundRobin,
    cost_s,
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


def homes(rig: Rig) -> dict[int, str]:
    """First id of each admitted prompt → where it went."""
    return {a.ids[0]: name for name, i in rig.instances.items() for f in i.seen for a in f.admit}


def pair(**fields: Any) -> Rig:
    fields = {"prefill_tok_s": 1e3} | fields
    return Rig(FakeInstance("w0", **fields), FakeInstance("w1", **fields)).ready()


def test_sessions_stick_to_their_instance_as_they_grow():
    rig = pair()
    sessions = {start: list(range(start, start + 24)) for start in (100, 200, 300, 400)}
    for turn in range(4):
        for start, ids in sessions.items():
            rig.submit(f"{turn}s{start}", ids, 4)
            rig.run()
            ended = rig.end(f"{turn}s{start}")
            assert ended is not None
            assert ended.cached_tokens >= (len(ids) - 16 if turn else 0)
            sessions[start] = ids + rig.tokens(f"{turn}s{start}") + [start, turn, 1, 2]
    assert set(homes(rig).values()) == {"w0", "w1"}


def test_a_burst_with_one_new_prefix_stays_together_while_its_queue_is_short():
    rig = pair(decode_step_s=0.005)
    shared = list(range(100, 320))
    for number in range(3):
        rig.submit(f"r{number}", [*shared, number], 4, turn=False)
    rig.turn()
    rig.run()
    counts = sorted(sum(len(f.admit) for f in i.seen) for i in rig.instances.values())
    assert counts == [0, 3]
    computed = sum(w.count for i in rig.instances.values() for f in i.seen for w in f.work)
    assert computed < 250, "the prefix was computed once"


def test_a_burst_without_anything_in_common_is_shared_out():
    rig = pair(max_step_tokens=40)
    for number in range(8):
        rig.submit(f"r{number}", [number * 100 + i for i in range(60)], 4, turn=False)
    rig.turn()
    rig.run()
    assert [sum(len(f.admit) for f in i.seen) for i in rig.instances.values()] == [4, 4]


def test_a_crowd_after_one_prefix_does_not_leave_the_other_instance_idle():
    rig = pair(max_slots=64, blocks_total=1024)
    shared = list(range(100, 140))
    rig.submit("first", shared, 4)
    rig.run()
    for number in range(40):
        rig.submit(f"r{number}", [*shared, *range(number * 20 + 200, number * 20 + 216)], 8, turn=False)
    rig.turn()
    for _ in range(60):
        rig.step()
    counts = [sum(len(f.admit) for f in i.seen) for i in rig.instances.values()]
    assert min(counts) >= 8, counts


def test_prompts_do_not_go_to_an_instance_that_only_decodes():
    rig = Rig(FakeInstance("w0", role="decode"), FakeInstance("w1")).ready()
    for number in range(4):
        rig.submit(f"r{number}", 6, 4)
        rig.run()
    assert set(homes(rig).values()) == {"w1"}


def test_a_role_that_changes_counts_from_the_next_beat_on():
    rig = Rig(FakeInstance("w0"), FakeInstance("w1", role="prefill")).ready()
    w0 = rig.w0
    w0.info = msgspec.structs.replace(w0.info, role="decode")
    rig.beat(w0)
    rig.submit("a", 6, 4)
    assert set(homes(rig).values()) == {"w1"}
    w1 = rig.instances["w1"]
    w1.info = msgspec.structs.replace(w1.info, role="decode")
    rig.beat(w1)
    rig.submit("b", 6, 4)
    rig.run()
    assert rig.tokens("b") == [100, 101, 102, 103], "where nobody is there for prompts, anybody is"


def test_a_draining_instance_gets_nothing_though_it_holds_the_prefix():
    rig = pair()
    prompt = list(range(100, 140))
    rig.submit("a", prompt, 4)
    rig.run()
    home = homes(rig)[100]
    there = rig.instances[home]
    there.info = msgspec.structs.replace(there.info, state="draining")
    rig.beat(there)
    there.seen.clear()
    rig.submit("b", prompt, 4)
    rig.run()
    assert rig.tokens("b") == [100, 101, 102, 103]
    assert not any(frame.admit for frame in there.seen)


def test_an_instance_that_joins_others_is_not_filled_at_once():
    rig = Rig(FakeInstance("w0", max_slots=32, blocks_total=512)).ready()
    rig.pass_time(11.0)
    rig.instances["w1"] = FakeInstance("w1", max_slots=32, blocks_total=512)
    rig.pass_time(1.0)
    for _ in range(5):
        rig.step()
    for number in range(40):
        rig.submit(f"r{number}", 6, 20, turn=False)
    rig.turn()
    running = {name: len(i.running) for name, i in rig.core.fleet.instances.items()}
    assert running["w1"] < 6 < running["w0"]
    rig.run()
    assert all(rig.end(f"r{n}") for n in range(40))


def test_nobody_waits_for_a_full_instance_that_will_not_soon_have_room():
    rig = pair(max_slots=1)
    prompt = list(range(100, 140))
    rig.submit("a", prompt, 4)
    rig.run()
    home = homes(rig)[100]
    rig.submit("long", [*prompt, 1], 150)
    rig.submit("b", [*prompt, 2], 4)
    for _ in range(8):
        rig.step()
    assert rig.tokens("b"), f"{home} is taken for 150 steps"
    rig.run()


def test_a_prefix_is_worth_waiting_for_somebody_who_is_about_to_end():
    rig = pair(max_slots=1, prefill_tok_s=1e2)
    prompt = list(range(100, 200))
    rig.submit("a", prompt, 4)
    rig.run()
    rig.submit("short", [*prompt, 1], 3)
    rig.submit("b", [*prompt, 2], 4)
    rig.run()
    ended = rig.end("b")
    assert ended is not None
    assert ended.cached_tokens == len(prompt)


def test_a_more_urgent_one_does_not_count_on_others_to_end_but_on_them_to_make_way():
    rig = pair(max_slots=1, prefill_tok_s=1e2)
    prompt = list(range(100, 200))
    rig.submit("a", prompt, 4)
    rig.run()
    rig.submit("long", [*prompt, 1], 100, priority=1)
    rig.submit("urgent", [*prompt, 2], 4, priority=0)
    for _ in range(15):
        rig.step()
    assert rig.tokens("urgent") == [100, 101, 102, 103]
    ended = rig.end("urgent")
    assert ended is not None
    assert ended.cached_tokens == len(prompt)
    rig.run()


@given(
    lacking=st.integers(1, 4000),
    fewer=st.integers(0, 3999),
    queue=st.integers(0, 5000),
    decoding=st.integers(0, 200),
    share=st.floats(0.0, 1.0),
    fetch_s=st.floats(0.0, 10.0),
)
def test_predictions_grow_with_work_and_a_fetch_never_makes_them_worse(
    lacking: int, fewer: int, queue: int, decoding: int, share: float, fetch_s: float
):
    fields = {"queue_tokens": queue, "decoding": decoding, "prompt_share": share, "running": decoding}
    more = candidate("a", lacking_tokens=lacking, **fields)
    less = candidate("a", lacking_tokens=max(1, lacking - fewer), **fields)
    assert first_token_s(less) <= first_token_s(more)
    assert cost_s(less) <= cost_s(more)
    fetched = candidate("a", lacking_tokens=lacking, fetch_tokens=lacking // 2, fetch_s=fetch_s, **fields)
    assert first_token_s(fetched) <= first_token_s(more)
    assert first_token_s(more) >= lacking * COST.per_token_s
