"""A mock worker as its own process on a real NATS server, from its first beat to its goodbye."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shared.bus.nats import NatsBus
from shared.wire import Admit, Beat, Goodbye, Ready, Sampling, Work
from tests.support.fake_scheduler import FakeScheduler
from tests.support.servers import RunningServer, nats_server

pytestmark = pytest.mark.servers


@dataclass
class Process:
    popen: subprocess.Popen[bytes]
    server: RunningServer
    bus: NatsBus
    ready: Path
    log: Path

    async def up(self) -> FakeScheduler:
        """A scheduler that has heard the worker's first beat."""
        scheduler = FakeScheduler(self.bus, "w0", in_flight=3)
        await scheduler.connect()
        try:
            await scheduler.hear(Beat, timeout_s=20)
        except TimeoutError:
            pytest.fail(f"no beat; the worker said:\n{self.log.read_text()}")
        return scheduler

    def get(self, path: str) -> str:
        address = json.loads(self.ready.read_text())["http"]
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.popen.send_signal(how)
        return self.popen.wait(20)


@contextlib.asynccontextmanager
async def worker_process(folder: Path, **settings: Any) -> AsyncIterator[Process]:
    ready, log = folder / "ready.json", folder / "worker.log"
    with nats_server(folder) as server, log.open("wb") as out:
        url = f"nats://127.0.0.1:{server.port}"
        wanted = {
            "nats_url": url,
            "redis_url": "",
            "instance": "w0",
            "model": "m",
            "ready_file": ready,
            **settings,
        }
        env = {key: value for key, value in os.environ.items() if not key.startswith("HORTATOR_")}
        env |= {f"HORTATOR_{key.upper()}": str(value) for key, value in wanted.items()}
        # A mock must run on a machine without torch.
        code = "import sys; sys.modules['torch'] = None; from services.worker.__main__ import main; main()"
        command = [sys.executable, "-c", code]
        popen = await asyncio.to_thread(
            subprocess.Popen, command, env=env, stdout=out, stderr=subprocess.STDOUT
        )
        bus = await NatsBus.connect(url)
        try:
            yield Process(popen, server, bus, ready, log)
        finally:
            await bus.close()
            if popen.poll() is None:
                popen.kill()
                popen.wait()


async def test_a_mock_worker_serves_over_nats_without_torch_and_leaves_politely(tmp_path: Path) -> None:
    async with worker_process(tmp_path, mock=1) as process:
        scheduler = await process.up()
        how = [Sampling(max_tokens=20, seed=seed) for seed in range(8)]
        prompts = [list(range(1000, 1000 + 40 * n)) for n in range(1, 9)]
        sequences = await scheduler.generate(prompts, how)
        assert all(len(sequence.tokens) == 20 for sequence in sequences)

        metrics = process.get("/metrics")
        assert 'hortator_worker_tokens_total{kind="prefill"} 1440.0' in metrics
        assert json.loads(process.get("/health"))["ok"]

        answer = await process.bus._client.request("$SRV.STATS.hortator-worker", b"", timeout=5)
        (endpoint,) = json.loads(answer.data)["endpoints"]
        assert endpoint["data"]["instance"] == "w0"
        assert endpoint["data"]["fingerprint"] == "mock-49152"

        code = await asyncio.to_thread(process.end)
        await scheduler.hear(Goodbye)
        assert code == 0


async def test_a_mock_takes_vocabulary_and_context_from_the_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 777, "max_position_embeddings": 123}')
    async with worker_process(tmp_path, mock=1, model_dir=tmp_path) as process:
        scheduler = await process.up()
        beat = await scheduler.hear(Beat)
        assert (beat.info.vocab_size, beat.info.max_len, beat.info.max_slots) == (777, 123, 512)


async def test_a_worker_without_a_model_says_what_to_set_and_exits(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as process:
        assert await asyncio.to_thread(process.popen.wait, 20) == 1
        assert "name a model folder, or set HORTATOR_MOCK=1" in process.log.read_text()


async def test_a_session_outlives_a_restart_of_the_broker(tmp_path: Path) -> None:
    async with worker_process(tmp_path, mock=1) as process:
        scheduler = await process.up()
        await scheduler.claim()
        ids = list(range(1000, 1020))
        admit = Admit(0, 0, 20, ids, 0, [0, 1, 2], Sampling(max_tokens=20))
        first = await scheduler.step(admit=[admit], work=[Work(0, 20)])
        await asyncio.to_thread(process.server.stop)
        await asyncio.to_thread(process.server.start)
        scheduler.heard.clear()
        beat = await scheduler.hear(Beat, timeout_s=20)
        assert (beat.incarnation, beat.done_seq) == (first.incarnation, first.seq)
        # Blocks and slots are where they were, and the last result can still be had.
        assert (await scheduler.step()).slots == [0]
        scheduler.done.clear()
        await scheduler.send(scheduler.sent[0])
        assert await scheduler.result(1) == first


async def test_a_restarted_worker_has_a_higher_incarnation_than_any_before(tmp_path: Path) -> None:
    async with worker_process(tmp_path, mock=1) as process:
        scheduler = await process.up()
        former = (await scheduler.claim()).incarnation
    async with worker_process(tmp_path, mock=1) as process:
        scheduler = await process.up()
        beat = await scheduler.hear(Beat)
        assert beat.incarnation > former
        assert (await scheduler.ask("ready", Ready())).incarnation == beat.incarnation
