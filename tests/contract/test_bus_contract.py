"""What every bus must do, on the in-memory twin and on a real NATS server."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import pytest

from shared.bus.memory import MemoryBroker
from shared.bus.nats import NatsBus
from shared.bus.port import Bus, BusDown, NoAnswer, PayloadTooLarge
from shared.subjects import INSTANCE, KV_RESTATE, RESYNC, Address
from shared.wire import Beat, Claim, Claimed, Drain, InstanceInfo, Restate, Resync, encode
from tests.support.servers import RunningServer, nats_server

WAIT_S = 10.0


class MemoryMesh:
    def __init__(self) -> None:
        self.broker = MemoryBroker()

    async def connect(self) -> Bus:
        return self.broker.connect()

    async def inject(self, subject: str, payload: bytes) -> None:
        self.broker.inject(subject, payload)

    async def stop(self) -> None:
        self.broker.stop()

    async def start(self) -> None:
        self.broker.start()


@dataclass
class NatsMesh:
    server: RunningServer
    buses: list[NatsBus] = field(default_factory=list)

    async def connect(self) -> Bus:
        self.buses.append(await NatsBus.connect(f"nats://127.0.0.1:{self.server.port}"))
        return self.buses[-1]

    async def inject(self, subject: str, payload: bytes) -> None:
        client = await nats.connect(f"nats://127.0.0.1:{self.server.port}")
        await client.publish(subject, payload)
        await client.close()

    async def stop(self) -> None:
        self.server.stop()

    async def start(self) -> None:
        self.server.start()


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.servers)])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MemoryMesh | NatsMesh]:
    if request.param == "memory":
        yield MemoryMesh()
        return
    with nats_server(tmp_path) as server:
        mesh = NatsMesh(server)
        yield mesh
        for bus in mesh.buses:
            await bus.close()


class Inbox:
    """Collects messages; `next` waits for one."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self.put = self._queue.put_nowait

    async def next(self) -> Any:
        return await asyncio.wait_for(self._queue.get(), WAIT_S)

    @property
    def empty(self) -> bool:
        return self._queue.empty()


async def state(bus: Bus, wanted: bool) -> None:
    """Wait until the bus is connected, or disconnected."""
    changed = asyncio.Event()
    bus.on_state(lambda now: changed.set() if now is wanted else None)
    if bus.connected is not wanted:
        await asyncio.wait_for(changed.wait(), WAIT_S)


def resync(seq: int) -> Resync:
    return Resync(instance="w0", epoch=1, owner="s", incarnation=1, have_seq=seq)


async def test_frames_of_one_publisher_arrive_decoded_and_in_order(mesh: Any) -> None:
    sender, receiver = await mesh.connect(), await mesh.connect()
    inbox = Inbox()
    await receiver.subscribe(RESYNC.at(instance="w0"), inbox.put)
    for seq in range(200):
        await sender.publish(RESYNC.at(instance="w0"), resync(seq))
    assert [(await inbox.next()).have_seq for _ in range(200)] == list(range(200))


async def test_frames_sent_without_waiting_keep_their_place_among_the_others(mesh: Any) -> None:
    sender, receiver = await mesh.connect(), await mesh.connect()
    inbox = Inbox()
    address = RESYNC.at(instance="w0")
    await receiver.subscribe(address, inbox.put)
    for seq in range(0, 200, 2):
        await sender.publish(address, resync(seq))
        sender.publish_soon(address, resync(seq + 1))
    assert [(await inbox.next()).have_seq for _ in range(200)] == list(range(200))
    with pytest.raises(PayloadTooLarge):
        sender.publish_soon(KV_RESTATE.at(instance="w0"), Restate(instance="w0", reason="x" * (1 << 20)))


async def test_a_plain_handler_that_returns_something_is_told_to_be_declared_async(mesh: Any) -> None:
    bus = await mesh.connect()
    inbox = Inbox()

    def handle(message: Resync) -> Any:
        inbox.put(message)
        return message

    await bus.subscribe(RESYNC.at(instance="w0"), handle)
    await bus.publish(RESYNC.at(instance="w0"), resync(1))
    await inbox.next()
    assert bus.counters.by_kind["handler_error"] == 1


async def test_a_coroutine_handler_finishes_one_frame_before_it_gets_the_next(mesh: Any) -> None:
    bus = await mesh.connect()
    running = 0
    inbox = Inbox()

    async def handle(message: Resync) -> None:
        nonlocal running
        running += 1
        await asyncio.sleep(0)
        inbox.put((message.have_seq, running))
        running -= 1

    await bus.subscribe(RESYNC.at(instance="w0"), handle)
    for seq in range(20):
        await bus.publish(RESYNC.at(instance="w0"), resync(seq))
    assert [await inbox.next() for _ in range(20)] == [(seq, 1) for seq in range(20)]


async def test_a_wildcard_subscription_hears_every_instance_and_nothing_else(mesh: Any) -> None:
    bus = await mesh.connect()
    inbox = Inbox()
    await bus.subscribe(RESYNC.every(), inbox.put)
    await bus.publish(KV_RESTATE.at(instance="w1"), Restate(instance="w1"))
    await bus.publish(RESYNC.at(instance="w0"), resync(1))
    await bus.publish(RESYNC.at(instance="w1"), resync(2))
    assert [(await inbox.next()).have_seq for _ in range(2)] == [1, 2]
    assert inbox.empty


async def test_each_frame_goes_to_one_member_of_a_queue_group(mesh: Any) -> None:
    first, second, sender = [await mesh.connect() for _ in range(3)]
    inbox = Inbox()
    for bus in (first, second):
        await bus.subscribe(RESYNC.every(), inbox.put, queue="group")
    for seq in range(50):
        await sender.publish(RESYNC.at(instance="w0"), resync(seq))
    assert sorted([(await inbox.next()).have_seq for _ in range(50)]) == list(range(50))
    assert inbox.empty


async def test_an_unsubscribed_handler_gets_nothing_more(mesh: Any) -> None:
    bus = await mesh.connect()
    gone, inbox = Inbox(), Inbox()
    subscription = await bus.subscribe(RESYNC.at(instance="w0"), gone.put)
    await bus.subscribe(RESYNC.at(instance="w0"), inbox.put)
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    await bus.publish(RESYNC.at(instance="w0"), resync(1))
    await inbox.next()
    assert gone.empty


async def test_undecodable_frames_are_dropped_and_counted_and_the_next_one_arrives(mesh: Any) -> None:
    bus = await mesh.connect()
    inbox = Inbox()
    address = RESYNC.at(instance="w0")
    await bus.subscribe(address, inbox.put)
    wrong = encode(Restate(instance="w0"))
    for payload in (b"", b"\xc1", b"\x91" * 5000, wrong, b"\x81\xa4kind\xa6resync"):
        await mesh.inject(address.subject, payload)
    await mesh.inject(address.subject, encode(resync(7)))
    assert (await inbox.next()).have_seq == 7
    assert bus.counters.by_kind["bad_frame"] == 5


async def test_a_failing_handler_is_counted_and_gets_the_next_frame(mesh: Any) -> None:
    bus = await mesh.connect()
    inbox = Inbox()

    def handle(message: Resync) -> None:
        if message.have_seq == 0:
            raise RuntimeError("handler fault")
        inbox.put(message)

    await bus.subscribe(RESYNC.at(instance="w0"), handle)
    for seq in range(2):
        await bus.publish(RESYNC.at(instance="w0"), resync(seq))
    assert (await inbox.next()).have_seq == 1
    assert bus.counters.by_kind["handler_error"] == 1


async def test_a_request_is_answered_with_the_decoded_reply(mesh: Any) -> None:
    asker, answerer = await mesh.connect(), await mesh.connect()
    info = InstanceInfo("w0", "m", "f", "mixed", "ready", 1, 16, 10, 4, 100, 50, 64)

    async def claim(request: Claim) -> Claimed:
        return Claimed(ok=True, epoch=request.epoch, owner=request.owner, incarnation=3, info=info)

    address = INSTANCE.at(instance="w0", verb="claim")
    await answerer.respond(address, claim)
    asked = Claim(epoch=2, owner="s", claim_id="c")
    answer = await asker.request(address, asked, reply=INSTANCE.reply_codec, timeout_s=WAIT_S)
    assert (answer.epoch, answer.incarnation, answer.info) == (2, 3, info)


async def test_a_request_nobody_answers_fails_at_once_and_one_answered_with_nothing_at_its_time_out(
    mesh: Any,
) -> None:
    bus = await mesh.connect()
    address = INSTANCE.at(instance="w0", verb="drain")
    with pytest.raises(NoAnswer, match="nobody"):
        await asyncio.wait_for(
            bus.request(address, Drain(), reply=INSTANCE.reply_codec, timeout_s=60), WAIT_S
        )

    async def silent(_: Drain) -> None:
        return None

    await bus.respond(address, silent)
    with pytest.raises(NoAnswer, match="within"):
        await bus.request(address, Drain(), reply=INSTANCE.reply_codec, timeout_s=0.05)


async def test_an_answer_of_the_wrong_type_is_no_answer(mesh: Any) -> None:
    bus = await mesh.connect()
    address = INSTANCE.at(instance="w0", verb="drain")

    async def wrong(_: Drain) -> Restate:
        return Restate(instance="w0")

    await bus.respond(address, wrong)
    with pytest.raises(NoAnswer, match="not a"):
        await bus.request(address, Drain(), reply=INSTANCE.reply_codec, timeout_s=WAIT_S)
    assert bus.counters.by_kind["bad_frame"] == 1


async def test_a_frame_above_the_limit_is_refused_with_both_sizes_and_the_connection_lives(mesh: Any) -> None:
    bus = await mesh.connect()
    inbox = Inbox()
    address = KV_RESTATE.at(instance="w0")
    await bus.subscribe(address, inbox.put)
    with pytest.raises(PayloadTooLarge) as refusal:
        await bus.publish(address, Restate(instance="w0", reason="x" * (1 << 20)))
    assert refusal.value.size > refusal.value.limit == 1 << 20
    await bus.publish(address, Restate(instance="w0", reason="small"))
    assert (await inbox.next()).reason == "small"


async def test_nothing_is_sent_or_kept_while_the_broker_is_away_and_subscriptions_survive(mesh: Any) -> None:
    bus = await mesh.connect()
    inbox = Inbox()
    address = RESYNC.at(instance="w0")
    await bus.subscribe(address, inbox.put)
    await mesh.stop()
    await state(bus, False)
    with pytest.raises(BusDown):
        await bus.publish(address, resync(1))
    with pytest.raises(BusDown):
        bus.publish_soon(address, resync(1))
    with pytest.raises(BusDown):
        await bus.request(address, resync(1), reply=INSTANCE.reply_codec, timeout_s=1)
    late = await bus.subscribe(RESYNC.at(instance="w1"), inbox.put)
    await mesh.start()
    await state(bus, True)
    await bus.publish(RESYNC.at(instance="w1"), resync(3))
    await bus.publish(address, resync(2))
    assert {(await inbox.next()).have_seq for _ in range(2)} == {2, 3}
    assert inbox.empty
    await late.unsubscribe()


async def test_a_closed_bus_refuses_and_closing_twice_is_harmless(mesh: Any) -> None:
    bus = await mesh.connect()
    await bus.close()
    await bus.close()
    assert not bus.connected
    with pytest.raises(BusDown):
        await bus.publish(RESYNC.at(instance="w0"), resync(1))


async def test_frames_published_before_close_are_delivered(mesh: Any) -> None:
    sender, receiver = await mesh.connect(), await mesh.connect()
    inbox = Inbox()
    await receiver.subscribe(RESYNC.at(instance="w0"), inbox.put)
    for seq in range(100):
        await sender.publish(RESYNC.at(instance="w0"), resync(seq))
    await sender.close()
    assert [(await inbox.next()).have_seq for _ in range(100)] == list(range(100))


def test_a_subject_refuses_tokens_that_would_reach_other_subjects() -> None:
    for token in ("", "a.b", "*", ">", "a b", "ü", "x" * 65):
        with pytest.raises(ValueError, match="subject"):
            RESYNC.at(instance=token)
    assert isinstance(RESYNC.at(instance="w0"), Address)
    assert Beat in RESYNC.carries.__args__
