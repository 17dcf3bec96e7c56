"""The vectorised batch against a slow, obvious one, under random schedules; and what it refuses."""

import random
import re
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_frames import NAME, SHAPE, RandomScheduler, frame

from services.worker.faults import FrameFault
from services.worker.mock import MockCosts, MockExecutor, token_range
from services.worker.shape import BatchShape
from services.worker.slots import AppliedStep, Batch, goes_on
from services.worker.step import ExecutorInfo, StepInput, StepOutput
from shared.wire import Admit, Extend, KvOp, Sampling, Step, Work
from tests.support.slow_batch import SlowBatch


def mock(shape: BatchShape = SHAPE) -> MockExecutor:
    info = ExecutorInfo(NAME, shape.block_tokens, shape.blocks_total, shape.max_len, shape.vocab_size, 0, 0)
    return MockExecutor(info, shape.max_slots, MockCosts())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), depth=st.integers(0, 4))
def test_any_legal_schedule_gives_what_the_slow_batch_gives(seed: int, depth: int) -> None:
    scheduler = RandomScheduler(random.Random(seed), depth)
    batch, slow, executor = Batch(SHAPE, NAME), SlowBatch(NAME, SHAPE.block_tokens, SHAPE.max_len), mock()
    under_way: deque[Step] = deque()
    announced: set[bytes] = set()
    for number in range(1, 80):
        under_way.append(scheduler.plan())
        if len(under_way) <= depth:
            continue
        step = under_way.popleft()
        rows = slow.apply(step)
        work = batch.apply(step)
        assert list(zip(*(a.tolist() for a in (work.slots, work.starts, work.counts, work.samples)))) == rows
        assert work.copies == [(op.src, op.dst) for op in step.kv_ops]
        output = executor.run(work, batch.arrays)
        drawn = {slot: int(token) for (slot, _, _, samples), token in zip(rows, output.tokens) if samples}
        expected = slow.commit(rows, drawn)
        result = batch.commit(work, output)
        assert dict(zip(result.slots, result.tokens)) == expected.tokens
        assert {row.slot: row.reason for row in result.stopped} == expected.stopped
        stored = [(row.block, row.hash) for row in result.stored]
        assert stored == expected.stored
        assert result.prefill_tokens + result.decode_tokens == sum(count for _, _, count, _ in rows)
        scheduler.learn(result.stopped, stored, number - depth)

        assert {b: h for b in range(SHAPE.blocks_total) if (h := batch.hashes.of(b))} == slow.hash_of
        came, went = batch.hashes.take_changes()
        assert not announced & set(came)
        assert set(went) <= announced
        announced = (announced | set(came)) - set(went)
        assert announced == set(slow.hash_of.values())
        for slot, seq in slow.slots.items():
            length = int(batch.arrays.known[slot])
            assert batch.arrays.tokens[slot, :length].tolist() == seq.ids
            if not seq.stopped:
                table = batch.arrays.block_table[slot]
                assert table[: len(seq.blocks)].tolist() == seq.blocks
                assert (table[len(seq.blocks) :] == -1).all()
        assert batch.live == len(slow.slots)
        assert batch.running == sum(not seq.stopped for seq in slow.slots.values())


def admission(
    slot: int = 0, ids: int = 6, computed: int = 0, blocks: tuple[int, ...] = (0, 1, 2), **how: object
) -> Admit:
    sampling = Sampling(**{"max_tokens": 10, "seed": 1} | how)  # type: ignore[arg-type]
    return Admit(slot, 0, ids, list(range(10, 10 + ids)), computed, list(blocks), sampling)


def busy_batch() -> Batch:
    """Slot 0 decodes on blocks 0 to 2; slot 1 is in its prompt on 3 and 4."""
    batch, executor = Batch(SHAPE, NAME), mock()
    run(batch, executor, frame(admit=[admission()], work=[Work(0, 6)]))
    run(batch, executor, frame(admit=[admission(1, 8, 0, (3, 4))], work=[Work(1, 3)]))
    return batch


def run(batch: Batch, executor: MockExecutor, step: Step) -> list[int]:
    work = batch.apply(step)
    return batch.commit(work, executor.run(work, batch.arrays)).tokens


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"admit": [admission(6)]}, "slot is 6, allowed is 0 to 5"),
        ({"admit": [admission(-1)]}, "slot is -1"),
        ({"admit": [admission(0)]}, "slot 0: slot to admit into is taken"),
        ({"admit": [admission(2, blocks=(5, 6)), admission(2)]}, "slot 2: slot to admit into is taken"),
        ({"admit": [admission(2, blocks=(5, 70))]}, "block is 70, allowed is 0 to 69"),
        ({"admit": [admission(2, blocks=(5, -1))]}, "block is -1"),
        ({"admit": [admission(2, blocks=(5, 5))]}, "naming one twice"),
        ({"admit": [admission(2, blocks=(5, 3))]}, "block handed out is 3, in use"),
        ({"admit": [admission(2, blocks=tuple(range(20, 31)))]}, "table is 11 blocks, allowed is up to 10"),
        ({"admit": [admission(2, computed=6, blocks=(5, 6))]}, "computed is 6, allowed is 0 to 5"),
        ({"admit": [admission(2, computed=-1, blocks=(5, 6))]}, "computed is -1"),
        ({"admit": [admission(2, computed=5, blocks=(5,))]}, "table is 1 blocks"),
        ({"admit": [admission(2, computed=4, blocks=(5, 6))]}, "holds something else"),
        ({"admit": [admission(2, ids=0, blocks=(5,))]}, "prompt_len is 0"),
        (
            {"admit": [admission(2, blocks=(5,))], "work": [Work(2, 6)]},
            "slot 2: table is 1 blocks, allowed is 6 ids long",
        ),
        ({"work": [Work(9, 1)]}, "slot is 9"),
        ({"work": [Work(2, 1)]}, "slot 2: slot is free"),
        ({"work": [Work(1, 6)]}, "count of work is 6, allowed is 0 to 5"),
        ({"work": [Work(1, -1)]}, "count of work is -1"),
        ({"work": [Work(1, 1), Work(1, 1)]}, "number of work rows is two"),
        ({"work": [Work(0, 2)]}, "count of work is 2, allowed is 0 to 1"),
        ({"blocks": [Extend(2, [9])]}, "slot 2: slot is free"),
        ({"blocks": [Extend(1, [70])]}, "block is 70"),
        ({"blocks": [Extend(1, [0])]}, "block handed out is 0, in use"),
        ({"release": [2]}, "slot 2: slot is free"),
        ({"release": [0, 0]}, "slot 0: slot is free"),
        ({"kv_ops": [KvOp("copy", 0, 70)]}, "block is 70"),
        ({"kv_ops": [KvOp("copy", 0, 0)]}, "naming one twice"),
        ({"admit": [Admit(2, -1, 1, [1], 0, [5], Sampling(max_tokens=3))]}, "choice is -1"),
    ],
)
def test_a_contradictory_frame_is_refused_by_name(content: dict[str, object], complaint: str) -> None:
    with pytest.raises(FrameFault, match=re.escape(complaint)):
        busy_batch().apply(frame(**content))


def hostile_frame(rng: random.Random) -> Step:
    """Anything the wire can carry, near enough to sense to get past the first check."""

    def but(sense: int) -> int:
        """Mostly what makes sense."""
        if rng.random() < 0.93:
            return sense
        return rng.choice([0, 1, 5, 9, -1, 70, 2**31, -(2**31) - 1, 2**63, 2**64 - 1, -(2**63)])

    def some(most: int) -> range:
        return range(rng.choice([0, 0, rng.randint(0, most)]))

    def blocks() -> list[int]:
        return [but(block) for block in rng.sample(range(5, 70), rng.randint(0, 4))]

    def real() -> float:
        return rng.choice([0.5, -1.0, 1e308, float("nan"), float("inf")]) if rng.random() < 0.05 else 1.0

    def admit() -> Admit:
        ids = [but(rng.randrange(64)) for _ in range(rng.randint(0, 12))]
        sampling = Sampling(
            max_tokens=but(9),
            min_tokens=but(0),
            seed=but(3),
            temperature=real(),
            top_p=real(),
            logit_bias=tuple((but(7), real()) for _ in some(1)),
            stop_token_ids=tuple(but(8) for _ in some(2)),
        )
        return Admit(but(rng.randint(2, 5)), but(0), but(len(ids)), ids, but(0), blocks(), sampling)

    return frame(
        release=[but(rng.randrange(3)) for _ in some(1)],
        admit=[admit() for _ in some(2)],
        blocks=[Extend(but(rng.randrange(3)), blocks()) for _ in some(1)],
        kv_ops=[KvOp("copy", but(rng.randrange(70)), but(rng.randrange(70))) for _ in some(1)],
        work=[Work(but(rng.randrange(4)), but(rng.randint(0, 3))) for _ in some(2)],
    )


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), early=st.booleans())
def test_whatever_a_frame_holds_it_is_a_fault_or_computes_inside_its_blocks(seed: int, early: bool) -> None:
    """`early`: frames that may are applied before the one before is committed."""
    rng = random.Random(seed)
    batch, executor = busy_batch(), mock()
    under_way: list[tuple[AppliedStep, StepOutput]] = []
    for _ in range(20):
        step = hostile_frame(rng)
        if under_way and not (early and goes_on(step)):
            batch.commit(*under_way.pop())
        try:
            work = batch.apply(step)
        except FrameFault:
            for before in under_way:
                batch.commit(*before)
            under_way.clear()
            batch.reset()
            continue
        for slot, start, count in zip(work.slots.tolist(), work.starts.tolist(), work.counts.tolist()):
            table = batch.arrays.block_table[slot]
            pages = table[start // SHAPE.block_tokens : -(-(start + count) // SHAPE.block_tokens)]
            assert count > 0
            assert len(pages)
            assert ((pages >= 0) & (pages < SHAPE.blocks_total)).all()
            assert start + count <= batch.arrays.known[slot] + len(under_way)
            assert start + count < SHAPE.max_len
        assert all(0 <= block < SHAPE.blocks_total for copy in work.copies for block in copy)
        output = executor.run(work, batch.arrays)
        if under_way:
            batch.commit(*under_way.pop())
        under_way.append((work, output))


def test_after_a_refused_frame_and_a_reset_the_batch_is_as_new_but_keeps_its_hashes() -> None:
    batch = busy_batch()
    kept = batch.hashes.page(0)[0]
    with pytest.raises(FrameFault):
        batch.apply(frame(admit=[admission(2, blocks=(7, 8)), admission(3, blocks=(9, 99))], release=[0]))
    batch.reset()
    assert batch.live == 0
    assert batch.hashes.page(0)[0] == kept != []
    first = run(batch, mock(), frame(admit=[admission(blocks=(30, 31))], work=[Work(0, 6)]))
    assert first == run(Batch(SHAPE, NAME), mock(), frame(admit=[admission()], work=[Work(0, 6)]))


def test_a_decode_that_outgrows_its_table_is_refused_before_it_runs() -> None:
    batch, executor = Batch(SHAPE, NAME), mock()
    run(batch, executor, frame(admit=[admission(ids=6, blocks=(0, 1))], work=[Work(0, 6)]))
    run(batch, executor, frame())
    run(batch, executor, frame())
    with pytest.raises(FrameFault, match="slot 0: table is 2 blocks"):
        batch.apply(frame())


@pytest.mark.parametrize(
    ("admit", "complaint"),
    [
        (Admit(0, 0, 2, [1, 64], 0, [0], Sampling(max_tokens=3)), "outside [0, 64)"),
        (Admit(0, 0, 2, [1, -1], 0, [0], Sampling(max_tokens=3)), "outside [0, 64)"),
        (Admit(0, 0, 2, [1, 2**63], 0, [0], Sampling(max_tokens=3)), "outside [0, 64)"),
        (admission(stop_token_ids=(64,)), "stop_token_ids names token id 64"),
        (admission(logit_bias=((-1, 1.0),)), "logit_bias names token id -1"),
        (admission(logit_bias=((1, float("nan")),)), "not a finite number"),
        (admission(temperature=-1.0), "temperature must be at least 0"),
        (admission(ids=6, max_tokens=0), "no room for a new one"),
        (Admit(0, 0, 40, [1] * 40, 0, list(range(10)), Sampling(max_tokens=3)), "context 40"),
    ],
)
def test_a_request_that_cannot_be_computed_stops_with_a_reason_and_touches_nothing(
    admit: Admit, complaint: str
) -> None:
    batch = Batch(SHAPE, NAME)
    work = batch.apply(frame(admit=[admit]))
    assert len(work.slots) == 0
    (stopped,) = batch.commit(work, StepOutput(np.zeros(0, np.int32))).stopped
    assert (stopped.slot, stopped.reason) == (0, "error")
    assert complaint in stopped.detail
    assert len(batch.apply(frame(work=[Work(0, 1)])).slots) == 0
    batch.apply(frame(release=[0]))
    assert batch.live == 0


def test_logits_that_are_not_finite_stop_their_slot_and_share_no_block() -> None:
    batch = Batch(SHAPE, NAME)
    admits = [admission(0, 8, 0, (0, 1)), admission(1, 8, 0, (2, 3))]
    work = batch.apply(frame(admit=admits, work=[Work(0, 8), Work(1, 8)]))
    result = batch.commit(work, StepOutput(np.array([-2, 9], np.int32)))
    assert (result.slots, result.tokens) == ([1], [9])
    assert [(row.slot, row.reason) for row in result.stopped] == [(0, "error")]
    assert [row.block for row in result.stored] == [2, 3]


def test_an_executor_that_forgets_a_draw_is_an_error_of_the_executor() -> None:
    batch = Batch(SHAPE, NAME)
    work = batch.apply(frame(admit=[admission()], work=[Work(0, 6)]))
    with pytest.raises(RuntimeError, match="drew no token for row 0"):
        batch.commit(work, StepOutput(np.array([-1], np.int32)))


def test_stop_ids_count_only_after_min_tokens_and_win_over_length() -> None:
    executor = mock()
    tokens = [run(b := Batch(SHAPE, NAME), executor, frame(admit=[admission()], work=[Work(0, 6)]))[0]]
    tokens += [run(b, executor, frame())[0] for _ in range(3)]
    batch, executor = Batch(SHAPE, NAME), mock()
    how = {"stop_token_ids": tuple(set(tokens)), "min_tokens": 2, "max_tokens": 3}
    stopped = []
    for step in (frame(admit=[admission(**how)], work=[Work(0, 6)]), frame(), frame(), frame()):
        work = batch.apply(step)
        result = batch.commit(work, executor.run(work, batch.arrays))
        stopped.append([row.reason for row in result.stopped])
    assert stopped == [[], [], ["stop"], []]


def test_equal_blocks_keep_their_hash_until_the_last_copy_is_handed_out() -> None:
    batch, executor = Batch(SHAPE, NAME), mock()
    twins = [admission(0, 6, 0, (0, 1)), admission(1, 6, 0, (2, 3))]
    run(batch, executor, frame(admit=twins, work=[Work(0, 6), Work(1, 6)]))
    (name,), _ = batch.hashes.take_changes()
    other = admission(2, 3, 0, (0,))
    run(batch, executor, frame(release=[0], admit=[other], work=[Work(2, 3)]))
    assert batch.hashes.take_changes() == ([], [])
    assert batch.hashes.of(2) == name
    other = admission(3, 3, 0, (2,))
    run(batch, executor, frame(release=[1, 2], admit=[other], work=[Work(3, 3)]))
    assert batch.hashes.take_changes() == ([], [name])


def test_log_probabilities_are_addressed_by_slot() -> None:
    batch, executor = Batch(SHAPE, NAME), mock()
    plain, asks = admission(0, 6, 0, (0, 1)), admission(4, 6, 0, (2, 3), logprobs=2, prompt_logprobs=1)
    work = batch.apply(frame(admit=[plain, asks], work=[Work(0, 6), Work(4, 6)]))
    result = batch.commit(work, executor.run(work, batch.arrays))
    (row,) = result.logprobs
    assert (row.slot, row.top[0][0], len(row.top)) == (4, result.tokens[1], 2)
    (prompt,) = result.prompt_logprobs
    assert (prompt.slot, prompt.start, len(prompt.chosen), len(prompt.top[0])) == (4, 1, 5, 1)


class TestMockExecutor:
    def one(self, batch: Batch, executor: MockExecutor, ids: list[int], count: int) -> list[int]:
        admit = Admit(0, 1, 3, ids, 0, list(range(10)), Sampling(max_tokens=36, seed=2**64 - 1))
        got = run(batch, executor, frame(admit=[admit], work=[Work(0, len(ids))]))
        return got + [run(batch, executor, frame())[0] for _ in range(count - 1)]

    def test_a_resumed_sequence_goes_on_with_the_same_tokens(self) -> None:
        whole = self.one(Batch(SHAPE, NAME), mock(), [1, 2, 3], 12)
        resumed = self.one(Batch(SHAPE, NAME), mock(), [1, 2, 3, *whole[:5]], 7)
        assert whole[5:] == resumed

    def test_tokens_stay_in_the_range_of_whole_words(self) -> None:
        first, count = token_range(SHAPE.vocab_size)
        assert set(self.one(Batch(SHAPE, NAME), mock(), [1, 2, 3], 30)) <= set(range(first, first + count))

    def test_a_sequence_that_waits_after_its_admission_draws_its_own_tokens(self) -> None:
        how = Sampling(max_tokens=20, seed=3)
        late = Admit(1, 0, 3, [1, 2, 3], 0, [5, 6], how)
        other = Admit(0, 0, 2, [9, 9], 0, [0, 1], Sampling(max_tokens=20, seed=4))
        batch, executor = Batch(SHAPE, NAME), mock()
        run(batch, executor, frame(admit=[other, late], work=[Work(0, 2)]))
        together = run(batch, executor, frame(work=[Work(1, 3), Work(0, 0)]))
        alone = run(Batch(SHAPE, NAME), mock(), frame(admit=[late], work=[Work(1, 3)]))
        assert together == alone

    def test_another_choice_draws_other_tokens(self) -> None:
        batch, executor = Batch(SHAPE, NAME), mock()
        how = Sampling(max_tokens=20, seed=3)
        twins = [Admit(slot, slot, 3, [1, 2, 3], 0, [5 * slot, 5 * slot + 1], how) for slot in (0, 1)]
        work = [Work(0, 3), Work(1, 3)]
        rows = [run(batch, executor, frame(admit=twins, work=work))] + [
            run(batch, executor, frame()) for _ in range(4)
        ]
        assert [row[0] for row in rows] != [row[1] for row in rows]


def test_a_step_input_names_rows_in_slot_order_whatever_the_frame_says() -> None:
    batch = Batch(SHAPE, NAME)
    admits = [admission(slot, 6, 0, (3 * slot, 3 * slot + 1)) for slot in (4, 1, 3)]
    step: StepInput = batch.apply(frame(admit=admits, work=[Work(4, 2), Work(1, 6), Work(3, 1)]))
    assert (step.slots.tolist(), step.counts.tolist()) == ([1, 3, 4], [6, 1, 2])
    assert step.samples.tolist() == [True, False, False]
