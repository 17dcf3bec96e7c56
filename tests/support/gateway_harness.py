"""A whole gateway on a free port, in front of a fake backend on the memory bus; and a small HTTP client."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from services.gateway.app import build
from services.gateway.auth import Keys
from services.gateway.gateway import Gateway
from services.gateway.settings import GatewaySettings
from services.gateway.tokenizer import ModelCard, load_card
from shared.bus.memory import MemoryBroker
from shared.client import MeshClient
from shared.runtime.http import Health, HttpServer, ops_app
from shared.wire import Submit
from tests.support.fake_backend import FakeBackend, Script

MODEL = "tiny-model"


@dataclass(frozen=True)
class Reply:
    """A complete HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; fails unless the envelope is OpenAI's."""
        body = self.json
        assert set(body) == {"error"}, body
        error = body["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["type"], str)
        assert error["code"] is None or isinstance(error["code"], str)
        assert error["param"] is None or isinstance(error["param"], str)
        return error

    @property
    def events(self) -> list[Any]:
        """Every `data:` of a stream, decoded; "[DONE]" stays as it is. Comments are left out."""
        blocks = [b for b in self.body.decode().split("\n\n") if b and not b.startswith(":")]
        assert all(b.startswith("data: ") for b in blocks), blocks
        return [b[6:] if b == "data: [DONE]" else json.loads(b[6:]) for b in blocks]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events of a stream that ended well."""
        events = self.events
        assert events[-1] == "[DONE]", events[-1]
        assert events.count("[DONE]") == 1
        return events[:-1]

    def text(self, index: int = 0) -> str:
        """What one choice of a stream says in all."""
        parts = []
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                if choice["index"] == index:
                    parts.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
        return "".join(parts)


@dataclass
class Harness:
    gateway: Gateway
    backend: FakeBackend
    card: ModelCard
    host: str
    port: int
    broker: MemoryBroker

    def script(self, make: Script | Callable[[Submit], Script]) -> None:
        """What the backend does from now on; canaries always get an answer."""
        chosen = (lambda _: make) if isinstance(make, Script) else make
        canary = Script(ids=(5,))
        self.backend.script = lambda s: canary if s.request_id.startswith("canary") else chosen(s)

    def says(self, text: str, **more: Any) -> list[int]:
        """The backend answers with this text, then end of sequence. Returns its ids, the end not included."""
        ids = self.card.tokenizer.encode(text).ids
        self.script(Script(ids=[*ids, self.card.eos_ids[0]], **more))
        return ids

    @property
    def submits(self) -> list[Submit]:
        return [s for s in self.backend.submits if not s.request_id.startswith("canary")]

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.request("GET", path, None, headers)

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        """`body`: bytes as they are, anything else as JSON. Header names with `_` for `-`."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, raw, {"content_type": "application/json", **headers})

    async def completion(self, **fields: Any) -> Reply:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": "hi", **fields})

    async def chat(self, content: Any = "hi", **fields: Any) -> Reply:
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})

    async def request(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Reply:
        lines = [f"{method} {path} HTTP/1.1", "host: test", "connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        if body is not None:
            lines.append(f"content-length: {len(body)}")
        return await self.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b""))

    async def raw(self, request: bytes) -> Reply:
        """Send these bytes, read until the server closes."""
        reader, writer = await self.connect()
        try:
            writer.write(request)
            return await read_reply(reader)
        finally:
            writer.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    async def until(self, condition: Callable[[], bool], within_s: float = 5.0) -> None:
        """Wait for `condition`; fails when it does not hold in time."""
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.005)


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split()[1])
    headers = {}
    for line in head[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding") == "chunked":
        parts = []
        while size := int((await reader.readline()).strip() or b"0", 16):
            parts.append((await reader.readexactly(size + 2))[:-2])
        await reader.readline()
        return Reply(status, headers, b"".join(parts))
    return Reply(status, headers, await reader.readexactly(int(headers.get("content-length", 0))))


@asynccontextmanager
async def gateway_on(
    folder: Path, keys: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[Harness]:
    """A running gateway for the model in `folder`. `settings` override GatewaySettings."""
    chosen = replace(GatewaySettings(model=MODEL, model_dir=folder, instance="g0"), **settings)
    card = load_card(folder, MODEL, ("tiny",), chosen.max_model_len)
    broker = MemoryBroker()
    registry = CollectorRegistry()
    gateway = Gateway(chosen, card, MeshClient(broker.connect(), "g0-life1", MODEL), registry)
    front = build(gateway, Keys(keys or {}), ops_app(Health("gateway", "g0"), registry))
    server = HttpServer(front, "127.0.0.1:0")
    async with FakeBackend(broker.connect(), MODEL) as backend:
        await gateway.start()
        await server.start()
        host, _, port = server.address.rpartition(":")
        harness = Harness(gateway, backend, card, host, int(port), broker)
        harness.script(Script())
        try:
            yield harness
        finally:
            await gateway.stop(0.0)
            await server.stop()
