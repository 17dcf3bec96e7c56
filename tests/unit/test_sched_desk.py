"""Requests, limits, deadlines and leases, as clients meet them."""

import gc

import msgspec
import pytest
from sched_rig import FakeInstance, Rig

from services.scheduler.core import Rules
from services.scheduler.desk import DeskRules
from services.scheduler.sequences import Request
from services.scheduler.validate import malformed
from shared.wire import Ack, Cancel, Sampling, SlotLogprobs, Submit, SubmitSeq


def tight(queue_bound: int) -> Rules:
    return Rules("m", desk=DeskRules(queue_bound=queue_bound, grace_s=0.0))


def test_a_repeated_submit_gets_the_same_answer_and_runs_once():
    rig = Rig().ready()
    for _ in range(3):
        rig.submit("a", 6, 5)
    rig.run()
    rig.submit("a", 6, 5)
    rig.run()
    assert rig.answers("a") == ["accepted"] * 4
    assert rig.tokens("a") == [100, 101, 102, 103, 104]


def test_an_acceptance_travels_with_the_first_token_or_alone_after_a_moment():
    rig = Rig(FakeInstance("w0", max_slots=1)).ready()
    rig.submit("a", 6, 30)
    assert rig.frames == []
    rig.step()
    assert [(len(f.answers), len(f.rows)) for f in rig.frames] == [(1, 1)]
    rig = Rig()
    rig.pass_time(2.0, beats=False)
    rig.submit("a", 6, 30)
    assert rig.frames == []
    rig.pass_time(0.1, beats=False)
    assert rig.answers("a") == ["accepted"]


def test_a_full_queue_refuses_with_a_time_to_try_again():
    rig = Rig(
        FakeInstance("w0", max_slots=1), rules=Rules("m", desk=DeskRules(queue_bound=3, grace_s=0.0))
    ).ready()
    for number in range(5):
        rig.submit(f"r{number}", 4, 50)
    assert [rig.answers(f"r{n}") for n in range(5)] == [["accepted"]] * 4 + [["queue_full"]]
    refusal = next(a for f in rig.frames for a in f.answers if a.code == "queue_full")
    assert refusal.retry_after_s >= 1.0
    assert "try again" in refusal.message


def test_a_burst_that_free_slots_take_is_no_full_queue():
    rig = Rig(FakeInstance("w0", max_slots=6), rules=tight(2)).ready()
    for number in range(10):
        rig.submit(f"r{number}", 4, 5, turn=False)
    rig.turn()
    rig.run()
    assert [rig.answers(f"r{n}") for n in range(10)] == [["accepted"]] * 8 + [["queue_full"]] * 2


def test_a_request_that_no_queue_could_ever_hold_is_refused_for_good():
    rig = Rig(rules=Rules("m", desk=DeskRules(queue_bound=3, grace_s=0.0))).ready()
    rig.submit("a", 4, 5, n=4)
    assert rig.answers("a") == ["invalid"]
    rig.submit("b", 4, 5, n=3)
    rig.run()
    assert rig.answers("b") == ["accepted"]


def test_a_resumed_request_is_not_turned_away_by_a_full_queue():
    rig = Rig(
        FakeInstance("w0", max_slots=1), rules=Rules("m", desk=DeskRules(queue_bound=1, grace_s=0.0))
    ).ready()
    rig.submit("a", 4, 50)
    rig.submit("b", 4, 50)
    rig.submit("c", 4, 50, accepted=[1, 2])
    rig.pass_time(0.1)
    assert rig.answers("c") == ["accepted"]


def test_a_resumed_sequence_goes_on_at_the_index_its_client_waits_for():
    rig = Rig().ready()
    rig.submit("a", 6, 8, accepted=[100, 101, 102])
    rig.run()
    rows = [row for frame in rig.frames for row in frame.rows]
    assert [row.index for row in rows] == [3, 4, 5, 6, 7]
    assert rig.tokens("a") == [103, 104, 105, 106, 107]
    end = rig.end("a")
    assert end is not None
    assert end.generated == 8


@pytest.mark.parametrize(("accepted", "reason"), [([5, 6, 7], "length"), ([5, 9], "stop")])
def test_a_resumed_sequence_that_was_complete_only_gets_its_end(accepted: list[int], reason: str):
    rig = Rig().ready()
    rig.submit("a", 6, 3, accepted=accepted, sampling={"stop_token_ids": (9,)})
    rig.run()
    end = rig.end("a")
    assert end is not None
    assert (end.reason, end.generated) == (reason, len(accepted))
    assert rig.tokens("a") == []
    assert rig.at_rest()


def test_a_stop_id_ends_the_sequence_and_is_delivered():
    rig = Rig().ready()
    rig.submit("a", 6, 50, sampling={"stop_token_ids": (103,)})
    rig.run()
    end = rig.end("a")
    assert end is not None
    assert (end.reason, end.generated) == ("stop", 4)
    assert rig.tokens("a")[-1] == 103
    assert rig.at_rest()


@pytest.mark.parametrize("prompt", [252, 300])
def test_what_can_never_fit_is_refused_at_once_in_words(prompt: int):
    rig = Rig(FakeInstance("w0", blocks_total=64, max_len=256 if prompt == 252 else 1000)).ready()
    rig.submit("a", prompt, 8)
    assert rig.answers("a") == ["too_long"]
    message = next(a.message for f in rig.frames for a in f.answers)
    assert str(prompt + 8) in message


def test_a_token_beyond_the_vocabulary_is_refused():
    rig = Rig().ready()
    rig.submit("a", [1, 2, 1000], 8)
    assert rig.answers("a") == ["too_long"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"seqs": []}, "seqs"),
        ({"seqs": [SubmitSeq(1, 0), SubmitSeq(1, 1)]}, "handles"),
        ({"seqs": [SubmitSeq(n, 0) for n in range(200)]}, "seqs"),
        ({"sampling": Sampling(max_tokens=0)}, "max_tokens"),
        ({"sampling": Sampling(max_tokens=5, temperature=float("nan"))}, "temperature"),
        ({"sampling": Sampling(max_tokens=5, top_p=float("inf"))}, "top_p"),
        ({"sampling": Sampling(max_tokens=5, min_tokens=6)}, "min_tokens"),
        ({"sampling": Sampling(max_tokens=5, logit_bias=((1, float("inf")),))}, "logit_bias"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"queue_timeout_s": -1.0}, "queue_timeout_s"),
        ({"request_id": "x" * 200}, "request_id"),
        ({"priority": 10**9}, "priority"),
        ({"seqs": [SubmitSeq(1, 0, [1] * 9)]}, "accepted"),
    ],
)
def test_a_malformed_submit_is_refused_by_the_name_of_what_is_wrong(change: dict, word: str):
    fields = {"client": "c", "request_id": "r", "prompt": [1], "seqs": [SubmitSeq(1, 0)],
              "sampling": Sampling(max_tokens=5)}  # fmt: skip
    assert malformed(Submit(**fields)) == ""
    assert word in malformed(Submit(**(fields | change)))


def test_a_cancel_ends_a_sequence_within_the_next_frame():
    rig = Rig().ready()
    rig.submit("a", 6, 100)
    for _ in range(5):
        rig.step()
    rig.handle(Cancel(client="c", request_id="a"))
    rig.turn()
    end = rig.end("a")
    assert end is not None
    assert end.reason == "cancelled"
    assert end.generated == len(rig.tokens("a"))
    rig.step()
    assert rig.w0.seen[-1].release
    rig.run()
    assert rig.at_rest()


def test_a_cancel_of_something_unknown_is_answered():
    rig = Rig().ready()
    rig.handle(Cancel(client="c", request_id="nothing"))
    rig.turn()
    assert rig.answers("nothing") == ["unknown_request"]


def test_a_request_that_waits_too_long_ends_with_a_time_to_try_again():
    rig = Rig(FakeInstance("w0", max_slots=1)).ready()
    rig.submit("busy", 4, 200)
    rig.submit("a", 4, 5, queue_timeout_s=2.0)
    rig.pass_time(2.5)
    end = rig.end("a")
    assert end is not None
    assert end.reason == "timeout"
    assert "try again" in end.message


def test_requests_wait_for_the_first_instance():
    rig = Rig()
    rig.pass_time(2.0, beats=False)
    rig.submit("a", 4, 3)
    rig.pass_time(0.1, beats=False)
    assert rig.answers("a") == ["accepted"]
    rig.ready()
    rig.run()
    assert rig.core.counters.tokens >= 3
    assert rig.at_rest()


def test_a_running_request_ends_at_its_deadline_with_what_it_has():
    rig = Rig().ready()
    rig.submit("a", 4, 200, timeout_s=1.0)
    for _ in range(5):
        rig.step()
    rig.pass_time(1.5)
    end = rig.end("a")
    assert end is not None
    assert (end.reason, end.generated) == ("timeout", 5)
    rig.run()
    assert rig.at_rest()


def test_frames_are_sent_again_until_they_are_acknowledged():
    rig = Rig().ready()
    rig.acking = False
    rig.submit("a", 6, 4)
    rig.run()
    first = [frame.seq for frame in rig.frames]
    assert first == list(range(1, len(first) + 1))
    rig.pass_time(1.0)
    assert [frame.seq for frame in rig.frames][len(first) :][: len(first)] == first
    rig.handle(Ack(client="c", epoch=1, owner="me", seq=first[-1]))
    count = len(rig.frames)
    rig.pass_time(2.0)
    assert len(rig.frames) == count


def test_a_client_that_saw_a_gap_gets_the_rest_at_once():
    rig = Rig().ready()
    rig.acking = False
    rig.submit("a", 6, 4)
    rig.run()
    count = len(rig.frames)
    rig.handle(Ack(client="c", epoch=1, owner="me", seq=2, resend=True))
    assert [frame.seq for frame in rig.frames[count:]] == [frame.seq for frame in rig.frames[2:count]]


def test_sequences_of_a_client_that_is_gone_end_when_its_lease_lapses():
    rig = Rig().ready()
    rig.acking = False
    rig.submit("a", 6, 200)
    rig.submit("b", 6, 200)
    for _ in range(5):
        rig.step()
    rig.pass_time(10.5)
    rig.run()
    assert rig.at_rest()
    assert rig.core.counters.clients_lapsed == 1


def test_a_client_that_comes_back_after_its_lease_goes_on_with_the_next_frame_it_expects():
    rig = Rig().ready()
    rig.acking = False
    rig.submit("a", 6, 30)
    for _ in range(5):
        rig.step()
    had = 3
    rig.pass_time(10.5)
    rig.frames.clear()
    # It submits before it knows anything, and only then says what it had.
    rig.submit("a", 6, 30, accepted=[100, 101])
    assert rig.frames == []
    rig.handle(Ack(client="c", epoch=1, owner="me", seq=had))
    rig.turn()
    assert rig.frames[0].seq == had + 1
    assert rig.frames[0].answers[0].code == "unknown_client"
    rig.acking = True
    rig.run()
    assert rig.tokens("a") == list(range(102, 130))
    attempts = {row.attempt for frame in rig.frames for row in frame.rows}
    assert attempts == {2}, "above those of its former sequences"


def test_an_acknowledgement_from_somebody_unknown_asks_for_a_resubmission():
    rig = Rig().ready()
    rig.handle(Ack(client="stranger", epoch=1, owner="me", seq=17))
    rig.turn()
    (frame,) = rig.frames
    assert (frame.seq, frame.answers[0].code) == (18, "unknown_client")


def test_the_beacon_tells_a_client_of_its_last_frame_until_it_has_it():
    rig = Rig().ready()
    rig.acking = False
    rig.submit("a", 6, 4)
    rig.run()
    rig.pass_time(0.6)
    last = rig.core.desk.clients["c"].seq
    assert rig.beacons()[-1].beacon.clients == {"c": last}
    rig.acking = True
    rig.pass_time(0.6)
    assert rig.beacons()[-1].beacon.clients == {}


def test_an_idle_client_keeps_its_place_without_a_word():
    rig = Rig().ready()
    rig.submit("a", 6, 4)
    rig.run()
    rig.pass_time(0.2)
    last = rig.frames[-1].seq
    rig.acking = False
    rig.pass_time(100.0)
    rig.submit("b", 6, 4)
    rig.run()
    assert rig.core.counters.clients_lapsed == 0
    assert rig.tokens("b") == [100, 101, 102, 103]
    assert next(f.seq for f in rig.frames if any(a.request_id == "b" for a in f.answers)) == last + 1


def test_only_so_many_silent_clients_are_remembered():
    rig = Rig(rules=Rules("m", desk=DeskRules(clients_remembered=5))).ready()
    for number in range(20):
        rig.handle(Cancel(client=f"stranger{number}", request_id="x"))
    rig.turn()
    rig.pass_time(6.0)
    assert len(rig.core.desk.clients) <= 5


def test_ended_requests_are_forgotten_long_before_their_deadlines():
    rig = Rig(rules=Rules("m", desk=DeskRules(remember_s=5.0))).ready()
    for number in range(700):
        rig.submit(f"x{number % 7}{number // 7 % 10}{number // 70}", 4, 1, timeout_s=600.0)
        rig.run()
    rig.pass_time(12.0)
    desk = rig.core.desk
    assert not desk._open
    assert len(desk._deadlines) <= 1000
    assert not desk.clients["c"].answered


def test_log_probabilities_travel_with_the_index_of_their_token():
    rig = Rig().ready()
    rig.submit("a", 6, 4, accepted=[7])
    for _ in range(3):
        done = rig.w0.result()
        logprobs = [SlotLogprobs(slot, -0.5, [(1, -0.5)]) for slot in done.slots]
        rig.handle(msgspec.structs.replace(done, logprobs=logprobs))
        rig.turn()
    rows = [row for frame in rig.frames for row in frame.logprobs]
    assert [(row.index, row.chosen, row.top) for row in rows] == [
        (n, [-0.5], [[(1, -0.5)]]) for n in (1, 2, 3)
    ]
    end = rig.end("a")
    assert end is not None
    assert end.generated == 4


def test_without_any_instance_requests_wait_a_while_and_are_then_refused_until_one_comes():
    rig = Rig(rules=Rules("m")).ready()
    rig.pass_time(1.0)
    rig.pass_time(8.0, beats=False)
    rig.submit("early", 4, 5)
    rig.pass_time(10.0, beats=False)
    rig.submit("late", 4, 5)
    assert (rig.answers("early"), rig.answers("late")) == (["accepted"], ["no_instance"])
    refusal = next(a for f in rig.frames for a in f.answers if a.code == "no_instance")
    assert "hortator worker" in refusal.message
    rig.ready()
    rig.submit("again", 4, 5)
    rig.run()
    assert rig.tokens("again") == [100, 101, 102, 103, 104]


def test_prompts_of_ended_requests_leave_memory_without_the_garbage_collector():
    """It comes seldom, and a prompt may be a megabyte."""
    rig = Rig().ready()
    rig.submit("first", 40, 6, n=2)
    rig.run()
    gc.collect()
    gc.disable()
    try:
        for name in ("a", "b", "c"):
            rig.submit(name, 40, 6, n=2)
        rig.step()
        rig.handle(Cancel(client="c", request_id="b"))
        rig.run()
        rig.frames.clear()
        kept = [each.request_id for each in gc.get_objects() if type(each) is Request]
    finally:
        gc.enable()
    assert not set(kept) & {"a", "b", "c"}
