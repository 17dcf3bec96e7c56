"""Health and metrics of a service as a bare ASGI app, and the uvicorn server that carries it.

A service with an HTTP interface of its own (the gateway) puts its app in front; until then, and in every
other service, `ops_app` answers.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from shared.runtime.http_limits import LimitedHttpProtocol

App = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass
class Health:
    """Liveness as `/health` tells it: 200 while `ok`, else 503; `detail` is shown as it is."""

    service: str
    instance: str
    ok: bool = True
    detail: dict[str, Any] = field(default_factory=dict)

    def body(self) -> bytes:
        return orjson.dumps(
            {"ok": self.ok, "service": self.service, "instance": self.instance, **self.detail}, default=str
        )


def ops_app(health: Health, registry: CollectorRegistry) -> App:
    """GET /health and GET /metrics; anything else is 404."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/health":
            status, kind, body = 200 if health.ok else 503, b"application/json", health.body()
        elif scope["path"] == "/metrics":
            status, kind, body = 200, CONTENT_TYPE_LATEST.encode(), generate_latest(registry)
        else:
            status, kind, body = 404, b"application/json", b'{"error":"only /health and /metrics are here"}'
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return app


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the service decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """`app` on HOST:PORT, port 0 for any free one. `start` returns once it listens."""

    def __init__(self, app: App, address: str, *, grace_s: int = 5) -> None:
        self._socket = _listen(address)
        config = uvicorn.Config(
            app,
            loop="none",
            http=LimitedHttpProtocol,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=2048,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=grace_s,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.002)
        if self._task.done():
            self._task.result()
            raise OSError(f"the HTTP server on {self.address} ended while starting")

    async def stop(self) -> None:
        """Accept nothing new, let open answers end within the grace time, close. Idempotent."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None


def _listen(address: str) -> socket.socket:
    """A bound socket. Raises OSError naming the address, ValueError when it is not HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"http={address!r} is not HOST:PORT, e.g. 127.0.0.1:8000")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, int(port)))
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"cannot listen on {address}: {error.strerror}; choose another HTTP port"
        ) from None
    listener.setblocking(False)
    return listener
