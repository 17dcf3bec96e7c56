"""What only a real NATS server shows: credentials, permissions, a server that hangs, service discovery."""

import asyncio
import json
from pathlib import Path

import nats
import pytest

from shared.bus.nats import NatsBus
from shared.bus.port import BusDown, NoAnswer
from shared.subjects import INSTANCE, KV_RESTATE, RESYNC
from shared.wire import Restate, Resync
from tests.support.servers import free_port, nats_server

pytestmark = pytest.mark.servers


USERS = """users = [
  {user: w, password: secret, permissions: {
    publish: ["hortator.v1.resync.w0"], subscribe: ["hortator.v1.kv.restate.w0", "_INBOX.w.>", "$SRV.>",
      "hortator.v1.service.>"], allow_responses: true}},
  {user: s, password: secret, permissions: {publish: ">", subscribe: ">"}}
]"""


async def test_no_broker_or_a_wrong_password_ends_the_first_connect_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(BusDown, match="HORTATOR_NATS_URL"):
        await NatsBus.connect(f"nats://127.0.0.1:{free_port()}", timeout_s=0.5)
    with nats_server(tmp_path, USERS) as server, pytest.raises(BusDown, match="Authorization"):
        await NatsBus.connect(f"nats://127.0.0.1:{server.port}", user="w", password="no", timeout_s=0.5)


async def test_denied_subjects_are_counted_and_answers_come_to_the_users_own_inbox(tmp_path: Path) -> None:
    with nats_server(tmp_path, USERS) as server:
        url = f"nats://127.0.0.1:{server.port}"
        worker = await NatsBus.connect(url, user="w", password="secret")
        other = await NatsBus.connect(url, user="s", password="secret")
        await worker.subscribe(RESYNC.at(instance="w1"), lambda _: None)
        assert worker.counters.by_kind["denied"] == 1
        await worker.publish(RESYNC.at(instance="w1"), _resync("w1"))
        heard: asyncio.Queue[Resync] = asyncio.Queue()
        await other.subscribe(RESYNC.every(), heard.put_nowait)
        await worker.publish(RESYNC.at(instance="w0"), _resync("w0"))
        assert (await asyncio.wait_for(heard.get(), 5)).instance == "w0"
        assert worker.counters.by_kind["denied"] == 2

        async def answer(_: Resync) -> Restate:
            return Restate(instance="s", reason="answer")

        await other.respond(RESYNC.at(instance="w0"), answer)
        codec = KV_RESTATE.codec
        got = await worker.request(RESYNC.at(instance="w0"), _resync("w0"), reply=codec, timeout_s=5)
        assert got.reason == "answer"
        await worker.close()
        await other.close()


@pytest.mark.slow
async def test_a_hanging_broker_is_noticed_and_what_was_written_meanwhile_is_not_sent_later(
    tmp_path: Path,
) -> None:
    with nats_server(tmp_path) as server:
        url = f"nats://127.0.0.1:{server.port}"
        sender, receiver = await NatsBus.connect(url), await NatsBus.connect(url)
        heard: asyncio.Queue[Resync] = asyncio.Queue()
        await receiver.subscribe(RESYNC.at(instance="w0"), heard.put_nowait)
        gone, back = asyncio.Event(), asyncio.Event()
        sender.on_state(lambda up: (back if up else gone).set())
        server.freeze()
        await asyncio.wait_for(gone.wait(), 15)
        with pytest.raises(BusDown):
            await sender.publish(RESYNC.at(instance="w0"), _resync("stale"))
        server.thaw()
        await asyncio.wait_for(back.wait(), 15)
        # The receiver may notice only now, and misses what comes while it connects anew.
        async with asyncio.timeout(15):
            while heard.empty():
                await sender.publish(RESYNC.at(instance="w0"), _resync("fresh"))
                await asyncio.sleep(0.05)
        assert heard.get_nowait().instance == "fresh"
        await sender.close()
        await receiver.close()


@pytest.mark.slow
async def test_what_a_hanging_broker_has_not_taken_is_dropped_and_does_not_delay_the_reconnect(
    tmp_path: Path,
) -> None:
    with nats_server(tmp_path) as server:
        sender = await NatsBus.connect(f"nats://127.0.0.1:{server.port}")
        gone, back = asyncio.Event(), asyncio.Event()
        sender.on_state(lambda up: (back if up else gone).set())
        server.freeze()
        for _ in range(64):
            sender.publish_soon(KV_RESTATE.at(instance="w0"), Restate(instance="w0", reason="x" * 1_000_000))
        await asyncio.wait_for(gone.wait(), 15)
        server.thaw()
        await asyncio.wait_for(back.wait(), 15)
        heard: asyncio.Queue[Restate] = asyncio.Queue()
        await sender.subscribe(KV_RESTATE.at(instance="w0"), heard.put_nowait)
        await sender.publish(KV_RESTATE.at(instance="w0"), Restate(instance="w0", reason="fresh"))
        # What the kernel had taken may still come (frames are fenced); our own backlog may not.
        stale = 0
        while (await asyncio.wait_for(heard.get(), 15)).reason != "fresh":
            stale += 1
        assert stale < 32
        await sender.close()


@pytest.mark.slow
async def test_closing_does_not_wait_for_a_broker_that_hangs(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        bus = await NatsBus.connect(f"nats://127.0.0.1:{server.port}")
        server.freeze()
        for _ in range(64):
            bus.publish_soon(KV_RESTATE.at(instance="w0"), Restate(instance="w0", reason="x" * 1_000_000))
        await asyncio.wait_for(bus.close(), 10)
        server.thaw()


async def test_service_discovery_answers_ping_info_and_stats_with_our_data(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        url = f"nats://127.0.0.1:{server.port}"
        bus = await NatsBus.connect(url)
        numbers = {"queue": 3}
        announced = await bus.announce("hortator-test", "t0", "0.1.0", lambda: numbers)
        client = await nats.connect(url)
        for verb in ("PING", "INFO", "STATS"):
            body = json.loads((await client.request(f"$SRV.{verb}.hortator-test", b"", timeout=5)).data)
            assert (body["name"], body["metadata"]) == ("hortator-test", {"instance": "t0"})
        assert body["endpoints"][0]["data"] == numbers
        direct = await client.request(body["endpoints"][0]["subject"], b"", timeout=5)
        assert json.loads(direct.data) == numbers
        await announced.stop()
        with pytest.raises(nats.errors.NoRespondersError):
            await client.request("$SRV.PING.hortator-test", b"", timeout=5)
        await client.close()
        await bus.close()


async def test_a_session_the_broker_ends_for_good_is_told(tmp_path: Path) -> None:
    with nats_server(tmp_path, USERS) as server:
        bus = await NatsBus.connect(f"nats://127.0.0.1:{server.port}", user="w", password="secret")
        server.stop()
        _change_password(Path(server.command[-1]))
        server.start()
        await asyncio.wait_for(bus.lost.wait(), 15)
        with pytest.raises((BusDown, NoAnswer)):
            await bus.request(
                INSTANCE.at(instance="w0", verb="ready"), _resync("w0"), reply=INSTANCE.codec, timeout_s=1
            )
        await bus.close()


def _change_password(config: Path) -> None:
    config.write_text(config.read_text().replace("password: secret", "password: other"))


def _resync(instance: str) -> Resync:
    return Resync(instance=instance, epoch=1, owner="s", incarnation=1, have_seq=1)
