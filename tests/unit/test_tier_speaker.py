"""What a second tier says on the bus, and what the index makes of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from services.kvstore import service as index_shell
from services.kvstore.service import KvstoreService
from services.kvstore.settings import KvstoreSettings, TierOptions, tier_options
from services.kvstore.tier import speaker as shell
from services.kvstore.tier.arena import cost
from services.kvstore.tier.entries import Space
from services.kvstore.tier.service import SecondTier
from shared.bus.memory import MemoryBroker
from shared.runtime.settings import CannotStart, SettingsError
from shared.store.memory import MemoryStore
from shared.subjects import KV_EVENTS, KV_RESTATE, KV_TIER, tier_row
from shared.tier.client import TierClient
from shared.wire import KvEvents, Restate, TierOffer
from tests.support.tier import block_hash, content

SIZE = 1024
ROW = tier_row("k0", "m")
CHAIN = [block_hash(n) for n in range(8)]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_shell, "TICK_S", 0.01)
    monkeypatch.setattr(index_shell, "DUTY_EVERY_S", 0.02)
    monkeypatch.setattr(shell, "OFFER_EVERY_S", 0.02)
    monkeypatch.setattr(shell, "HEARTBEAT_S", 0.05)


def options(folder: Path | None = None, port: int = 0) -> TierOptions:
    disk = 0 if folder is None else 1 << 20
    return TierOptions(64 * cost(SIZE), disk, folder, "127.0.0.1", port, "127.0.0.1")


@asynccontextmanager
async def running(broker: MemoryBroker, made: TierOptions) -> AsyncIterator[SecondTier]:
    bus = broker.connect()
    tier = SecondTier(bus, made, "k0")
    stopping = asyncio.Event()
    task = asyncio.ensure_future(tier.run(stopping, 1.0))
    try:
        await until(lambda: tier.server.port or task.done())
        yield tier
    finally:
        stopping.set()
        await task
        await bus.close()


@asynccontextmanager
async def indexing(broker: MemoryBroker) -> AsyncIterator[tuple[KvstoreService, MemoryStore]]:
    bus, store = broker.connect(), MemoryStore()
    service = KvstoreService(bus, store, "another")
    stopping = asyncio.Event()
    task = asyncio.ensure_future(service.run(stopping))
    await until(lambda: service.writing)
    try:
        yield service, store
    finally:
        stopping.set()
        await task
        await bus.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def finds(store: MemoryStore, expected: dict[str, int]) -> None:
    async with asyncio.timeout(10):
        while (found := await store.longest_prefix("m", CHAIN)) != expected:
            await asyncio.sleep(0.002)
            last = found
            assert last is not None


async def put(tier: SecondTier, number: int, part: int = 0, parts: int = 1) -> None:
    data = content(number, SIZE)

    async def receive(room: memoryview | None) -> None:
        if room is not None:
            room[:] = data

    await tier.store.put(Space("m", part, parts), block_hash(number), sha256(data).digest(), SIZE, receive)


async def test_lookups_find_the_tier_beside_instances_until_it_says_goodbye() -> None:
    broker = MemoryBroker()
    async with indexing(broker) as (service, store):
        async with running(broker, options()) as tier:
            for n in range(5):
                await put(tier, n)
            await finds(store, {ROW: 5})
            entry = tier.store.book.find(next(k for k in tier.store.book._entries if k.hash == CHAIN[3]))
            assert entry is not None
            tier.store.book.drop(entry)
            tier.store.changed.set()
            await finds(store, {ROW: 3})
        await finds(store, {})
        assert service.core.heard_of == 0


async def test_the_last_word_of_a_tier_that_stops_takes_its_row_back_at_once() -> None:
    broker = MemoryBroker()
    bus = broker.connect()
    heard: list[KvEvents] = []
    await bus.subscribe(KV_EVENTS.every(), heard.append)
    async with running(broker, options()) as tier:
        await put(tier, 0)
        await until(lambda: any(event.stored for event in heard))
    await broker.settle()
    assert (heard[-1].restate, heard[-1].stored) == ("begin", [])
    await bus.close()


async def test_a_tier_is_not_taken_for_an_instance() -> None:
    broker = MemoryBroker()
    async with indexing(broker) as (service, store), running(broker, options()) as tier:
        await put(tier, 0)
        await finds(store, {ROW: 1})
        assert await store.list_instances("m") == {}
        assert service.core.heard_of == 0
        assert service.core.blocks == {ROW: 1}


async def test_a_block_is_found_when_all_ranks_have_brought_their_parts() -> None:
    broker = MemoryBroker()
    async with indexing(broker) as (_, store), running(broker, options()) as tier:
        await put(tier, 0, 0, 2)
        await put(tier, 1, 0, 2)
        await put(tier, 1, 1, 2)
        await put(tier, 0, 1, 2)
        await finds(store, {ROW: 2})


async def test_a_flushed_index_is_true_again() -> None:
    broker = MemoryBroker()
    async with indexing(broker) as (service, store), running(broker, options()) as tier:
        for n in range(3):
            await put(tier, n)
        await finds(store, {ROW: 3})
        store.flush()
        await finds(store, {ROW: 3})
        await put(tier, 3)
        await finds(store, {ROW: 4})
        assert service.core.counts.restates >= 1


async def test_a_restate_between_changes_leaves_nothing_out_and_tells_nothing_twice() -> None:
    broker = MemoryBroker()
    bus = broker.connect()
    heard: list[KvEvents] = []
    await bus.subscribe(KV_EVENTS.every(), heard.append)
    async with running(broker, options()) as tier:
        for n in range(6):
            await put(tier, n)
            await until(lambda: heard)
            await bus.publish(KV_RESTATE.at(instance=ROW), Restate(instance=ROW))
        await until(lambda: sum(event.restate == "begin" for event in heard) == 6)
        last = heard[-1].seq
        await until(lambda: heard[-1].seq > last + 2)
        index: set[bytes] = set()
        for event in heard:
            assert not event.restate or event.restate == "begin"
            if event.restate:
                index.clear()
            assert not index & set(event.stored)
            index |= set(event.stored)
        assert index == {block_hash(n) for n in range(6)}
        assert [event.seq for event in heard] == list(range(1, len(heard) + 1))
    await bus.close()


async def test_offers_are_made_again_and_again_and_lead_to_the_blocks(tmp_path: Path) -> None:
    broker = MemoryBroker()
    bus = broker.connect()
    offers: list[TierOffer] = []
    await bus.subscribe(KV_TIER.at(), offers.append)
    async with running(broker, options(tmp_path)) as tier:
        await put(tier, 1)
        await until(lambda: len(offers) > 2)
        client = TierClient(offers[-1], "m", 0, 1, SIZE)
        assert await asyncio.to_thread(client.have, CHAIN[:3]) == [False, True, False]
        client.close()
    secret = offers[-1].secret
    offers.clear()
    async with running(broker, options(tmp_path)):
        await until(lambda: offers)
        assert offers[0].secret != secret  # of a former life
        client = TierClient(offers[0], "m", 0, 1, SIZE)
        assert await asyncio.to_thread(client.have, CHAIN[:3]) == [False, True, False]
        client.close()
    await bus.close()


async def test_what_happens_while_the_broker_is_away_is_told_when_it_is_back() -> None:
    broker = MemoryBroker()
    async with indexing(broker) as (_, store), running(broker, options()) as tier:
        await put(tier, 0)
        await finds(store, {ROW: 1})
        broker.stop()
        await put(tier, 1)
        await until(lambda: not tier.store.book.changes)
        broker.start()
        await finds(store, {ROW: 2})


async def test_a_port_that_is_taken_is_told() -> None:
    broker = MemoryBroker()
    async with running(broker, options()) as tier:
        other = SecondTier(broker.connect(), options(port=tier.server.port), "k1")
        with pytest.raises(CannotStart, match="correct HORTATOR_TIER_HOST and HORTATOR_TIER_PORT"):
            await other.run(asyncio.Event(), 0.0)


def test_there_is_no_tier_unless_memory_is_given_to_it() -> None:
    assert tier_options(KvstoreSettings()) is None
    made = tier_options(KvstoreSettings(tier_memory="64MiB", tier_disk="1GiB", tier_dir="/blocks"))
    assert made == TierOptions(64 << 20, 1 << 30, Path("/blocks"), "127.0.0.1", 0, "127.0.0.1")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tier_memory": "lots"}, "HORTATOR_TIER_MEMORY='lots' is not a size"),
        ({"tier_disk": "1GiB"}, "set HORTATOR_TIER_MEMORY"),
        ({"tier_memory": "1GiB", "tier_disk": "1GiB"}, "name it in HORTATOR_TIER_DIR"),
        ({"tier_memory": "1GiB", "tier_host": "0.0.0.0"}, "set HORTATOR_TIER_ANNOUNCE"),
        ({"tier_memory": "1GiB", "tier_port": 70000}, "no port"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_words(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        tier_options(KvstoreSettings(**wrong))  # type: ignore[arg-type]
