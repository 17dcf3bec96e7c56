"""What services need of the message bus. Two implementations: `memory` (tests, simulation) and `nats`."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from shared.subjects import Address
from shared.wire import Wire

Handler = Callable[[Any], Awaitable[None] | None]
"""Gets one decoded message. A plain function runs at once, on the path that reads the socket: it returns None
and is short. A coroutine function is awaited, one message at a time for each subscription."""

Responder = Callable[[Any], Awaitable[Wire | None]]
"""Gets one decoded request and returns its answer; None: no answer is sent."""


class BusDown(ConnectionError):
    """Nothing was sent: there is no connection now. Frames are never buffered for later (design §4.6)."""


class NoAnswer(TimeoutError):
    """A request had no responder, or none in time."""


class Subscription(Protocol):
    async def unsubscribe(self) -> None: ...


class Bus(Protocol):
    """At-most-once, ordered per publisher and subject. Undecodable frames are dropped and counted."""

    @property
    def connected(self) -> bool: ...

    async def publish(self, to: Address, message: Wire) -> None:
        """Raises `BusDown` while disconnected and `PayloadTooLarge` above the server's limit."""

    def publish_soon(self, to: Address, message: Wire) -> None:
        """`publish` for plain handlers; raises the same.

        Both gather what is sent in one turn of the loop into one write. This one lacks the pause that
        `publish` takes when the broker reads too slowly, so it is not for bulk.
        """

    async def subscribe(self, to: Address, handler: Handler, *, queue: str = "") -> Subscription: ...

    async def respond(self, to: Address, responder: Responder, *, queue: str = "") -> Subscription: ...

    async def request(self, to: Address, message: Wire, *, reply: Any, timeout_s: float) -> Any:
        """`reply` is the Subject's `reply_codec`. Raises `BusDown` or `NoAnswer`."""

    def on_state(self, listener: Callable[[bool], None]) -> None:
        """`listener(connected)` at each change; the broker came or went."""

    async def close(self) -> None:
        """Flush what was accepted, then disconnect."""


class PayloadTooLarge(ValueError):
    """A frame above the broker's limit (1 MiB by default); `size` and `limit` in bytes."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"frame of {size} bytes is above the broker's limit of {limit}")
        self.size = size
        self.limit = limit
