"""Writes are few, in order, and survive a client that does not read for a while."""

import asyncio
from typing import Any

from services.gateway.errors import ApiError
from services.gateway.outlet import Flusher, Outlet


class Client:
    """An ASGI `send` that can be full; remembers what it was given."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.writable = asyncio.Event()
        self.writable.set()

    async def send(self, message: dict[str, Any]) -> None:
        if not self.writable.is_set():
            await self.writable.wait()
        self.messages.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages if message["type"] == "http.response.body"]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
    await asyncio.sleep(0.03)


def outlet_to(client: Client, limit: int = 1000) -> Outlet:
    return Outlet(client.send, Flusher(), [(b"x-request-id", b"1")], limit)


async def test_everything_of_one_turn_of_the_loop_is_one_write() -> None:
    client = Client()
    outlet = outlet_to(client)
    for part in (b"a", b"b", b"c"):
        outlet.parts.append(part)
        outlet.mark()
    await settle()
    assert client.bodies == [b"abc"]
    assert client.messages[0]["status"] == 200
    outlet.parts.append(b"d")
    outlet.finish()
    await settle()
    assert client.messages[-1] == {"type": "http.response.body", "body": b"d", "more_body": False}
    assert outlet.closed


async def test_an_error_chooses_the_status_as_long_as_nothing_was_sent() -> None:
    client = Client()
    outlet_to(client).refuse(ApiError(429, "full", code="queue_full", retry_after_s=1.2))
    start = client.messages[0]
    assert start["status"] == 429
    assert (b"retry-after", b"2") in start["headers"]
    assert (b"x-request-id", b"1") in start["headers"]


async def test_a_full_transport_delays_but_loses_and_reorders_nothing() -> None:
    client = Client()
    outlet = outlet_to(client)
    outlet.parts.append(b"a")
    outlet.mark()
    await settle()
    client.writable.clear()
    for part in (b"b", b"c", b"d"):
        outlet.parts.append(part)
        outlet.mark()
        await settle()
    outlet.parts.append(b"e")
    outlet.finish()
    await settle()
    assert client.bodies == [b"a"]
    client.writable.set()
    await settle()
    assert b"".join(client.bodies) == b"abcde"
    assert client.messages[-1]["more_body"] is False


async def test_a_client_that_leaves_too_much_unread_is_told_of_once() -> None:
    client = Client()
    outlet = outlet_to(client, limit=10)
    overflows: list[int] = []
    outlet.on_overflow(lambda: overflows.append(1))
    client.writable.clear()
    for _ in range(5):
        outlet.parts.append(b"123456")
        outlet.mark()
        await settle()
    assert overflows == [1]
    assert outlet.closed
    client.writable.set()
    await settle()


async def test_nothing_is_sent_after_close() -> None:
    client = Client()
    outlet = outlet_to(client)
    outlet.parts.append(b"a")
    outlet.mark()
    outlet.close()
    await settle()
    assert client.messages == []
