"""Health and metrics over real HTTP on a free port."""

import asyncio
import json
import socket

import pytest
from prometheus_client import CollectorRegistry, Counter

from shared.runtime.http import Health, HttpServer, ops_app


async def get(address: str, path: str, method: str = "GET") -> tuple[int, bytes]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), body


async def test_health_tells_the_state_and_turns_503_when_it_is_bad() -> None:
    health = Health("kvstore", "k0")
    server = HttpServer(ops_app(health, CollectorRegistry()), "127.0.0.1:0")
    await server.start()
    try:
        assert await get(server.address, "/health") == (
            200,
            b'{"ok":true,"service":"kvstore","instance":"k0"}',
        )
        health.ok, health.detail = False, {"state": "stopping"}
        status, body = await get(server.address, "/health")
        assert (status, json.loads(body)["state"]) == (503, "stopping")
        assert await get(server.address, "/health", "HEAD") == (503, b"")
    finally:
        await server.stop()
    await server.stop()


async def test_metrics_are_in_prometheus_text_and_other_paths_are_404() -> None:
    registry = CollectorRegistry()
    Counter("frames", "Frames", registry=registry).inc(3)
    server = HttpServer(ops_app(Health("s", "i"), registry), "127.0.0.1:0")
    await server.start()
    try:
        status, body = await get(server.address, "/metrics")
        assert status == 200
        assert b"frames_total 3.0" in body
        assert (await get(server.address, "/other"))[0] == 404
    finally:
        await server.stop()


def test_a_taken_port_or_a_malformed_address_is_refused_by_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=address):
            HttpServer(ops_app(Health("s", "i"), CollectorRegistry()), address)
    for wrong in ("8000", "localhost", "localhost:x"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            HttpServer(ops_app(Health("s", "i"), CollectorRegistry()), wrong)
