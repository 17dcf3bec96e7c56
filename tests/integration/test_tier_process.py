"""The second tier in the process that containers run, with real NATS and Valkey: stops, crashes, damage."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from shared.bus.nats import NatsBus
from shared.store.redis import RedisStore
from shared.subjects import KV_TIER, tier_row
from shared.tier.client import TierClient, TierDown
from shared.wire import TierOffer
from tests.support.servers import RunningServer, nats_server, redis_server
from tests.support.tier import block_hash, content

pytestmark = pytest.mark.servers

SIZE = 64 << 10
CHAIN = [block_hash(n) for n in range(24)]
ROW = tier_row("k0", "m")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[RunningServer, RunningServer]]:
    with nats_server(tmp_path) as broker, redis_server() as store:
        yield broker, store


class Process:
    """A kvstore with a tier of 16 blocks in memory."""

    def __init__(
        self, folder: Path, servers: tuple[RunningServer, RunningServer], disk: str = "64MiB"
    ) -> None:
        broker, store = servers
        ready, self.log = folder / "ready.json", folder / "kvstore.log"
        ready.unlink(missing_ok=True)
        settings = {
            "HORTATOR_NATS_URL": f"nats://127.0.0.1:{broker.port}",
            "HORTATOR_REDIS_URL": f"redis://127.0.0.1:{store.port}/0",
            "HORTATOR_READY_FILE": str(ready),
            "HORTATOR_INSTANCE": "k0",
            "HORTATOR_TIER_MEMORY": str(16 * SIZE),
            "HORTATOR_TIER_DISK": disk,
            "HORTATOR_TIER_DIR": str(folder / "tier"),
            "HORTATOR_STOP_GRACE_S": "10",
        }
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "services.kvstore"],
                env={**os.environ, **settings},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 20
        while not ready.exists():
            if self.popen.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(self.log.read_text())
            time.sleep(0.01)
        self.http = json.loads(ready.read_text())["http"]

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def end(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(20)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


@asynccontextmanager
async def process_in(
    folder: Path, servers: tuple[RunningServer, RunningServer], **settings: str
) -> AsyncIterator[Process]:
    running = await asyncio.to_thread(Process, folder, servers, **settings)
    try:
        yield running
    finally:
        if running.popen.poll() is None:
            running.kill()


async def offer_of(servers: tuple[RunningServer, RunningServer], former: str = "") -> TierOffer:
    """The next offer that is not of the former life."""
    bus = await NatsBus.connect(f"nats://127.0.0.1:{servers[0].port}")
    heard: asyncio.Queue[TierOffer] = asyncio.Queue()
    await bus.subscribe(KV_TIER.at(), heard.put_nowait)
    try:
        async with asyncio.timeout(10):
            while (offer := await heard.get()).secret == former:
                pass
            return offer
    finally:
        await bus.close()


def fill(offer: TierOffer, part: int = 0, parts: int = 1) -> None:
    client = TierClient(offer, "m", part, parts, SIZE)
    for n in range(len(CHAIN)):
        data = content(n, SIZE)
        assert client.put(CHAIN[n], memoryview(data), sha256(data).digest())
    client.close()


def fetch(offer: TierOffer, part: int = 0, parts: int = 1) -> int:
    """How many blocks of the chain come, each right."""
    client = TierClient(offer, "m", part, parts, SIZE)
    count = 0
    for n, view in client.get(CHAIN, memoryview(bytearray(SIZE))):
        assert bytes(view) == content(n, SIZE)
        count += 1
    client.close()
    return count


async def finds(servers: tuple[RunningServer, RunningServer], expected: dict[str, int]) -> None:
    store = RedisStore(f"redis://127.0.0.1:{servers[1].port}/0")
    found = None
    try:
        async with asyncio.timeout(15):
            while (found := await store.longest_prefix("m", CHAIN)) != expected:
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"lookups find {found}, not {expected}") from None
    finally:
        await store.close()


async def test_blocks_outlive_a_graceful_stop_whole_and_are_announced_again(
    tmp_path: Path, servers: tuple[RunningServer, RunningServer]
) -> None:
    async with process_in(tmp_path, servers) as process:
        offer = await offer_of(servers)
        await asyncio.to_thread(fill, offer)
        await finds(servers, {ROW: len(CHAIN)})
        assert await asyncio.to_thread(process.end) == 0
        with pytest.raises(TierDown):
            await asyncio.to_thread(fetch, offer)
        await finds(servers, {})
    async with process_in(tmp_path, servers) as process:
        again = await offer_of(servers, offer.secret)
        assert await asyncio.to_thread(fetch, again) == len(CHAIN)
        await finds(servers, {ROW: len(CHAIN)})
        assert process.metric("hortator_tier_hits_total") == len(CHAIN)


async def test_a_kill_costs_what_only_memory_held_and_never_a_wrong_block(
    tmp_path: Path, servers: tuple[RunningServer, RunningServer]
) -> None:
    async with process_in(tmp_path, servers) as process:
        offer = await offer_of(servers)
        filling = asyncio.ensure_future(asyncio.to_thread(fill, offer))
        await asyncio.wait({filling})
        await asyncio.to_thread(process.kill)
    segments = sorted((tmp_path / "tier").glob("*.segment"))
    assert segments
    with segments[-1].open("r+b") as torn:
        torn.truncate(max(0, torn.seek(0, os.SEEK_END) - 1000))
    with segments[0].open("r+b") as damaged:
        damaged.seek(5000)
        damaged.write(b"damage")
    async with process_in(tmp_path, servers) as process:
        again = await offer_of(servers, offer.secret)
        assert await asyncio.to_thread(fetch, again) == 0  # the first is the damaged one
        assert process.metric("hortator_tier_corrupt_total") == 1
        await asyncio.to_thread(fill, again)
        assert await asyncio.to_thread(fetch, again) == len(CHAIN)
        await finds(servers, {ROW: len(CHAIN)})


async def test_a_tier_of_memory_alone_forgets_what_it_has_no_room_for_and_its_row_says_so(
    tmp_path: Path, servers: tuple[RunningServer, RunningServer]
) -> None:
    async with process_in(tmp_path, servers, disk="0"):
        offer = await offer_of(servers)
        await asyncio.to_thread(fill, offer)
        await finds(servers, {})  # the first of the chain are gone
        assert await asyncio.to_thread(fetch, offer) == 0
        await asyncio.to_thread(fill, offer)
        for part in range(2):
            await asyncio.to_thread(fill, offer, part, 2)


async def test_a_kvstore_whose_tier_cannot_be_ends_with_the_reason(
    tmp_path: Path, servers: tuple[RunningServer, RunningServer]
) -> None:
    (tmp_path / "tier").write_text("a file where a folder should be")
    process = await asyncio.to_thread(Process, tmp_path, servers)
    assert await asyncio.to_thread(process.popen.wait, 20) == 1
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    (reason,) = [line["error"] for line in lines if line["level"] == "error"]
    assert "HORTATOR_TIER_DIR" in reason
    assert "name a folder" in reason
