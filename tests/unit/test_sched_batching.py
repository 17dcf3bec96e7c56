"""Planning of frames: what a user waits for, and what a neighbour may do to a running stream."""

from collections import Counter

import pytest
from sched_rig import BLOCK, FakeInstance, Rig

from services.scheduler.admission import ExpectedOutput, ReserveMax
from services.scheduler.budget import BudgetRules
from services.scheduler.clients import WINDOW_FRAMES
from services.scheduler.core import Rules
from services.scheduler.planner import MAX_FRAME_IDS
from services.scheduler.policy import StaticBatchPolicy
from shared.wire import Step, encode


class Optimist(ExpectedOutput):
    """Sets nothing aside, so that blocks run out."""

    def output_tokens(self, max_tokens: int, written: int) -> int:
        return min(written + 1, max_tokens)


def small(**fields: int) -> FakeInstance:
    return FakeInstance("w0", **fields)


def steady(frame: Step) -> bool:
    return not (frame.admit or frame.work or frame.blocks or frame.release or frame.kv_ops)


def test_a_request_is_answered_and_leaves_nothing_behind():
    rig = Rig().ready()
    rig.submit("a", 6, 5)
    rig.run()
    assert rig.answers("a") == ["accepted"]
    assert rig.tokens("a") == [100, 101, 102, 103, 104]
    end = rig.end("a")
    assert end is not None
    assert (end.reason, end.generated, end.cached_tokens, end.preemptions) == ("length", 5, 0, 0)
    assert rig.at_rest()


def test_a_steady_decode_frame_names_no_sequence():
    rig = Rig(FakeInstance("w0", blocks_total=8000, max_slots=256, max_step_tokens=8192)).ready()
    for number in range(256):
        rig.submit(f"{number}", 4, 60, turn=False)
    rig.turn()
    for _ in range(30):
        rig.step()
    quiet = [frame for frame in rig.w0.seen if steady(frame)]
    assert len(quiet) > 10
    assert max(len(encode(frame)) for frame in quiet) < 110


def test_several_frames_are_in_flight_while_anything_decodes():
    rig = Rig().ready()
    rig.submit("a", 6, 30)
    for _ in range(10):
        assert len(rig.w0.frames) == 2
        rig.step()


def test_requests_that_arrive_together_start_in_one_frame():
    rig = Rig().ready()
    for name in "abcd":
        rig.submit(name, turn=False)
    rig.turn()
    assert len(rig.w0.seen[0].admit) == 4


def test_a_newcomer_joins_at_the_next_frame_and_interrupts_nobody():
    rig = Rig().ready()
    rig.submit("a", 6, 40)
    for _ in range(5):
        rig.step()
    before = len(rig.tokens("a"))
    rig.submit("b", 6, 10)
    rig.step()
    assert rig.w0.seen[-1].admit
    for _ in range(5):
        rig.step()
    assert len(rig.tokens("a")) == before + 6
    assert rig.tokens("b")


def test_a_long_prompt_is_cut_so_that_running_streams_keep_their_pace():
    rules = Rules("m", budget=BudgetRules(itl_target_s=0.05, floor_tokens=8))
    rig = Rig(FakeInstance("w0", prefill_tok_s=1000.0, blocks_total=128), rules=rules).ready()
    rig.submit("a", 6, 60)
    for _ in range(4):
        rig.step()
    rig.submit("long", 200, 5)
    chunks = []
    before = len(rig.tokens("a"))
    steps = 0
    while not rig.tokens("long"):
        rig.step()
        steps += 1
    chunks = [work.count for frame in rig.w0.seen[1:] for work in frame.work if work.count]
    assert sum(chunks) == 200
    assert max(chunks) <= 50
    assert len(rig.tokens("a")) == before + steps, "a token in every frame"


def test_a_prompt_alone_fills_the_step_up_to_half_a_second():
    rig = Rig(FakeInstance("w0", prefill_tok_s=200.0, decode_step_s=0.01)).ready()
    rig.submit("long", 250, 1)
    first = rig.w0.seen[0].work[0].count
    assert 60 < first <= 100


def test_a_cached_prefix_is_not_computed_again():
    rig = Rig().ready()
    prompt = list(range(18))
    rig.submit("a", prompt, 3)
    rig.run()
    rig.submit("b", [*prompt[:16], 500, 501], 3)
    admit = rig.w0.seen[-1].admit or rig.w0.seen[-2].admit
    assert admit[0].computed == 16
    rig.run()
    end = rig.end("b")
    assert end is not None
    assert end.cached_tokens == 16


def test_a_prompt_that_is_cached_whole_costs_one_token_and_one_copy():
    rig = Rig().ready()
    prompt = list(range(16))
    rig.submit("a", prompt, 6)
    rig.run()
    rig.w0.seen.clear()
    rig.submit("b", prompt, 6)
    frame = rig.w0.seen[0]
    assert frame.admit[0].computed == 15
    assert len(frame.kv_ops) == 1
    assert not frame.work
    rig.run()
    assert rig.tokens("b") == rig.tokens("a")
    assert rig.at_rest()


def test_two_tenants_never_share_blocks():
    rig = Rig().ready()
    prompt = list(range(16))
    rig.submit("a", prompt, 3, salt="one")
    rig.run()
    rig.submit("b", prompt, 3, salt="two")
    rig.run()
    end = rig.end("b")
    assert end is not None
    assert end.cached_tokens == 0


def test_a_request_for_prompt_logprobs_reads_no_cached_prefix():
    rig = Rig().ready()
    prompt = list(range(16))
    rig.submit("a", prompt, 3)
    rig.run()
    rig.w0.seen.clear()
    rig.submit("b", prompt, 3, sampling={"prompt_logprobs": 0})
    assert rig.w0.seen[0].admit[0].computed == 0


def test_choices_of_one_request_compute_its_prompt_once():
    rig = Rig().ready()
    rig.submit("a", 34, 4, n=4)
    rig.run()
    computed = Counter(
        admit.choice for frame in rig.w0.seen for admit in frame.admit for _ in range(34 - admit.computed)
    )
    assert computed == {0: 34, 1: 2, 2: 2, 3: 2}
    assert all(rig.tokens("a", choice) == [100, 101, 102, 103] for choice in range(4))


def test_the_other_choices_go_on_when_the_one_that_computes_the_prompt_is_cancelled():
    rig = Rig(FakeInstance("w0", prefill_tok_s=100.0)).ready()
    rig.submit("a", 100, 4, n=3)
    rig.step()
    from shared.wire import Cancel

    rig.handle(Cancel(client="c", request_id="a", handles=[rig.handle_of("a", 0)]))
    rig.turn()
    rig.run()
    assert rig.tokens("a", 1) == rig.tokens("a", 2) == [100, 101, 102, 103]
    assert rig.at_rest()


def test_lower_priority_numbers_start_first():
    rig = Rig(small(max_slots=1)).ready()
    rig.submit("now", 4, 20, priority=-1)
    for name, priority in (("later", 1), ("usual", 0), ("first", -1)):
        rig.submit(name, 4, 2, priority=priority)
    rig.run()
    order = [admit.ids for frame in rig.w0.seen for admit in frame.admit]
    starts = {name: sum(name.encode()) * 7 % 900 for name in ("first", "usual", "later")}
    assert [ids[0] for ids in order[1:]] == [starts["first"], starts["usual"], starts["later"]]


def test_waiting_long_makes_up_for_a_lower_priority():
    rig = Rig(small(max_slots=1)).ready()
    rig.submit("busy", 4, 200, timeout_s=600.0)
    rig.submit("old", 4, 2, priority=1)
    rig.pass_time(35.0)
    rig.submit("new", 4, 2, priority=0)
    rig.run()
    old, new = rig.end("old"), rig.end("new")
    assert old is not None
    assert new is not None
    assert old.times.queue_s > new.times.queue_s
    order = [admit.ids[0] for frame in rig.w0.seen for admit in frame.admit]
    assert order.index(sum(b"old") * 7 % 900) < order.index(sum(b"new") * 7 % 900)


def test_nobody_small_overtakes_a_long_request_for_ever():
    rig = Rig(small(blocks_total=32), reservation=ReserveMax()).ready()
    rig.submit("running", 4, 60)
    rig.submit("big", 60, 40)
    rig.submit("small", 4, 4)
    rig.run()
    order = [admit.ids[0] for frame in rig.w0.seen for admit in frame.admit]
    assert order.index(sum(b"big") * 7 % 900) < order.index(sum(b"small") * 7 % 900)


def test_expected_output_is_reserved_so_that_nobody_is_preempted():
    rig = Rig(small(blocks_total=40, max_slots=8)).ready()
    for name in "abcdefgh":
        rig.submit(name, 8, 40)
    rig.run(1000)
    assert rig.core.counters.preemptions == 0
    assert all(rig.tokens(name) == list(range(100, 140)) for name in "abcdefgh")


@pytest.mark.parametrize("max_tokens", [1000, 8000])
def test_short_outputs_teach_to_expect_less(max_tokens: int):
    learnt = ExpectedOutput()
    before = learnt.expected_tokens(max_tokens, 0)
    for _ in range(50):
        learnt.observe(max_tokens, 100)
    assert 100 < learnt.expected_tokens(max_tokens, 0) < 250 < before
    assert learnt.expected_tokens(max_tokens, 900) >= 901


@pytest.mark.parametrize("max_tokens", [1000, 2000])
def test_outputs_that_use_their_limit_are_soon_expected_whole(max_tokens: int):
    learnt = ExpectedOutput()
    for _ in range(30):
        learnt.observe(max_tokens, max_tokens)
    assert learnt.expected_tokens(max_tokens, 0) > 0.9 * max_tokens


def test_a_limit_that_is_the_rest_of_the_context_does_not_keep_others_out():
    assert ExpectedOutput().output_tokens(8000, 0) < 1000


def test_preemption_makes_the_reservation_more_careful():
    learnt = ExpectedOutput()
    before = learnt.output_tokens(2000, 0)
    learnt.preempted()
    assert learnt.output_tokens(2000, 0) > before


def test_while_nobody_is_preempted_ever_less_is_set_aside_for_the_same_expectation():
    learnt = ExpectedOutput()
    for _ in range(100):
        learnt.observe(2000, 300)
    assert learnt.expected_tokens(2000, 0) > 300
    assert 50 < learnt.output_tokens(2000, 0) < 150
    for _ in range(8):
        learnt.preempted()
    assert learnt.output_tokens(2000, 0) > 250


def test_the_latest_of_the_least_urgent_is_preempted_and_goes_on_where_it_was():
    rig = Rig(small(blocks_total=12), reservation=Optimist()).ready()
    rig.submit("urgent", 8, 24, priority=-1)
    rig.submit("first", 8, 24)
    rig.submit("last", 8, 24)
    rig.run(1000)
    ends = {name: rig.end(name) for name in ("urgent", "first", "last")}
    assert all(end is not None and end.reason == "length" for end in ends.values())
    assert ends["urgent"].preemptions == 0  # type: ignore[union-attr]
    assert ends["last"].preemptions > 0  # type: ignore[union-attr]
    for name in ends:
        assert rig.tokens(name) == list(range(100, 124)), name
    attempts = [
        row.attempt for frame in rig.frames for row in frame.rows if row.handle == rig.handle_of("last")
    ]
    assert attempts == sorted(attempts)
    assert len(set(attempts)) == ends["last"].preemptions + 1  # type: ignore[union-attr]
    assert rig.core.counters.recomputed_tokens > 0
    assert rig.at_rest()


def test_a_frame_that_preempts_admits_nobody():
    rig = Rig(small(blocks_total=12), reservation=Optimist()).ready()
    for name in "abcdef":
        rig.submit(name, 8, 24)
    before = 0
    for _ in range(300):
        rig.step()
        preempted = rig.core.counters.preemptions - before
        before = rig.core.counters.preemptions
        if preempted and rig.w0.seen[-1].release:
            assert not rig.w0.seen[-1].admit
    assert before > 0


@pytest.mark.parametrize("blocks", [10, 11, 12, 16])
def test_every_sequence_ends_however_scarce_blocks_are(blocks: int):
    rig = Rig(small(blocks_total=blocks), reservation=Optimist()).ready()
    for name in "abcdefgh":
        rig.submit(name, 9, 30)
    rig.run(3000)
    assert all(rig.tokens(name) == list(range(100, 130)) for name in "abcdefgh")
    assert rig.at_rest()


def test_the_admissions_of_a_frame_fit_into_a_message():
    rig = Rig(FakeInstance("w0", blocks_total=90_000, max_slots=64, max_len=60_000, max_step_tokens=10**6))
    rig.ready()
    prompt = [n % 1000 for n in range(40_000)]
    rig.submit("warm", prompt, 1)
    rig.run()
    rig.w0.seen.clear()
    for number in range(6):
        rig.submit(f"{number}", prompt, 2, turn=False)
    rig.turn()
    rig.run()
    sizes = [sum(len(admit.ids) for admit in frame.admit) for frame in rig.w0.seen]
    assert max(sizes) <= MAX_FRAME_IDS
    assert sum(sizes) == 6 * 40_000


def test_a_static_batch_is_filled_only_when_the_one_before_has_ended():
    rig = Rig(small(max_slots=2), policy=StaticBatchPolicy(), reservation=ReserveMax()).ready()
    for name, tokens in (("a", 3), ("b", 12), ("c", 3), ("d", 3)):
        rig.submit(name, 4, tokens, turn=False)
    rig.turn()
    rig.run()
    admissions = [[admit.slot for admit in frame.admit] for frame in rig.w0.seen if frame.admit]
    assert [len(slots) for slots in admissions] == [2, 2]
    b, c = rig.end("b"), rig.end("c")
    assert b is not None
    assert c is not None
    assert c.times.queue_s >= b.times.decode_s


def test_a_slot_and_blocks_are_reused_only_when_no_frame_in_flight_names_them():
    from shared.wire import Cancel

    rig = Rig(small(max_slots=1, blocks_total=8)).ready()
    rig.submit("a", 4, 20)
    rig.step()
    rig.handle(Cancel(client="c", request_id="a"))
    rig.submit("b", 4, 3)
    end = rig.end("a")
    assert end is not None
    assert end.reason == "cancelled"
    assert rig.w0.seen[-1].release == [] or not rig.w0.seen[-1].admit
    rig.run()
    assert rig.tokens("b") == [100, 101, 102]
    assert all(BLOCK for _ in rig.frames)
    assert rig.at_rest()


def test_waiting_for_a_block_is_booked_as_stalled_and_times_still_sum_to_the_whole():
    rig = Rig(small(blocks_total=12), reservation=Optimist()).ready()
    began = rig.now
    for name in "abcd":
        rig.submit(name, 8, 24)
    ended: dict[str, float] = {}
    for _ in range(400):
        rig.step()
        ended |= {name: rig.now for name in "abcd" if name not in ended and rig.end(name)}
    stalled = 0.0
    for name in "abcd":
        end = rig.end(name)
        assert end is not None
        times = end.times
        stalled += times.stalled_s
        parts = (times.queue_s, times.prefill_s, times.decode_s, times.preempted_s, times.recomputed_s)
        assert sum(parts) + times.stalled_s == pytest.approx(ended[name] - began, abs=1e-6)
    assert stalled > 0


def test_times_of_a_sequence_sum_to_its_life():
    rig = Rig(small(max_slots=1)).ready()
    began = rig.now
    rig.submit("a", 6, 5)
    rig.submit("b", 6, 5)
    rig.run()
    end = rig.end("b")
    assert end is not None
    times = end.times
    total = times.queue_s + times.prefill_s + times.decode_s + times.preempted_s + times.recomputed_s
    assert total == pytest.approx(rig.now - began, abs=0.03)
    assert times.queue_s > 0


def test_a_request_taken_before_any_instance_was_known_ends_in_words_if_it_fits_nowhere():
    rig = Rig(small(max_len=100))
    rig.pass_time(2.0, beats=False)
    rig.submit("big", 90, 20)
    rig.submit("small", 4, 3)
    rig.pass_time(0.2)
    rig.run()
    end = rig.end("big")
    assert end is not None
    assert end.reason == "error"
    assert "100" in end.message
    assert rig.tokens("small") == [100, 101, 102]


def test_a_long_request_goes_to_the_instance_that_can_hold_it():
    rig = Rig(small(max_len=50), FakeInstance("w1", max_len=200)).ready()
    for number in range(4):
        rig.submit(f"{number}", 80, 10)
    rig.run()
    assert not [admit for frame in rig.instances["w0"].seen for admit in frame.admit]
    assert all(rig.tokens(f"{number}") == list(range(100, 110)) for number in range(4))


def test_a_pinned_request_waits_for_the_canary_like_any_other():
    rig = Rig()
    rig.pass_time(2.0)
    rig.submit("a", 4, 2, pin="w0")
    assert [len(frame.admit) for frame in rig.w0.seen if frame.admit] == [1]
    rig.run()
    assert rig.tokens("a") == [100, 101]


def test_steps_wait_while_every_client_is_behind_and_go_on_with_its_acknowledgement():
    rig = Rig().ready()
    rig.submit("a", 6, 60)
    rig.acking = False
    for _ in range(40):
        rig.step()
    assert not rig.w0.frames, "nobody would have read further tokens any sooner"
    assert rig.core.desk.clients["c"].kept == WINDOW_FRAMES + 2, "what was in flight still comes"
    got = len(rig.tokens("a"))
    rig.acking = True
    rig.acknowledge()
    rig.turn()
    rig.run()
    assert len(rig.tokens("a")) == 60 > got
    assert rig.at_rest()


def test_one_client_that_is_behind_does_not_hold_up_another():
    rig = Rig().ready()
    rig.submit("a", 6, 60)
    rig.acking = False
    for _ in range(20):
        rig.step()
    rig.submit("b", 6, 5, client="d")
    for _ in range(12):
        rig.step()
    assert [end.reason for frame in rig.frames for end in frame.ends] == ["length"]
