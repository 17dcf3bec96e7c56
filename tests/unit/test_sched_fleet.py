"""Instances and leadership: who is trusted with requests, and when."""

import msgspec
import pytest
from sched_rig import FakeInstance, Rig

from services.scheduler.core import Rules
from services.scheduler.events import (
    AskClaim,
    AskInventory,
    ClaimAnswer,
    Connected,
    DropLease,
    Follow,
    LeaseSeen,
    SendStep,
    SendTokens,
    Stop,
    Tick,
)
from services.scheduler.fleet import FleetRules
from services.scheduler.instances import State
from services.scheduler.leadership import Leadership, LeadershipTimes, outranks
from shared.ids import MAX_EPOCH
from shared.wire import Ack, BadFrame, Beacon, Beat, Claimed, Done, Goodbye, Refused, Resync, Stopped


def replaced(info: object, **fields: object) -> object:
    return type(info)(**({name: getattr(info, name) for name in info.__struct_fields__} | fields))  # type: ignore[attr-defined]


def states(rig: Rig) -> dict[str, State]:
    return {name: instance.state for name, instance in rig.core.fleet.instances.items()}


def test_an_instance_serves_only_after_its_canary():
    rig = Rig()
    rig.submit("early", 4, 2)
    rig.pass_time(2.0)
    assert states(rig) == {"w0": State.CANARY}
    rig.submit("a", 4, 2)
    assert all(len(admit.ids) == 4 and admit.ids == [1, 2, 3, 4] for f in rig.w0.seen for admit in f.admit)
    rig.run()
    assert states(rig) == {"w0": State.READY}
    assert rig.end("a") is not None


def test_an_instance_whose_canary_fails_is_left_alone_for_a_while_and_then_tried_again():
    rig = Rig()
    rig.pass_time(2.0)
    frame = rig.w0.frames.popleft()
    rig.w0.frames.clear()
    rig.handle(
        Done(instance="w0", epoch=1, owner="me", incarnation=rig.w0.incarnation, seq=frame.seq,
             stopped=[Stopped(frame.admit[0].slot, "error", "its logits were not finite")])
    )  # fmt: skip
    assert states(rig) == {"w0": State.LOST}
    claims = sum(isinstance(effect, AskClaim) for effect in rig.effects)
    rig.pass_time(1.5)
    assert sum(isinstance(effect, AskClaim) for effect in rig.effects) == claims
    rig.ready()
    assert states(rig) == {"w0": State.READY}


def test_a_canary_that_brings_no_result_in_time_is_a_failure():
    rig = Rig(rules=Rules("m", fleet=FleetRules(canary_s=3.0)))
    rig.pass_time(2.0)
    rig.pass_time(3.5)
    assert any(getattr(effect, "event", "") == "canary_failed" for effect in rig.effects)


def test_a_silent_instance_hands_its_sequences_to_another():
    rig = Rig(FakeInstance("w0"), FakeInstance("w1")).ready()
    for name in "abcd":
        rig.submit(name, 6, 40)
    for _ in range(5):
        rig.step()
    gone = rig.instances["w0"]
    assert gone.frames
    gone.frames.clear()
    for _ in range(150):
        rig.beat(rig.instances["w1"])
        rig.acknowledge()
        rig.now += 0.05
        rig.handle(Tick())
        if rig.instances["w1"].frames:
            rig.handle(rig.instances["w1"].result())
        rig.turn()
    assert states(rig)["w0"] is State.LOST
    for name in "abcd":
        assert rig.tokens(name) == list(range(100, 140)), name


def test_a_goodbye_requeues_at_once():
    rig = Rig(FakeInstance("w0"), FakeInstance("w1")).ready()
    for name in "abcd":
        rig.submit(name, 6, 10)
    rig.step()
    rig.instances["w0"].frames.clear()
    rig.handle(Goodbye(instance="w0", incarnation=rig.instances["w0"].incarnation, reason="stopped"))
    rig.turn()
    rig.run()
    assert all(rig.tokens(name) == list(range(100, 110)) for name in "abcd")


def test_an_instance_that_beats_but_brings_no_result_is_given_up():
    rig = Rig(rules=Rules("m")).ready()
    rig.submit("a", 6, 40)
    rig.w0.frames.clear()
    rig.pass_time(9.0)
    assert states(rig) == {"w0": State.READY}
    rig.pass_time(1.5)
    assert states(rig)["w0"] is State.LOST


def test_a_request_under_which_instances_die_again_and_again_is_ended():
    rig = Rig(rules=Rules("m", fleet=FleetRules(max_losses=2))).ready()
    rig.submit("poison", 6, 40)
    for _ in range(3):
        rig.step()
        rig.w0.frames.clear()
        rig.handle(Goodbye(instance="w0", incarnation=rig.w0.incarnation))
        rig.pass_time(0.2)
        while states(rig).get("w0") is State.CANARY and rig.w0.frames:
            rig.step()
    end = rig.end("poison")
    assert end is not None
    assert end.reason == "error"
    assert "instances were lost" in end.message


def test_a_new_life_of_an_instance_is_noticed_by_its_beat():
    rig = Rig().ready()
    rig.submit("a", 6, 12)
    rig.step()
    was = rig.w0.info
    rig.instances["w0"] = FakeInstance("w0", born=was.born + 1)
    rig.instances["w0"].incarnation = 100
    rig.beat(rig.w0)
    assert states(rig)["w0"] is State.LOST
    rig.ready_again = True  # type: ignore[attr-defined]
    rig.pass_time(0.5)
    rig.run()
    assert rig.tokens("a") == list(range(100, 112))


def test_a_beat_of_a_former_life_that_comes_late_changes_nothing():
    rig = Rig().ready()
    rig.submit("a", 6, 12)
    old = replaced(rig.w0.info, born=0)
    rig.handle(Beat(info=old, incarnation=1, epoch=1, owner="me", seen_seq=0, done_seq=0))  # type: ignore[arg-type]
    assert states(rig) == {"w0": State.READY}


def test_a_draining_instance_finishes_and_an_undo_takes_it_back():
    rig = Rig(FakeInstance("w0"), FakeInstance("w1")).ready()
    for name in "ab":
        rig.submit(name, 6, 20)
    w0 = rig.instances["w0"]
    w0.info = replaced(w0.info, state="draining")  # type: ignore[assignment]
    rig.beat(w0)
    before = sum(len(frame.admit) for frame in w0.seen)
    for name in "cdef":
        rig.submit(name, 6, 4)
    rig.run()
    assert sum(len(frame.admit) for frame in w0.seen) == before
    assert all(rig.end(name) for name in "abcdef")
    w0.info = replaced(w0.info, state="ready")  # type: ignore[assignment]
    rig.beat(w0)
    assert states(rig)["w0"] is State.READY


def test_a_lost_result_is_asked_for_by_its_frame_when_a_beat_says_twice_that_it_was_computed():
    rig = Rig().ready()
    rig.submit("a", 6, 12)
    rig.w0.result()
    lost = rig.core.fleet.instances["w0"].expected
    sent = len(rig.w0.seen)
    for _ in range(2):
        rig.now += 0.5
        rig.handle(Beat(info=rig.w0.info, incarnation=rig.w0.incarnation, epoch=1, owner="me",
                        seen_seq=lost, done_seq=lost))  # fmt: skip
    assert rig.w0.seen[sent].seq == lost


def test_a_resync_brings_every_frame_after_the_last_one_had():
    rig = Rig().ready()
    rig.submit("a", 6, 12)
    first = rig.w0.seen[0].seq
    sent = len(rig.w0.seen)
    rig.handle(Resync(instance="w0", epoch=1, owner="me", incarnation=rig.w0.incarnation, have_seq=first))
    assert [frame.seq for frame in rig.w0.seen[sent:]] == [first + 1]


def test_somebody_else_s_refused_frame_does_not_cost_us_the_instance():
    rig = Rig().ready()
    rig.handle(Refused(instance="w0", epoch=1, owner="me"))
    assert states(rig) == {"w0": State.READY}


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": [0, 99], "tokens": [1, 1]},
        {"slots": [-1], "tokens": [1]},
        {"slots": [0], "tokens": []},
        {"stopped": [Stopped(99, "stop")]},
    ],
)
def test_a_result_that_makes_no_sense_costs_the_instance_its_session_and_nobody_else_anything(wrong: dict):
    rig = Rig(FakeInstance("w0"), FakeInstance("w1")).ready()
    for name in "abcd":
        rig.submit(name, 6, 10)
    done = msgspec.structs.replace(rig.instances["w0"].result(), **wrong)
    rig.handle(done)
    assert states(rig)["w0"] is State.LOST
    rig.instances["w0"].frames.clear()
    rig.turn()
    rig.run()
    assert all(rig.tokens(name) == list(range(100, 110)) for name in "abcd")


@pytest.mark.parametrize("wrong", [{"block_tokens": 0}, {"blocks_total": 2**40}, {"max_slots": 0}])
def test_an_instance_with_impossible_sizes_is_not_used(wrong: dict):
    rig = Rig()
    info = replaced(rig.w0.info, **wrong)
    claimed = rig.w0.claimed
    rig.w0.claimed = lambda ask: msgspec.structs.replace(claimed(ask), info=info)  # type: ignore[method-assign]
    rig.pass_time(3.0)
    assert states(rig) == {"w0": State.LOST}


def test_names_that_are_no_subject_tokens_never_reach_a_subject():
    rig = Rig().ready()
    odd = FakeInstance("w.*")
    rig.beat(odd)
    assert states(rig) == {"w0": State.READY}
    with pytest.raises(BadFrame, match="subject token"):
        rig.handle(Ack(client="a.b", epoch=1, owner="me", seq=1))
    assert "a.b" not in rig.core.desk.clients


def test_a_new_leader_finds_the_blocks_of_the_old_one():
    instance = FakeInstance("w0")
    prompt = list(range(18))
    old = Rig(instance).ready()
    old.submit("a", prompt, 3)
    old.run()
    new = Rig(instance).ready()
    new.submit("b", prompt, 3)
    new.run()
    end = new.end("b")
    assert end is not None
    assert end.cached_tokens == 16


def test_an_inventory_of_several_pages_is_taken_whole_before_the_instance_serves():
    instance = FakeInstance("w0")
    prompt = list(range(18))
    old = Rig(instance).ready()
    old.submit("a", prompt, 3)
    old.run()
    new = Rig(instance)
    asked: list[int] = []
    claimed = instance.claimed

    def first_page(ask: AskClaim) -> Claimed:
        answer = claimed(ask)
        return msgspec.structs.replace(answer, blocks=answer.blocks[:1], next_offset=1)

    instance.claimed = first_page  # type: ignore[method-assign]
    new.pass_time(2.0)
    for effect in list(new.effects):
        if isinstance(effect, AskInventory):
            asked.append(effect.inventory.offset)
            assert states(new) == {"w0": State.CLAIMING}
            rest, _ = instance.compute.page(effect.inventory.offset)
            last = Claimed(ok=True, epoch=1, owner="me", incarnation=instance.incarnation,
                           info=instance.info, blocks=rest)  # fmt: skip
            new.handle(ClaimAnswer("w0", last))
    assert asked
    assert asked[0] == 1
    new.ready()
    new.submit("b", prompt, 3)
    new.run()
    end = new.end("b")
    assert end is not None
    assert end.cached_tokens == 16


# Leadership


def test_ranks_are_by_epoch_and_then_by_the_smaller_owner():
    assert outranks(2, "z", 1, "a")
    assert outranks(1, "a", 1, "b")
    assert not outranks(1, "b", 1, "a")
    assert not outranks(1, "a", 1, "a")


@pytest.mark.parametrize(
    "message",
    [
        Beacon(model="m", epoch=5, owner="other"),
        Refused(instance="w0", epoch=5, owner="other"),
        Ack(client="c", epoch=5, owner="other", seq=0),
        Ack(client="never-submitted-here", epoch=5, owner="m/other", seq=7),
        LeaseSeen(known=True, epoch=5, owner="other", ttl_s=2.0),
    ],
)
def test_a_leader_that_sees_a_higher_claim_falls_silent(message: object):
    rig = Rig().ready()
    rig.submit("a", 6, 40)
    assert rig.core.leads
    effects = rig.handle(message)
    assert any(isinstance(effect, Follow) for effect in effects)
    assert not rig.core.leads
    rig.effects.clear()
    rig.turn()
    rig.pass_time(1.0)
    assert not any(isinstance(effect, SendStep | SendTokens) for effect in rig.effects)
    rig.ready()
    assert rig.core.leadership.epoch == 6


@pytest.mark.parametrize(
    "message",
    [
        Beacon(model="another", epoch=5, owner="other"),
        Refused(instance="theirs", epoch=5, owner="other"),
        Ack(client="theirs", epoch=5, owner="other", seq=0),
        Beat(info=FakeInstance("theirs", model="another").info, incarnation=3, epoch=5, owner="other",
             seen_seq=0, done_seq=0),
    ],
)  # fmt: skip
def test_another_model_s_mesh_on_the_same_broker_is_none_of_our_business(message: object):
    rig = Rig().ready()
    rig.submit("a", 6, 40)
    assert rig.handle(message) == []
    rig.turn()
    assert rig.core.leads
    assert list(rig.core.fleet.instances) == ["w0"]
    assert list(rig.core.desk.clients) == ["c"]


def test_nonsense_epochs_are_not_believed():
    rig = Rig().ready()
    rig.handle(Ack(client="c", epoch=MAX_EPOCH + 1, owner="x", seq=0))
    assert rig.core.leads


def test_nobody_claims_while_either_the_beacon_or_the_lease_lives():
    leadership = Leadership("b", LeadershipTimes(), 0.0)
    assert not leadership.may_claim(1.4)
    leadership.heard_beacon(3, "a", 1.4)
    assert not leadership.may_claim(2.8)
    leadership.heard_lease(3, "a", 2.0, 2.8)
    assert not leadership.may_claim(4.7)
    assert leadership.may_claim(4.9)
    assert leadership.next_epoch() == 4


def test_a_store_that_cannot_be_asked_does_not_hinder_a_takeover():
    leadership = Leadership("b", LeadershipTimes(), 0.0)
    leadership.heard_lease(3, "a", 2.0, 0.0)
    leadership.lease_unknown(1.6)
    assert leadership.may_claim(1.7)


def test_a_deliberate_end_gives_the_lease_up():
    rig = Rig().ready()
    assert any(isinstance(effect, DropLease) for effect in rig.handle(Stop()))


def test_being_cut_off_is_not_mistaken_for_the_silence_of_others():
    rig = Rig().ready()
    rig.submit("a", 6, 40)
    rig.handle(Connected(False))
    rig.acking = False
    rig.pass_time(120.0, beats=False)
    rig.handle(Connected(True))
    rig.acking = True
    rig.pass_time(0.2)
    assert states(rig) == {"w0": State.READY}
    rig.run()
    assert rig.tokens("a") == list(range(100, 140))
