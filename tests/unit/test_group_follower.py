"""A rank that follows does what rank 0 did: the same steps, begun and finished in the same order."""

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from device_support import FakeDevice, PendingStep
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from random_frames import NAME, SHAPE, RandomScheduler, frame, schedule

from services.worker.collective.port import GroupLost
from services.worker.compute import Begun, Compute
from services.worker.faults import FrameFault
from services.worker.group.channel import Channel, ChannelLost
from services.worker.group.follower import Diverged, EndsWith, follow
from services.worker.group.messages import (
    FROM_RANK,
    TO_RANK,
    Begin,
    Close,
    EndFetch,
    Follow,
    Measure,
    Message,
    Tiers,
    Tune,
    encode,
)
from services.worker.runner import ThreadRunner
from services.worker.service import EngineFailed, Identity, WorkerService
from services.worker.slots import Batch
from services.worker.step import SlotArrays, StepInput
from services.worker.tier.homes import TierState
from shared.bus.memory import MemoryBroker
from shared.wire import Admit, Sampling, Step, Work
from shared.wire.base import encode as encode_frame


class Device(FakeDevice):
    """Writes down in which order it was asked, and takes part in measurements."""

    def __init__(self, overlaps: bool, broken: float = 0.0) -> None:
        super().__init__(SHAPE, overlaps, broken)
        self.calls: list[Any] = []
        self.told: list[dict[str, Any]] = []

    def begin(self, step: StepInput, slots: SlotArrays) -> PendingStep:
        self.calls.append(("begin", step.slots.tolist(), step.counts.tolist()))
        pending = super().begin(step, slots)
        wait = pending.wait

        def waited() -> Any:
            self.calls.append("wait")
            return wait()

        pending.wait = waited  # type: ignore[method-assign]
        return pending

    def news(self) -> dict[str, Any] | None:
        return self.told.pop() if self.told else None

    def tune(self, state: dict[str, Any]) -> None:
        self.calls.append(state)

    def measure(self, name: str) -> dict[str, Any]:
        self.calls.append(name)
        return {"measured": name}

    def report(self) -> dict[str, Any]:
        return {}


class Tape:
    """`Relay` that keeps what it is told, as the other ranks get it."""

    size = 2

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def follow(self, frame: Step, behind: bool, check: int) -> None:
        self.messages.append(Follow(encode_frame(frame), behind, check))

    def begin(self) -> None:
        self.messages.append(Begin())

    def tune(self, state: dict[str, Any]) -> None:
        self.messages.append(Tune(state))

    def measure(self, name: str) -> None:
        self.messages.append(Measure(name))

    def use_tiers(self, state: TierState) -> None:
        self.messages.append(Tiers(list(state.offers), state.home, state.wanted))

    def end_fetch(self, key: tuple[int, int], count: int) -> None:
        self.messages.append(EndFetch(*key, count))

    def when_fetched(self, then: Callable[[int, tuple[int, int], int, int], None]) -> None: ...

    def when_lost(self, then: Callable[[GroupLost], None]) -> None: ...

    def explained(self, error: GroupLost) -> GroupLost:
        return error

    def detail(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        self.messages.append(Close())


class Replay:
    """The channel of a rank: what the tape holds, read as it comes over a wire."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = iter(messages)

    def receive(self) -> Any:
        return TO_RANK.decode(encode(next(self._messages)))


def replay(messages: list[Message], compute: Compute) -> None:
    follow(compute, Replay(messages))  # type: ignore[arg-type]


def rank(device: Device, relay: Tape | None = None) -> Compute:
    compute = Compute(device, Batch(SHAPE, NAME), lambda: 0.0, relay)
    compute.session = 1
    return compute


def in_flight(compute: Compute, frames: list[Step], arrives: Callable[[], bool]) -> None:
    """As the runner does: a frame that has arrived and may follow is begun before the last is finished."""
    under_way: Begun | None = None
    for each in frames:
        behind = under_way is not None and compute.may_follow(each, under_way) and arrives()
        if under_way is not None and not behind:
            compute.finish(under_way)
            under_way = None
        begun = compute.start(each, 0.0, behind)
        if under_way is not None:
            compute.finish(under_way)
        under_way = begun if isinstance(begun, Begun) else None
    if under_way is not None:
        compute.finish(under_way)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    overlaps=st.booleans(),
    top_k=st.sampled_from([(0,), (0, 0, 0, 3)]),
    broken=st.sampled_from([0.0, 0.05]),
    arrives=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_a_rank_makes_the_calls_of_rank_0_in_their_order(
    seed: int, overlaps: bool, top_k: tuple[int, ...], broken: float, arrives: float
) -> None:
    planned = rank(Device(False, broken))
    frames, _ = schedule(planned, RandomScheduler(random.Random(seed), 3, 0.5, top_k), 60)
    tape, rng = Tape(), random.Random(seed + 1)
    lead = rank(Device(overlaps, broken), tape)
    in_flight(lead, frames, lambda: rng.random() < arrives)
    lead.close()
    other = rank(Device(overlaps, broken))
    replay(tape.messages, other)
    ours, theirs = lead.executor, other.executor
    assert isinstance(ours, Device)
    assert isinstance(theirs, Device)
    assert theirs.calls == ours.calls
    assert (theirs.kv == ours.kv).all()
    assert other.check == lead.check
    assert other.all_hashes() == lead.all_hashes()


def admission(slot: int, ids: int = 3) -> Admit:
    return Admit(slot, 0, ids, list(range(ids)), 0, [slot], Sampling(max_tokens=20, seed=slot))


def test_a_frame_that_faults_does_so_alike_and_the_next_session_begins_empty_everywhere() -> None:
    tape = Tape()
    lead = rank(Device(False), tape)
    lead.step(frame(seq=1, admit=[admission(0)], work=[Work(0, 3)]), 0.0)
    broken = lead.step(frame(seq=2, work=[Work(2, 1)]), 0.0)
    assert isinstance(getattr(broken, "fault", None), FrameFault)
    assert lead.step(frame(seq=3), 0.0) is None
    lead.session = 2
    lead.begin()
    lead.step(frame(seq=1, incarnation=2, admit=[admission(0)], work=[Work(0, 3)]), 0.0)
    lead.close()
    # Frames of a session that is over are none of the other ranks' business.
    assert [type(message).__name__ for message in tape.messages] == [
        "Follow",
        "Follow",
        "Begin",
        "Follow",
        "Close",
    ]
    other = rank(Device(False))
    replay(tape.messages, other)
    assert other.check == lead.check
    assert other.batch.live == 1


def test_what_the_executor_has_to_tell_reaches_all_ranks_between_the_same_two_steps() -> None:
    tape = Tape()
    device = Device(False)
    lead = rank(device, tape)
    lead.step(frame(seq=1, admit=[admission(0)], work=[Work(0, 3)]), 0.0)
    device.told.append({"chunks": 4})
    lead.step(frame(seq=2), 0.0)
    assert lead.measure("crossovers") == {"measured": "crossovers"}
    lead.step(frame(seq=3), 0.0)
    lead.close()
    other = Device(False)
    replay(tape.messages, rank(other))
    assert other.calls == device.calls
    assert {"chunks": 4} in other.calls
    assert "crossovers" in other.calls


def test_a_rank_that_draws_other_tokens_says_so_at_the_next_frame() -> None:
    tape = Tape()
    lead = rank(Device(False), tape)
    for seq in range(1, 5):
        admit = [admission(0)] if seq == 1 else []
        lead.step(frame(seq=seq, admit=admit, work=[Work(0, 3)] if admit else []), 0.0)
    faulty = Device(False)
    compute_step = faulty.compute
    faulty.compute = lambda step, slots: (compute_step(step, slots) + 1) % SHAPE.vocab_size  # type: ignore[method-assign]
    with pytest.raises(Diverged, match="other tokens than rank 0"):
        replay(tape.messages, rank(faulty))
    assert faulty.calls.count("wait") == 1


@contextmanager
def pair() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    ends = Channel(ours, FROM_RANK), Channel(theirs, TO_RANK)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def test_messages_arrive_whole_and_in_order_however_large_they_are() -> None:
    sent = [Follow(bytes(size), False, size) for size in (0, 1, 70_000, 20_000_000, 3)]
    with pair() as (lead, other):
        sender = threading.Thread(target=lambda: [lead.send(message) for message in sent])
        sender.start()
        assert [other.receive(10) for _ in sent] == sent
        sender.join()
        with pytest.raises(TimeoutError):
            other.receive(0.01)
        lead.sock.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelLost, match="its connection ended"):
            other.receive(1)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (b"\xff\xff\xff\xff", "4294967295 bytes"),
        (b"\x03\x00\x00\x00abc", "something else than a message"),
        (b"\x01\x00\x00\x00\x90", "something else than a message"),
        (b"\x08\x00\x00\x00\x91" + b"\x91" * 7, "something else than a message"),
    ],
)
def test_what_is_no_message_is_the_end_of_the_channel(what: bytes, why: str) -> None:
    with pair() as (lead, other):
        lead.sock.send(what)
        with pytest.raises(ChannelLost, match=why):
            other.receive(1)


def test_a_rank_that_takes_nothing_is_lost_after_a_while_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.worker.group.channel.SEND_LIMIT_S", 0.3)
    sent = []

    def flood(lead: Channel) -> None:
        for number in range(1000):
            lead.send(Follow(bytes(100_000), False, number))
            sent.append(number)

    with pair() as (lead, _), pytest.raises(ChannelLost, match="has taken nothing"):
        flood(lead)
    # A steady step is a hundred bytes: many of them wait before rank 0 does.
    assert len(sent) >= 2


async def test_a_group_that_is_lost_as_soon_as_it_is_formed_ends_the_worker() -> None:
    class Lost(Tape):
        def when_lost(self, then: Callable[[GroupLost], None]) -> None:
            then(GroupLost("rank 1 was killed by SIGKILL"))

    runner = ThreadRunner(lambda: rank(Device(False), Lost()))
    identity = Identity("w0", "m", 1, SHAPE.max_slots, 100)
    service = WorkerService(MemoryBroker(1 << 20).connect(), runner, identity, CollectorRegistry())
    with pytest.raises(EngineFailed, match="rank 1 was killed by SIGKILL"):
        await asyncio.wait_for(service.run(asyncio.Event()), 5)


def test_the_end_of_rank_0_frees_a_rank_that_waits_in_a_collective() -> None:
    freed = threading.Event()
    with pair() as (lead, other):
        ends = EndsWith(other, lambda reason: freed.set())
        ends.expected()
        assert not freed.wait(0.05)
        lead.close()
        assert freed.wait(1)
