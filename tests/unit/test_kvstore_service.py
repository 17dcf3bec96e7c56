"""kvstore's shell on the in-memory bus and store: outages, flushes, several processes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from services.kvstore import service as shell
from services.kvstore.service import KvstoreService
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.store.memory import MemoryStore
from shared.store.records import decode_record
from shared.subjects import KV_EVENTS, KV_RESTATE
from shared.wire import InstanceInfo, KvEvents, Restate


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "TICK_S", 0.01)
    monkeypatch.setattr(shell, "DUTY_EVERY_S", 0.02)
    monkeypatch.setattr(shell, "DUTY_TTL_S", 0.2)


class Instance:
    """Holds blocks, tells of changes, restates when asked."""

    def __init__(self, bus: MemoryBus, name: str, blocks: list[bytes]) -> None:
        self.bus, self.name, self.blocks, self.seq = bus, name, blocks, 0
        self.asked = 0

    async def start(self) -> None:
        await self.bus.subscribe(KV_RESTATE.at(instance=self.name), self._restate)
        await self.tell(stored=self.blocks)

    async def _restate(self, _: Restate) -> None:
        self.asked += 1
        await self.tell(stored=self.blocks, restate="begin")

    async def tell(self, **content: object) -> None:
        self.seq += 1
        info = InstanceInfo(self.name, "m", "f", "mixed", "ready", 1, 16, 100, 4, 100, 50, 64)
        event = KvEvents(instance=self.name, born=1, seq=self.seq, info=info, **content)  # type: ignore[arg-type]
        await self.bus.publish(KV_EVENTS.at(instance=self.name), event)


@asynccontextmanager
async def running(
    broker: MemoryBroker, store: MemoryStore | None, owner: str
) -> AsyncIterator[KvstoreService]:
    bus = broker.connect()
    service = KvstoreService(bus, store, owner)
    stopping = asyncio.Event()
    task = asyncio.ensure_future(service.run(stopping))
    try:
        await until(lambda: any(s.bus is bus for s in broker.subscriptions))
        yield service
    finally:
        stopping.set()
        await task
        await bus.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def finds(store: MemoryStore, chain: list[bytes], expected: dict[str, int]) -> None:
    async with asyncio.timeout(10):
        while await store.longest_prefix("m", chain) != expected:
            await asyncio.sleep(0.005)


CHAIN = [b"a", b"b", b"c"]


async def test_what_instances_tell_is_found_by_lookups_and_their_health_by_records() -> None:
    broker, store = MemoryBroker(), MemoryStore()
    async with running(broker, store, "k") as service:
        await until(lambda: service.writing)
        instance = Instance(broker.connect(), "w0", CHAIN)
        await instance.start()
        await finds(store, CHAIN, {"w0": 3})
        record = decode_record((await store.list_instances("m"))["w0"])
        assert record is not None
        assert (record.info.instance, record.blocks) == ("w0", 3)
        await instance.tell(removed=[b"b"])
        await finds(store, CHAIN, {"w0": 1})
        assert instance.asked == 0
        assert service.stats()["index_blocks"] == 2
    assert await store.hold(shell.DUTY, "next", 1)


async def test_instances_are_asked_again_when_the_store_returns_empty_and_when_it_was_flushed_unseen() -> (
    None
):
    broker, store = MemoryBroker(), MemoryStore()
    async with running(broker, store, "k") as service:
        instance = Instance(broker.connect(), "w0", CHAIN)
        await instance.start()
        await finds(store, CHAIN, {"w0": 3})
        store.down = True
        await instance.tell(stored=[])
        await until(lambda: not service.writing)
        assert service.health()[0]
        store.flush()
        store.down = False
        await finds(store, CHAIN, {"w0": 3})
        before = instance.asked
        store.flush()
        await instance.tell(stored=[b"d"])
        instance.blocks = [*CHAIN, b"d"]
        await finds(store, [*CHAIN, b"d"], {"w0": 4})
        assert instance.asked > before


async def test_one_of_two_processes_writes_and_the_other_takes_over_with_the_whole_truth() -> None:
    broker, store = MemoryBroker(), MemoryStore()
    instance = Instance(broker.connect(), "w0", CHAIN)
    async with running(broker, store, "second") as second:
        await until(lambda: second.writing)
        async with running(broker, store, "first") as first:
            await instance.start()
            await finds(store, CHAIN, {"w0": 3})
            assert (first.writing, second.writing) == (False, True)
            # As if the writer had died: it says nothing any more, and its duty lapses.
            second._duty_at = float("inf")
            await store.let_go(shell.DUTY, "second")
            await until(lambda: first.writing)
            instance.blocks = CHAIN[:2]
            await instance.tell(removed=[b"c"])
            await finds(store, CHAIN, {"w0": 2})


async def test_after_an_unseen_flush_nobody_is_taken_for_whoever_got_his_number() -> None:
    broker, store = MemoryBroker(), MemoryStore()
    async with running(broker, store, "k"):
        first, second = (Instance(broker.connect(), name, CHAIN) for name in ("w0", "w1"))
        await first.start()
        await finds(store, CHAIN, {"w0": 3})
        await second.start()
        await finds(store, CHAIN, {"w0": 3, "w1": 3})
        store.flush()
        # The second restates first, under the number that was the first one's.
        await second.tell(stored=[b"d"])
        second.blocks = [*CHAIN, b"d"]
        await until(lambda: second.asked)
        await finds(store, second.blocks, {"w1": 4})
        await first.tell(removed=[b"c"])
        first.blocks = CHAIN[:2]
        await finds(store, second.blocks, {"w0": 2, "w1": 4})


async def test_without_a_store_it_keeps_listening_and_asks_nobody() -> None:
    broker = MemoryBroker()
    async with running(broker, None, "k") as service:
        instance = Instance(broker.connect(), "w0", CHAIN)
        await instance.start()
        await until(lambda: service.core.heard_of == 1)
        await instance.tell()
        await broker.settle()
        assert (service.writing, instance.asked) == (False, 0)
        assert service.health()[0]
