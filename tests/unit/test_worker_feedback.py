"""Two frames in flight: the same results as one by one, and the order the runner keeps."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from device_support import FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from random_frames import NAME, SHAPE, RandomScheduler, frame, in_pairs, schedule, told

from services.worker.compute import Begun, BrokenSession, Compute, Outcome
from services.worker.runner import ThreadRunner, answer_of
from services.worker.slots import Batch
from services.worker.step import SlotArrays, StepInput, StepOutput
from shared.wire import Admit, Extend, KvOp, Sampling, Step, Work


def computing(device: Any, clock: Callable[[], float] = lambda: 0.0) -> Compute:
    compute = Compute(device, Batch(SHAPE, NAME), clock)
    compute.session = 1
    return compute


def admission(slot: int, first_block: int, ids: int = 5, **how: Any) -> Admit:
    sampling = Sampling(**{"max_tokens": 20, "seed": slot} | how)
    return Admit(slot, 0, ids, list(range(ids)), 0, list(range(first_block, first_block + 5)), sampling)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 4),
    calm=st.sampled_from([0.5, 0.9]),
    top_k=st.sampled_from([(0,), (0, 0, 0, 0, 0, 3)]),
    broken=st.sampled_from([0.0, 0.05]),
    arrives=st.sampled_from([0.5, 1.0]),
)
def test_two_in_flight_tell_what_one_by_one_does_frame_by_frame(
    seed: int, depth: int, calm: float, top_k: tuple[int, ...], broken: float, arrives: float
) -> None:
    alone = computing(FakeDevice(SHAPE, overlaps=False, broken=broken))
    scheduler = RandomScheduler(random.Random(seed), depth, calm, top_k)
    frames, expected = schedule(alone, scheduler, 100)

    together = computing(FakeDevice(SHAPE, broken=broken))
    rng = random.Random(seed + 1)
    got = in_pairs(together, frames, lambda: rng.random() < arrives)

    assert [told(outcome) for outcome in got] == [told(outcome) for outcome in expected]
    hashes = [
        {b: h for b in range(SHAPE.blocks_total) if (h := c.batch.hashes.of(b))} for c in (alone, together)
    ]
    assert hashes[0] == hashes[1]
    shared = sorted(hashes[0])
    assert isinstance(alone.executor, FakeDevice)
    assert isinstance(together.executor, FakeDevice)
    assert (alone.executor.kv[shared] == together.executor.kv[shared]).all()
    # Where the host draws for some rows it may happen that no frame ever follows early.
    assert together.executor.together or len(top_k) > 1
    assert not alone.executor.together


def test_a_decode_takes_its_id_from_the_device_until_the_host_knows_it() -> None:
    device = FakeDevice(SHAPE)
    compute = computing(device)
    frames = [
        frame(seq=1, admit=[admission(0, 0), admission(1, 5)], work=[Work(0, 5), Work(1, 2)]),
        frame(seq=2, work=[Work(1, 3)]),
        frame(seq=3),
        frame(seq=4),
    ]
    outcomes = in_pairs(compute, frames, lambda: True)
    assert device.together == 3
    assert device.fed == 1 + 2 + 2
    assert [outcome.done.slots for outcome in outcomes] == [[0], [0, 1], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    "content",
    [
        {"admit": [admission(2, 20)]},
        {"release": [1]},
        {"kv_ops": [KvOp("copy", 0, 30)]},
    ],
    ids=lambda content: next(iter(content)),
)
def test_who_comes_or_goes_waits_for_the_frame_before(content: dict[str, Any]) -> None:
    compute = computing(FakeDevice(SHAPE))
    first = compute.start(frame(admit=[admission(0, 0), admission(1, 5)], work=[Work(0, 5)]), 0.0)
    assert isinstance(first, Begun)
    assert not compute.may_follow(frame(seq=2, **content), first)
    assert compute.may_follow(frame(seq=2, work=[Work(1, 3)], blocks=[Extend(0, [40])]), first)


def test_nothing_follows_a_frame_whose_ids_the_host_draws_or_an_executor_that_computes_at_once() -> None:
    admit = frame(admit=[admission(0, 0, top_k=3)], work=[Work(0, 5)])
    for device in (FakeDevice(SHAPE), FakeDevice(SHAPE, overlaps=False)):
        begun = computing(device).start(admit, 0.0)
        assert isinstance(begun, Begun)
        assert not computing(device).may_follow(frame(seq=2), begun)


def with_stop_at(position: int) -> tuple[Step, list[Step]]:
    """Frames of one sequence that stops by an id at its output `position`; slot 1 goes on beside it."""
    admits = [admission(0, 0), admission(1, 5)]
    both = [Work(0, 5), Work(1, 5)]
    first = computing(FakeDevice(SHAPE)).step(frame(admit=admits, work=both), 0.0)
    assert isinstance(first, Outcome)
    compute = computing(FakeDevice(SHAPE))
    later = [frame(seq=n) for n in range(2, 12)]
    tokens = [
        o.done.tokens[0] for o in in_pairs(compute, [frame(admit=admits, work=both), *later], lambda: True)
    ]
    stop = tokens[position]
    admits[0] = admission(0, 0, stop_token_ids=(stop,), min_tokens=position)
    return frame(admit=admits, work=both), later


def test_a_row_computed_after_its_sequence_stopped_is_told_to_nobody() -> None:
    # Output 3 is id number 8: the row after it, dropped, is the first of a block, the one before fills one.
    first, later = with_stop_at(3)
    compute = computing(FakeDevice(SHAPE))
    outcomes = in_pairs(compute, [first, *later], lambda: True)
    slots = [outcome.done.slots for outcome in outcomes]
    assert slots[:6] == [[0, 1]] * 4 + [[1]] * 2
    assert [(n, row.reason) for n, o in enumerate(outcomes) for row in o.done.stopped] == [(3, "stop")]
    assert [o.done.timing.decode_tokens for o in outcomes[1:6]] == [2, 2, 2, 1, 1]
    blocks = {row.block for outcome in outcomes for row in outcome.done.stored if row.block < 5}
    assert blocks == {0, 1}


def test_a_sequence_at_its_length_is_left_out_of_the_frame_behind() -> None:
    device = FakeDevice(SHAPE)
    compute = computing(device)
    first = frame(admit=[admission(0, 0, max_tokens=2), admission(1, 5)], work=[Work(0, 5), Work(1, 5)])
    outcomes = in_pairs(compute, [first, frame(seq=2), frame(seq=3), frame(seq=4)], lambda: True)
    assert device.together == 3
    assert device.fed == 2 + 1 + 1
    assert [len(outcome.done.tokens) for outcome in outcomes] == [2, 2, 1, 1]


def test_time_on_the_device_behind_another_step_is_waiting_not_running() -> None:
    now = [10.0]
    compute = computing(FakeDevice(SHAPE), lambda: now[0])

    def at(moment: float) -> None:
        now[0] = 10.0 + moment

    at(1.0)
    first = compute.start(frame(admit=[admission(0, 0)], work=[Work(0, 5)]), 11.0)
    at(1.2)
    second = compute.start(frame(seq=2), 11.1)
    assert isinstance(first, Begun)
    assert isinstance(second, Begun)
    at(3.0)
    before = compute.finish(first).done.timing
    at(5.0)
    behind = compute.finish(second).done.timing
    assert (before.run_us, before.wait_us, before.idle_us) == (2_000_000, 0, 1_000_000)
    assert (behind.run_us, behind.wait_us, behind.idle_us) == (2_000_000, 1_900_000, 0)


# The runner.


@dataclass
class Gated:
    """`FakeDevice` whose results come when a test lets them."""

    device: FakeDevice = field(default_factory=lambda: FakeDevice(SHAPE))
    begun: "list[GatedStep]" = field(default_factory=list)
    starts: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    fail_at: int = 0
    closed: bool = False

    @property
    def info(self) -> Any:
        return self.device.info

    def run(self, step: StepInput, slots: SlotArrays) -> StepOutput:
        raise AssertionError("it is begun and waited for")

    def begin(self, step: StepInput, slots: SlotArrays) -> "GatedStep":
        if len(self.begun) + 1 == self.fail_at:
            raise MemoryError("device gone")
        self.begun.append(GatedStep(self.device.begin(step, slots)))
        self.starts.release()
        return self.begun[-1]

    def close(self) -> None:
        self.closed = True

    async def has_begun(self, count: int = 1) -> None:
        """So many steps more were begun."""
        for _ in range(count):
            assert await asyncio.to_thread(self.starts.acquire, timeout=20)


@dataclass
class GatedStep:
    inner: Any
    gate: threading.Event = field(default_factory=threading.Event)

    @property
    def feeds(self) -> bool:
        return bool(self.inner.feeds)

    def ready(self) -> bool:
        return self.gate.is_set()

    def wait(self) -> StepOutput:
        assert self.gate.wait(20)
        output: StepOutput = self.inner.wait()
        return output


class Listener:
    """What the loop was told, in order."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self._came = asyncio.Event()

    def computed(self, outcome: Outcome) -> None:
        self.note(outcome.done.seq)

    def broken(self, session: BrokenSession) -> None:
        self.note("broken")

    def failed(self, error: BaseException) -> None:
        self.note(str(error))

    def note(self, what: Any) -> None:
        self.heard.append(what)
        self._came.set()

    async def hears(self, *expected: Any) -> None:
        """Exactly this, all in all."""
        async with asyncio.timeout(20):
            while len(self.heard) < len(expected):
                self._came.clear()
                await self._came.wait()
        assert self.heard == list(expected)


@asynccontextmanager
async def serving(executor: Any) -> AsyncIterator[tuple[ThreadRunner, Listener]]:
    runner, listener = ThreadRunner(lambda: computing(executor)), Listener()
    await runner.start(listener)
    runner.submit(frame(admit=[admission(0, 0), admission(1, 5)], work=[Work(0, 5), Work(1, 5)]))
    yield runner, listener
    for step in executor.begun:
        step.gate.set()
    await runner.close()
    assert executor.closed


async def test_the_next_frame_is_begun_while_the_device_computes_also_if_it_comes_later() -> None:
    executor = Gated()
    async with serving(executor) as (runner, listener):
        await executor.has_begun()
        runner.submit(frame(seq=2))
        await executor.has_begun()
        assert listener.heard == []
        assert runner.busy_s() > 0
        executor.begun[0].gate.set()
        await listener.hears(1)
        runner.submit(frame(seq=3))
        await executor.has_begun()
        executor.begun[1].gate.set()
        executor.begun[2].gate.set()
        await listener.hears(1, 2, 3)


async def test_a_frame_that_admits_is_begun_when_the_one_before_is_told() -> None:
    executor = Gated()
    async with serving(executor) as (runner, listener):
        await executor.has_begun()
        runner.submit(frame(seq=2, admit=[admission(2, 20)], work=[Work(2, 5)]))
        runner.submit(frame(seq=3))
        executor.begun[0].gate.set()
        await executor.has_begun(2)
        assert [len(step.inner.step.slots) for step in executor.begun] == [2, 3, 3]
        assert executor.device.together == 1
        await listener.hears(1)


async def test_questions_are_answered_when_nothing_is_under_way() -> None:
    executor = Gated()
    async with serving(executor) as (runner, listener):
        await executor.has_begun()
        runner.submit(frame(seq=2))
        runner.ask(
            lambda compute: len(executor.device.under_way), lambda count: listener.note(f"{count} left")
        )
        runner.submit(frame(seq=3))
        await executor.has_begun()
        for step in executor.begun:
            step.gate.set()
        await executor.has_begun()
        executor.begun[2].gate.set()
        await listener.hears(1, 2, "0 left", 3)


async def test_after_a_fence_what_is_under_way_ends_before_the_new_session_begins() -> None:
    executor = Gated()
    async with serving(executor) as (runner, listener):
        await executor.has_begun()
        runner.submit(frame(seq=2))
        await executor.has_begun()
        runner.submit(frame(seq=3))
        runner.fence(2)
        began = asyncio.ensure_future(answer_of(runner, Compute.begin))
        for step in executor.begun:
            step.gate.set()
        await began
        assert executor.device.under_way == []
        # The listener drops what is of a former incarnation; frame 3 was never begun.
        await listener.hears(1, 2)
        runner.submit(frame(seq=1, incarnation=2, admit=[admission(0, 0)], work=[Work(0, 5)]))
        await executor.has_begun()
        executor.begun[2].gate.set()
        await listener.hears(1, 2, 1)


async def test_a_contradictory_frame_breaks_the_session_after_the_result_of_the_one_before() -> None:
    executor = Gated()
    async with serving(executor) as (runner, listener):
        await executor.has_begun()
        runner.submit(frame(seq=2, blocks=[Extend(0, [50]), Extend(1, [0])]))
        runner.submit(frame(seq=3))
        executor.begun[0].gate.set()
        await listener.hears(1, "broken")
        assert runner.busy_s() == 0
        assert len(executor.begun) == 1


async def test_a_device_that_fails_a_frame_still_tells_the_result_of_the_one_before() -> None:
    executor = Gated(fail_at=2)
    async with serving(executor) as (runner, listener):
        await executor.has_begun()
        runner.submit(frame(seq=2))
        executor.begun[0].gate.set()
        await listener.hears(1, "device gone")


async def test_closing_finishes_what_is_under_way_and_drops_what_waits() -> None:
    executor = Gated()
    async with serving(executor) as (runner, listener):
        await executor.has_begun()
        runner.submit(frame(seq=2))
        await executor.has_begun()
        runner.submit(frame(seq=3, admit=[admission(2, 20)], work=[Work(2, 5)]))
        closing = asyncio.ensure_future(runner.close())
        await asyncio.sleep(0)
        for step in executor.begun:
            step.gate.set()
        await closing
        await listener.hears(1, 2)
