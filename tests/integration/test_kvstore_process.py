"""kvstore as the process that containers run, with real NATS and Valkey."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest

from shared.bus.nats import NatsBus
from shared.store.port import StoreDown
from shared.store.redis import RedisStore
from shared.subjects import KV_EVENTS, KV_RESTATE
from shared.wire import InstanceInfo, KvEvents, Restate
from tests.support.servers import RunningServer, nats_server, redis_server

pytestmark = pytest.mark.servers

CHAIN = [bytes([n]) * 32 for n in range(50)]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[RunningServer, RunningServer]]:
    with nats_server(tmp_path) as broker, redis_server() as store:
        yield broker, store


class Process:
    def __init__(self, folder: Path, broker: RunningServer, store: RunningServer, **env: str) -> None:
        self.ready = folder / "ready.json"
        self.log = folder / "kvstore.log"
        self.ready.unlink(missing_ok=True)
        settings = {
            "HORTATOR_NATS_URL": f"nats://127.0.0.1:{broker.port}",
            "HORTATOR_REDIS_URL": f"redis://127.0.0.1:{store.port}/0",
            "HORTATOR_READY_FILE": str(self.ready),
            "HORTATOR_INSTANCE": "k0",
            **env,
        }
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "services.kvstore"],
                env={**os.environ, **settings},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 20
        while not self.ready.exists():
            if self.popen.poll() is not None or time.monotonic() > deadline:
                self.popen.kill()
                raise RuntimeError(self.log.read_text())
            time.sleep(0.01)
        self.http = json.loads(self.ready.read_text())["http"]

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.http}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def end(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(20)


@pytest.fixture
def process(tmp_path: Path, servers: tuple[RunningServer, RunningServer]) -> Iterator[Process]:
    running = Process(tmp_path, *servers)
    yield running
    if running.popen.poll() is None:
        running.popen.kill()
        running.popen.wait()


class Instance:
    """Beats every 0.2 s and restates when asked, as rank 0 does."""

    def __init__(self, bus: NatsBus, blocks: list[bytes]) -> None:
        self.bus, self.blocks, self.seq, self.asked = bus, blocks, 0, 0

    async def tell(self, **content: Any) -> None:
        self.seq += 1
        info = InstanceInfo("w0", "m", "f", "mixed", "ready", 1, 16, 100, 4, 100, 50, 64)
        event = KvEvents(instance="w0", born=1, seq=self.seq, info=info, **content)
        await self.bus.publish(KV_EVENTS.at(instance="w0"), event)

    async def restate(self, _: Restate) -> None:
        self.asked += 1
        await self.tell(stored=self.blocks, restate="begin")

    async def beat(self) -> None:
        while True:
            await self.tell()
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def instance_on(broker: RunningServer) -> AsyncIterator[Instance]:
    bus = await NatsBus.connect(f"nats://127.0.0.1:{broker.port}")
    instance = Instance(bus, CHAIN)
    await bus.subscribe(KV_RESTATE.at(instance="w0"), instance.restate)
    await instance.tell(stored=CHAIN)
    beating = asyncio.ensure_future(instance.beat())
    try:
        yield instance
    finally:
        beating.cancel()
        await bus.close()


async def finds(store: RedisStore, expected: dict[str, int]) -> None:
    found: Any = None
    try:
        async with asyncio.timeout(15):
            while found != expected:
                with contextlib.suppress(StoreDown):
                    found = await store.longest_prefix("m", CHAIN)
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"lookups find {found}, not {expected}") from None


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.02)


async def test_the_index_is_true_through_a_stop_of_redis_and_a_restart_of_kvstore(
    tmp_path: Path, servers: tuple[RunningServer, RunningServer], process: Process
) -> None:
    broker, valkey = servers
    store = RedisStore(f"redis://127.0.0.1:{valkey.port}/0")
    async with instance_on(broker) as instance:
        await finds(store, {"w0": 50})
        assert set(await store.list_instances("m")) == {"w0"}
        assert "hortator_kvstore_index_blocks" in await asyncio.to_thread(process.get, "/metrics")

        valkey.stop()
        await asyncio.sleep(1.5)  # an outage longer than the duty's renewal
        assert json.loads(await asyncio.to_thread(process.get, "/health"))["ok"]
        asked = instance.asked
        valkey.start()
        await finds(store, {"w0": 50})
        assert instance.asked > asked

        assert await asyncio.to_thread(process.end) == 0
        instance.blocks = CHAIN[:20]
        again = await asyncio.to_thread(Process, tmp_path, broker, valkey)
        await finds(store, {"w0": 20})
        client = await nats.connect(f"nats://127.0.0.1:{broker.port}")
        stats = json.loads((await client.request("$SRV.STATS.hortator-kvstore", b"", timeout=5)).data)
        assert stats["endpoints"][0]["data"]["index_blocks"] == 20
        await client.close()
    # The instance is silent now.
    await finds(store, {})
    assert await store.list_instances("m") == {}
    assert await asyncio.to_thread(again.end) == 0
    await store.close()


def test_a_service_ends_with_its_launcher_and_says_why_it_cannot_start(
    tmp_path: Path, servers: tuple[RunningServer, RunningServer]
) -> None:
    broker, valkey = servers
    launcher = (
        "import os, subprocess, sys, time\n"
        "env = {**os.environ, 'HORTATOR_PARENT_PID': str(os.getpid())}\n"
        "child = subprocess.Popen([sys.executable, '-m', 'services.kvstore'], env=env)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    ready = tmp_path / "r.json"
    env = {
        **os.environ,
        "HORTATOR_NATS_URL": f"nats://127.0.0.1:{broker.port}",
        "HORTATOR_REDIS_URL": f"redis://127.0.0.1:{valkey.port}/0",
        "HORTATOR_READY_FILE": str(ready),
    }
    with subprocess.Popen(
        [sys.executable, "-c", launcher], env=env, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        deadline = time.monotonic() + 20
        while not ready.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 10
        while _alive(child):
            assert time.monotonic() < deadline, "the child outlives its launcher"
            time.sleep(0.02)
    broker.stop()
    wrong = {**env, "HORTATOR_HTTP": "nowhere"}
    done = subprocess.run(
        [sys.executable, "-m", "services.kvstore"], env=wrong, capture_output=True, text=True, timeout=40
    )
    assert done.returncode == 1
    assert "HORTATOR_NATS_URL" in done.stdout


def _alive(pid: int) -> bool:
    """Whether the process runs; a zombie nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
