"""Preemption in the scheduler: who makes way, what is kept, who waits how long."""

import pytest
from sched_rig import BLOCK, FakeInstance, Rig

from services.scheduler.admission import ExpectedOutput, ReserveMax, ReserveNothing
from services.scheduler.core import Rules
from services.scheduler.desk import DeskRules
from services.scheduler.fleet import FleetRules
from services.scheduler.instances import Lane
from services.scheduler.preempt import LastCome
from services.scheduler.sequences import Sequence


def small(**fields: object) -> FakeInstance:
    return FakeInstance("w0", **fields)


def seq(rig: Rig, name: str) -> Sequence:
    """A sequence that has not ended."""
    handle = rig.handle_of(name)
    return next(s for s in rig.core.desk._open.values() if s.handle == handle)


def runs(rig: Rig, name: str) -> bool:
    handle = rig.handle_of(name)
    return any(s.handle == handle for s in rig.core.fleet.instances["w0"].running)


def preemptions(rig: Rig, *names: str) -> list[int]:
    ends = [rig.end(name) for name in names]
    assert all(end is not None and end.reason == "length" for end in ends)
    return [end.preemptions for end in ends if end is not None]


# Victims


def first_victim(rig: Rig) -> str:
    for name, prompt in (("oldest", 8), ("short", 6), ("long", 40)):
        rig.submit(name, prompt, 40)
    while not rig.core.counters.preemptions:
        rig.step()
    return next(name for name in ("oldest", "short", "long") if seq(rig, name).preemptions)


def test_one_that_loses_little_goes_before_one_that_came_later_and_loses_much():
    rig = Rig(small(blocks_total=24), reservation=ReserveNothing()).ready()
    assert first_victim(rig) == "short"
    rig.run(1000)
    assert preemptions(rig, "oldest") == [0]


def test_last_come_sends_back_the_latest_whatever_it_loses():
    rig = Rig(small(blocks_total=24), reservation=ReserveNothing())
    rig.core.planner.room.policy = LastCome()
    assert first_victim(rig.ready()) == "long"


def test_one_whose_blocks_others_hold_too_loses_only_its_own_and_only_that_counts_as_freed():
    prompt = list(range(40))
    rig = Rig(small(blocks_total=40), reservation=ReserveNothing()).ready()
    rig.submit("first", prompt, 60)
    for _ in range(6):
        rig.step()
    rig.submit("sharing", [*prompt, 500], 60)
    for _ in range(6):
        rig.step()
    room, instance = rig.core.planner.room, rig.core.fleet.instances["w0"]
    first, sharing = room._candidates(instance, [seq(rig, "first"), seq(rig, "sharing")], 100)
    assert first.frees == len(first.who.blocks) - 10
    assert sharing.frees == len(sharing.who.blocks) - 10
    alone = instance.fit.cost
    assert sharing.back_s < 20 * alone.per_token_s + 2 * alone.fixed_s


@pytest.mark.parametrize("blocks", [10, 13, 18])
def test_the_oldest_of_the_most_urgent_is_never_preempted(blocks: int):
    rig = Rig(small(blocks_total=blocks), reservation=ReserveNothing()).ready()
    for name in "abcdefgh":
        rig.submit(name, 9, 30)
    rig.run(3000)
    assert preemptions(rig, "a") == [0]
    assert all(rig.tokens(name) == list(range(100, 130)) for name in "abcdefgh")
    assert rig.at_rest()


# Making way


def busy(slots: int = 3, blocks: int = 200, **rig: object) -> Rig:
    """An instance whose slots are taken by usual requests, each with long to go."""
    made = Rig(small(max_slots=slots, blocks_total=blocks), **rig).ready()  # type: ignore[arg-type]
    for number in range(slots):
        made.submit(f"r{number}", 8, 100, timeout_s=3000.0)
    for _ in range(3):
        made.step()
    return made


def test_somebody_more_urgent_gets_a_slot_when_the_frames_in_flight_are_done():
    rig = busy()
    in_flight = rig.core.fleet.instances["w0"].next_seq - 1
    rig.submit("urgent", 8, 4, priority=-1)
    while not runs(rig, "urgent"):
        rig.step()
    admitted = next(f.seq for f in rig.w0.seen for a in f.admit if a.ids[0] == sum(b"urgent") * 7 % 900)
    assert admitted == in_flight + 1, "no frame in between"
    assert rig.core.counters.preemptions == rig.core.counters.preemptions_urgent == 1
    rig.run(3000)
    assert rig.tokens("urgent") == [100, 101, 102, 103]
    for number in range(3):
        assert rig.tokens(f"r{number}") == list(range(100, 200))
    assert rig.at_rest()


def test_an_equal_never_makes_way():
    rig = busy()
    rig.submit("equal", 8, 4)
    for _ in range(30):
        rig.step()
    assert rig.core.counters.preemptions == 0
    assert not runs(rig, "equal")


def test_what_is_only_set_aside_for_less_urgent_ones_is_had_without_preempting():
    rig = Rig(small(blocks_total=64), reservation=ReserveMax()).ready()
    rig.submit("usual", 8, 220, timeout_s=3000.0)
    rig.step()
    rig.submit("equal", 100, 100)
    rig.step()
    assert not runs(rig, "equal")
    rig.submit("urgent", 100, 100, priority=-1)
    rig.step()
    assert runs(rig, "urgent")
    assert rig.core.counters.preemptions == 0
    rig.run(1000)
    assert rig.tokens("usual") == list(range(100, 320))


def test_nobody_is_preempted_in_vain():
    rig = Rig(small(blocks_total=40, max_slots=8), reservation=ReserveMax()).ready()
    rig.submit("more urgent", 80, 60, priority=-2)
    rig.submit("usual", 8, 8)
    rig.step()
    rig.submit("urgent", 60, 60, priority=-1)
    for _ in range(5):
        rig.step()
    assert rig.core.counters.preemptions == 0
    rig.run(1000)


def test_no_more_make_way_than_needed():
    rig = Rig(small(blocks_total=64, max_slots=8), reservation=ReserveNothing()).ready()
    for number in range(6):
        rig.submit(f"r{number}", 36, 60, timeout_s=3000.0)
    for _ in range(3):
        rig.step()
    rig.submit("urgent", 60, 4, priority=-1)
    while not runs(rig, "urgent"):
        rig.step()
    assert rig.core.counters.preemptions_urgent <= 2
    rig.run(3000)
    assert all(rig.tokens(f"r{number}") == list(range(100, 160)) for number in range(6))


def test_the_prompt_of_the_urgent_goes_before_prompts_that_were_there_first():
    rig = Rig(small(prefill_tok_s=500.0, blocks_total=256, max_step_tokens=40)).ready()
    rig.submit("running", 8, 100)
    rig.submit("long", 240, 4)
    for _ in range(2):
        rig.step()
    rig.submit("urgent", 60, 4, priority=-1)
    slot = seq(rig, "urgent").slot
    while not rig.tokens("urgent"):
        rig.step()
    frames = [f for f in rig.w0.seen if any(a.slot == slot for a in f.admit) or f.seq > 0]
    begin = next(n for n, f in enumerate(frames) if any(len(a.ids) == 60 for a in f.admit))
    for frame in frames[begin:]:
        work = {row.slot: row.count for row in frame.work if row.count}
        if slot not in work:
            break
        assert next(iter(work)) == slot
        assert sum(work.values()) - work[slot] <= 40 - work[slot]


# Nobody starves, nobody plays ping-pong


def test_two_of_different_priority_do_not_take_turns_at_sending_each_other_back():
    rig = Rig(small(blocks_total=24, max_slots=4), reservation=ReserveNothing()).ready()
    rig.submit("low", 8, 60)
    for _ in range(5):
        rig.step()
    rig.submit("high", 8, 80, priority=-1)
    rig.run(1000)
    low, high = preemptions(rig, "low", "high")
    assert high == 0
    assert low <= 1


@pytest.mark.parametrize("blocks", [16, 22, 30])
def test_one_that_was_sent_back_returns_only_where_it_can_stay(blocks: int):
    rig = Rig(small(blocks_total=blocks), reservation=ExpectedOutput()).ready()
    for name in "abcdefgh":
        rig.submit(name, 9, 30)
    rig.run(3000)
    assert max(preemptions(rig, *"abcdefgh")) <= 3
    assert rig.core.counters.recomputed_tokens < 0.5 * 8 * 39


def test_a_steady_stream_of_urgent_ones_cannot_keep_a_usual_one_out():
    rules = Rules("m", desk=DeskRules(aging_s=3.0), fleet=FleetRules(stall_s=1e9))
    rig = Rig(small(max_slots=2, blocks_total=64), rules=rules).ready()
    rig.submit("usual", 8, 40, timeout_s=3000.0)
    began, number = rig.now, 0
    while rig.end("usual") is None:
        if rig.core.desk.queue.__len__() < 3:
            rig.submit(f"u{number}", 8, 10, priority=-1)
            number += 1
        rig.step()
        assert rig.now - began < 30.0, "it starves"
    assert number > 20, "there was a stream"
    end = rig.end("usual")
    assert end is not None
    # A level of priority is made up for by 3 s of waiting: in the queue, and once more when sent back.
    assert end.times.queue_s + end.times.preempted_s < 3.0 * 2 + 1.0


# What is kept, and what is counted


def test_a_victim_leaves_its_blocks_in_the_second_tier_where_a_fetch_beats_computing():
    fields = {"prefill_tok_s": 100.0, "tier": "tier-x", "tier_fixed_s": 0.001, "tier_block_s": 0.0001}
    rig = Rig(small(max_slots=1, blocks_total=64, **fields)).ready()
    rig.submit("usual", 33, 60, timeout_s=3000.0)
    for _ in range(12):
        rig.step()
    full = seq(rig, "usual").blocks[:8]
    rig.submit("urgent", 8, 4, priority=-1)
    while not runs(rig, "urgent"):
        rig.step()
    frame = next(frame for frame in rig.w0.seen if frame.offload)
    assert frame.offload[:8] == full
    assert frame.release
    assert seq(rig, "usual").offloaded == ("tier-x", len(frame.offload))
    assert rig.core.counters.preemptions_offload == 1
    assert rig.core.counters.offloaded_tokens == len(frame.offload) * BLOCK


@pytest.mark.parametrize("fields", [{}, {"tier_fixed_s": 5.0, "tier_block_s": 0.5, "tier": "tier-x"}])
def test_a_victim_leaves_nothing_where_computing_is_quicker_or_there_is_no_tier(fields: dict[str, object]):
    rig = Rig(small(max_slots=1, blocks_total=64, prefill_tok_s=100.0, **fields)).ready()
    rig.submit("usual", 33, 60)
    for _ in range(6):
        rig.step()
    rig.submit("urgent", 8, 4, priority=-1)
    rig.run(1000)
    assert not [frame for frame in rig.w0.seen if frame.offload]
    assert rig.core.counters.preemptions == 1
    assert rig.core.counters.preemptions_offload == 0
    assert rig.tokens("usual") == list(range(100, 160))


def test_only_what_was_computed_before_and_is_computed_again_counts_as_recomputed():
    # It was sent back in the middle of its prompt, and finds all its full blocks cached.
    rig = Rig(small(max_slots=1, blocks_total=256, prefill_tok_s=200.0, max_step_tokens=40)).ready()
    rig.submit("usual", 200, 4)
    while seq(rig, "usual").planned < 80:
        rig.step()
    assert rig.core.fleet.instances["w0"].running[seq(rig, "usual")] is Lane.PREFILL
    rig.submit("urgent", 8, 4, priority=-1)
    rig.run(1000)
    counters = rig.core.counters
    assert counters.preemptions == 1
    assert counters.recomputed_tokens < 40, "what was not computed before, or was found cached, is no tax"
    assert rig.tokens("usual") == [100, 101, 102, 103]
