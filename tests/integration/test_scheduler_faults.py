"""Schedulers and mock workers as real processes on real NATS and Redis: killed, stopped, cut off from Redis.

The mock draws tokens from (seed, choice, position, last token), so an undisturbed run of the same request is
the reference of every disturbed one.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shared.bus.nats import NatsBus
from shared.client.effects import Open
from shared.client.mesh import MeshClient
from shared.wire import Answer, EndRow, Sampling
from tests.support.servers import RunningServer, nats_server, redis_server

pytestmark = pytest.mark.servers

MODEL = "mock"
STEP_S = 0.003


@dataclass
class Stream:
    """Sink of one sequence."""

    ids: list[int] = field(default_factory=list)
    end: EndRow | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def accepted(self, request: Any) -> None:
        return

    def tokens(self, seq: Any, ids: Sequence[int]) -> None:
        self.ids += ids

    def ended(self, seq: Any, end: EndRow) -> None:
        self.end = end
        self.over.set()

    def refused(self, request: Any, answer: Answer) -> None:
        raise AssertionError(f"refused: {answer}")


class Processes:
    """Services of one mesh, started with the environment that containers would give them."""

    def __init__(self, folder: Path, nats: RunningServer, redis: RunningServer) -> None:
        self.folder = folder
        self.nats, self.redis = nats, redis
        self.by_name: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, service: str, name: str, **settings: str) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("HORTATOR_")}
        env |= {
            "HORTATOR_NATS_URL": f"nats://127.0.0.1:{self.nats.port}",
            "HORTATOR_REDIS_URL": f"redis://127.0.0.1:{self.redis.port}/0" if service == "scheduler" else "",
            "HORTATOR_MODEL": MODEL,
            "HORTATOR_INSTANCE": name,
            "HORTATOR_PARENT_PID": str(os.getpid()),
        }
        env |= {f"HORTATOR_{key.upper()}": value for key, value in settings.items()}
        with open(self.folder / f"{name}.log", "ab") as log:
            self.by_name[name] = subprocess.Popen(
                [sys.executable, "-m", f"services.{service}"], env=env, stdout=log, stderr=log
            )

    def start_worker(self, name: str) -> None:
        self.start("worker", name, mock="1", mock_step_s=str(STEP_S), mock_blocks="4096", max_slots="16")

    def signal(self, name: str, number: int) -> None:
        self.by_name[name].send_signal(number)

    def log(self, name: str) -> list[dict[str, Any]]:
        lines = (self.folder / f"{name}.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def leader(self) -> str:
        """Who leads by the logs. Of two that began together both led for a moment; one stepped down."""
        epochs: dict[str, int] = {}
        for name in self.by_name:
            for line in self.log(name) if name.startswith("s") else ():
                if line.get("event") == "leading":
                    epochs[name] = line["epoch"]
                elif line.get("event") == "stepped_down":
                    epochs.pop(name, None)
        return max(epochs, key=lambda name: epochs[name])

    def close(self) -> None:
        for process in self.by_name.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(10)


@contextlib.asynccontextmanager
async def mesh(folder: Path, schedulers: int, workers: int) -> AsyncIterator[tuple[Processes, MeshClient]]:
    with nats_server(folder) as nats, redis_server() as redis:
        parts = Processes(folder, nats, redis)
        bus = await NatsBus.connect(f"nats://127.0.0.1:{nats.port}")
        client = MeshClient(bus, "c0", MODEL)
        try:
            for number in range(workers):
                parts.start_worker(f"w{number}")
            for number in range(schedulers):
                parts.start("scheduler", f"s{number}")
            await client.start()
            yield parts, client
        finally:
            await client.close()
            await bus.close()
            parts.close()


def ask(client: MeshClient, name: str, tokens: int, seed: int = 1) -> Stream:
    stream = Stream()
    sampling = Sampling(max_tokens=tokens, seed=seed)
    client.open(Open(request_id=name, prompt=list(range(50)), sampling=sampling, sinks=[stream]))
    return stream


async def reached(stream: Stream, tokens: int) -> None:
    async with asyncio.timeout(30):
        while len(stream.ids) < tokens:
            await asyncio.sleep(0.01)


async def whole(streams: list[Stream], references: list[Stream]) -> None:
    """Each stream ends with exactly the tokens of its undisturbed run."""
    async with asyncio.timeout(60):
        for stream in streams:
            await stream.over.wait()
    for stream, reference in zip(streams, references, strict=True):
        assert stream.end is not None
        assert stream.end.reason == "length", stream.end
        assert stream.ids == reference.ids


async def undisturbed(client: MeshClient, count: int, tokens: int) -> list[Stream]:
    references = [ask(client, f"reference{seed}", tokens, seed) for seed in range(count)]
    async with asyncio.timeout(40):
        for stream in references:
            await stream.over.wait()
    return references


async def test_streams_survive_a_killed_leader_with_redis_away(tmp_path: Path):
    async with mesh(tmp_path, schedulers=2, workers=1) as (parts, client):
        references = await undisturbed(client, 4, 600)
        streams = [ask(client, f"r{seed}", 600, seed) for seed in range(4)]
        await reached(streams[0], 50)
        before = client.core.counts.takeovers
        parts.redis.stop()
        parts.signal(parts.leader(), signal.SIGKILL)
        await whole(streams, references)
        assert client.core.counts.takeovers == before + 1
        assert client.core.counts.impossible_rows == 0


async def test_a_stopped_leader_that_wakes_up_beside_its_successor_changes_nothing(tmp_path: Path):
    async with mesh(tmp_path, schedulers=2, workers=1) as (parts, client):
        references = await undisturbed(client, 4, 1500)
        streams = [ask(client, f"r{seed}", 1500, seed) for seed in range(4)]
        await reached(streams[0], 50)
        old, before = parts.leader(), client.core.counts.takeovers
        parts.signal(old, signal.SIGSTOP)
        async with asyncio.timeout(20):
            while client.core.counts.takeovers == before:
                await asyncio.sleep(0.02)
        parts.signal(old, signal.SIGCONT)
        await whole(streams, references)
        async with asyncio.timeout(10):
            while parts.log(old)[-1].get("event") != "stepped_down":
                await asyncio.sleep(0.05)
        assert client.core.counts.takeovers == before + 1


async def test_streams_survive_a_killed_worker_while_another_lives(tmp_path: Path):
    async with mesh(tmp_path, schedulers=1, workers=2) as (parts, client):
        references = await undisturbed(client, 6, 800)
        streams = [ask(client, f"r{seed}", 800, seed) for seed in range(6)]
        await reached(streams[0], 50)
        parts.signal("w0", signal.SIGKILL)
        await whole(streams, references)


async def test_streams_survive_the_only_worker_s_restart(tmp_path: Path):
    async with mesh(tmp_path, schedulers=1, workers=1) as (parts, client):
        references = await undisturbed(client, 4, 600)
        streams = [ask(client, f"r{seed}", 600, seed) for seed in range(4)]
        await reached(streams[0], 50)
        parts.signal("w0", signal.SIGKILL)
        parts.by_name["w0"].wait(10)
        parts.start_worker("w0")
        await whole(streams, references)


async def test_a_stopped_worker_is_fenced_and_its_late_results_are_refused(tmp_path: Path):
    async with mesh(tmp_path, schedulers=1, workers=2) as (parts, client):
        references = await undisturbed(client, 6, 1200)
        streams = [ask(client, f"r{seed}", 1200, seed) for seed in range(6)]
        await reached(streams[0], 50)
        parts.signal("w0", signal.SIGSTOP)
        async with asyncio.timeout(20):
            while not any(line.get("event") == "instance_lost" for line in parts.log("s0")):
                await asyncio.sleep(0.02)
        parts.signal("w0", signal.SIGCONT)
        await whole(streams, references)


async def test_streams_go_on_after_the_broker_was_down(tmp_path: Path):
    async with mesh(tmp_path, schedulers=2, workers=1) as (parts, client):
        references = await undisturbed(client, 4, 900)
        streams = [ask(client, f"r{seed}", 900, seed) for seed in range(4)]
        await reached(streams[0], 50)
        parts.nats.stop()
        await asyncio.sleep(4.0)  # the outage itself: longer than every lease but the clients'
        parts.nats.start()
        await whole(streams, references)
