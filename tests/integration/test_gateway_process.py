"""The gateway as its own process on a real NATS server: start, outage, stop."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shared.bus.nats import NatsBus
from tests.support.fake_backend import FakeBackend, Script
from tests.support.gateway_harness import Reply, read_reply
from tests.support.servers import RunningServer, nats_server
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.servers

SENTENCE = "Once upon a time there was a little mesh of services that liked to row together."


@dataclass
class Process:
    popen: subprocess.Popen[bytes]
    server: RunningServer
    backend: FakeBackend
    ids: list[int]
    port: int
    log: Path

    def says(self, **more: Any) -> None:
        script = Script(ids=[*self.ids, 2], **more)
        self.backend.script = lambda s: Script() if s.request_id.startswith("canary") else script

    async def request(self, method: str, path: str, body: Any = None) -> Reply:
        raw = b"" if body is None else json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        try:
            return await asyncio.wait_for(read_reply(reader), 30)
        finally:
            writer.close()

    async def stream(self) -> Reply:
        body = {"prompt": "hi", "max_tokens": 200, "stream": True}
        return await self.request("POST", "/v1/completions", body)

    async def until_ready(self) -> None:
        async with asyncio.timeout(20):
            while (await self.request("GET", "/ready")).status != 200:
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def gateway_process(folder: Path, **settings: Any) -> AsyncIterator[Process]:
    from services.gateway.tokenizer import load_card

    model = write_tiny_model(folder / "tiny-folder")
    ids = load_card(model, "m").tokenizer.encode(SENTENCE).ids
    ready, log = folder / "ready.json", folder / "gateway.log"
    with nats_server(folder) as server, log.open("wb") as out:
        url = f"nats://127.0.0.1:{server.port}"
        wanted = {
            "nats_url": url,
            "redis_url": "",
            "model": "m",
            "model_dir": model,
            "ready_file": ready,
            **settings,
        }
        env = {key: value for key, value in os.environ.items() if not key.startswith("HORTATOR_")}
        env |= {f"HORTATOR_{key.upper()}": str(value) for key, value in wanted.items()}
        command = [sys.executable, "-m", "services.gateway"]
        popen = await asyncio.to_thread(
            subprocess.Popen, command, env=env, stdout=out, stderr=subprocess.STDOUT
        )
        bus = await NatsBus.connect(url)
        try:
            async with asyncio.timeout(90):
                while not ready.exists():
                    assert popen.poll() is None, log.read_text()
                    await asyncio.sleep(0.02)
            port = int(json.loads(ready.read_text())["http"].rpartition(":")[2])
            async with FakeBackend(bus, "m") as backend:
                process = Process(popen, server, backend, ids, port, log)
                process.says()
                yield process
        finally:
            if popen.poll() is None:
                popen.kill()
                popen.wait()
            await bus.close()


async def test_it_serves_tells_its_state_and_stops_politely_in_mid_stream(tmp_path: Path) -> None:
    async with gateway_process(tmp_path) as process:
        await process.until_ready()
        assert (await process.stream()).text() == SENTENCE
        stats = await process.backend.bus._client.request(  # type: ignore[attr-defined]
            "$SRV.STATS.hortator-gateway", b"", timeout=5
        )
        (endpoint,) = json.loads(stats.data)["endpoints"]
        assert endpoint["data"]["state"] == "ready"
        process.backend.step_s = 0.01
        last = asyncio.create_task(process.stream())
        async with asyncio.timeout(10):
            while not any(len(s.done) > 2 for s in process.backend._seqs.values()):
                await asyncio.sleep(0.01)
        process.popen.send_signal(signal.SIGTERM)
        assert (await last).text() == SENTENCE
        assert await asyncio.to_thread(process.popen.wait, 20) == 0
        lines = [json.loads(line) for line in process.log.read_text().splitlines()]
        assert lines[-1]["event"] == "stopped"
        assert not [line for line in lines if line["level"] in ("error", "warning")]


async def test_a_stream_goes_on_after_the_broker_was_gone(tmp_path: Path) -> None:
    async with gateway_process(tmp_path) as process:
        await process.until_ready()
        process.backend.step_s = 0.02
        stream = asyncio.create_task(process.stream())
        async with asyncio.timeout(10):
            while not any(len(s.done) > 2 for s in process.backend._seqs.values()):
                await asyncio.sleep(0.01)
        process.server.stop()
        process.server.start()
        async with asyncio.timeout(10):
            while not process.backend.bus.connected:
                await asyncio.sleep(0.01)
        # What the backend said meanwhile is lost, and this one keeps no frames: a successor resumes.
        process.backend.take_over()
        process.says()
        assert (await stream).text() == SENTENCE


async def test_a_client_that_reads_late_gets_everything_in_order(tmp_path: Path) -> None:
    limits = {"max_model_len": 1_000_000, "max_unread_bytes": 64 << 20}
    async with gateway_process(tmp_path, **limits) as process:
        await process.until_ready()
        ids = list(range(5, 205))
        process.backend.script = lambda _: Script(ids=ids, per_frame=2000)
        wanted = {"prompt": "hi", "max_tokens": 60_000, "ignore_eos": True, "stream": True}
        body = json.dumps(wanted).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", process.port, limit=4096)
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(30):
            while not any(s.request_id.startswith("cmpl") for s in process.backend.submits):
                await asyncio.sleep(0.01)
            while process.backend.running:
                await asyncio.sleep(0.01)
        stream = await read_reply(reader)
        whole = await process.request("POST", "/v1/completions", {**wanted, "stream": False})
        assert stream.text() == whole.json["choices"][0]["text"]
        writer.close()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"model_dir": "/nonexistent"}, "there is no folder /nonexistent: set HORTATOR_MODEL_DIR"),
        ({"no_such_setting": "1"}, "HORTATOR_NO_SUCH_SETTING"),
        ({"api_key_file": "/nonexistent"}, "cannot be read"),
        ({"http": "nowhere"}, "HOST:PORT"),
    ],
)
async def test_it_says_what_is_wrong_with_its_settings_and_ends(
    tmp_path: Path, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        async with gateway_process(tmp_path, **settings):
            pass
