"""The bus on a NATS server. The only module of the project that knows nats-py.

What the options are for (each checked by experiment): short pings so that a dead broker is noticed in
about 5 s; no client-side buffer, because a frame flushed after a reconnect is a stale frame; unlimited
reconnects, and therefore a time-out of our own for the first connect, where a wrong password would otherwise
hang for ever; an inbox prefix per user, because a permission for `_INBOX.>` would let one service read
another's answers.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import nats.errors
import nats.micro
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription

from shared.bus.fast_client import FastClient
from shared.bus.intake import Counters, DeliverNow, intake, intake_now, is_plain
from shared.bus.port import BusDown, Handler, NoAnswer, PayloadTooLarge, Responder
from shared.subjects import Address, service_status
from shared.wire import BadFrame, Codec, Wire, encode

log = structlog.get_logger()

PING_INTERVAL_S = 2
MAX_OUTSTANDING_PINGS = 2
RECONNECT_WAIT_S = 0.25
FLUSH_TIMEOUT_S = 2

_DISCONNECTED = (
    nats.errors.OutboundBufferLimitError,
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionDrainingError,
    nats.errors.ConnectionReconnectingError,
)


class NatsSubscription:
    def __init__(self, client: FastClient, inner: ClientSubscription) -> None:
        self._client = client
        self._inner = inner

    async def unsubscribe(self) -> None:
        """Idempotent; frames not yet handed on are discarded."""
        self._client.direct.pop(self._inner._id, None)
        with suppress(nats.errors.Error):
            await self._inner.unsubscribe()


class NatsBus:
    """`Bus` on one NATS connection. Make it with `NatsBus.connect`."""

    def __init__(self) -> None:
        self._client = FastClient()
        self._listeners: list[Callable[[bool], None]] = []
        self._reasons: dict[str, None] = {}
        self._closing = False
        self._background: asyncio.Future[None] | None = None
        self.counters = Counters()
        self.lost = asyncio.Event()
        """Set when the connection ended for good (the broker refused us): only a new process helps."""

    @classmethod
    async def connect(
        cls, url: str, *, name: str = "", user: str = "", password: str = "", timeout_s: float = 10.0
    ) -> "NatsBus":
        """Raises `BusDown` when there is no session within `timeout_s`, naming the reasons; ValueError for
        another scheme than nats or tls."""
        if not url.startswith(("nats://", "tls://")):
            raise ValueError(f"nats_url={url!r} must begin with nats:// or tls://")
        bus = cls()
        options: dict[str, Any] = {"user": user, "password": password} if user else {}
        if user:
            options["inbox_prefix"] = f"_INBOX.{user}".encode()
        attempt = bus._client.connect(
            url,
            name=name or None,
            error_cb=bus._on_error,
            disconnected_cb=bus._on_disconnected,
            reconnected_cb=bus._on_reconnected,
            closed_cb=bus._on_closed,
            connect_timeout=2,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=MAX_OUTSTANDING_PINGS,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]
            max_reconnect_attempts=-1,
            pending_size=0,
            **options,
        )
        connecting = asyncio.ensure_future(attempt)
        refused = asyncio.ensure_future(bus.lost.wait())
        await asyncio.wait({connecting, refused}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        refused.cancel()
        if not connecting.done() or connecting.exception() is not None:
            connecting.cancel()
            await asyncio.wait({connecting})
            await bus._give_up()
            reasons = "; ".join(bus._reasons) or "no answer"
            hint = "check HORTATOR_NATS_URL, _USER and _PASSWORD, and that nats-server runs there"
            raise BusDown(
                f"no session with NATS at {url} (waited {timeout_s} s at most): {reasons}; {hint}"
            ) from None
        bus._reasons.clear()
        return bus

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    async def publish(self, to: Address, message: Wire) -> None:
        await self._send(to.subject, encode(message))

    def publish_soon(self, to: Address, message: Wire) -> None:
        if not self._client.is_connected:
            raise BusDown("disconnected from NATS")
        payload = encode(message)
        if len(payload) > self._client.max_payload:
            raise PayloadTooLarge(len(payload), self._client.max_payload)
        self._client.publish_soon(to.subject, payload)

    async def subscribe(self, to: Address, handler: Handler, *, queue: str = "") -> NatsSubscription:
        if is_plain(handler):
            return await self._subscribe(
                to.subject, queue, _unused, intake_now(to.codec, handler, self.counters)
            )
        deliver = intake(to.codec, handler, self.counters)

        async def on_message(message: Msg) -> None:
            await deliver(message.subject, message.data)

        return await self._subscribe(to.subject, queue, on_message)

    async def respond(self, to: Address, responder: Responder, *, queue: str = "") -> NatsSubscription:
        async def on_message(message: Msg) -> None:
            async def answer(request: Any) -> None:
                answered = await responder(request)
                if answered is not None and message.reply:
                    await self._send(message.reply, encode(answered))

            await intake(to.codec, answer, self.counters)(message.subject, message.data)

        return await self._subscribe(to.subject, queue, on_message)

    async def request(self, to: Address, message: Wire, *, reply: Codec, timeout_s: float) -> Any:
        payload = encode(message)
        try:
            answer = await self._client.request(to.subject, payload, timeout=timeout_s)
            return reply.decode(answer.data)
        except nats.errors.NoRespondersError:
            raise NoAnswer(f"nobody answers on {to.subject}") from None
        except _DISCONNECTED:
            raise BusDown("disconnected from NATS") from None
        except nats.errors.MaxPayloadError:
            raise PayloadTooLarge(len(payload), self._client.max_payload) from None
        except TimeoutError:
            raise NoAnswer(f"no answer on {to.subject} within {timeout_s} s") from None
        except BadFrame as error:
            self.counters.note("bad_frame", to.subject, reason=str(error))
            raise NoAnswer(f"the answer on {to.subject} is {error}") from None

    def on_state(self, listener: Callable[[bool], None]) -> None:
        self._listeners.append(listener)

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._client.is_connected:
            with suppress(Exception):
                await self._client.flush(timeout=FLUSH_TIMEOUT_S)
        try:
            await asyncio.wait_for(self._client.close(), FLUSH_TIMEOUT_S)
        except (TimeoutError, RuntimeError, OSError):
            # The broker hangs and never reads the rest, or it is gone and uvloop refuses the closed socket.
            self._client.abort()

    async def announce(
        self, service: str, instance: str, version: str, stats: Callable[[], dict[str, Any]]
    ) -> nats.micro.Service:
        """Answer `$SRV.PING/INFO/STATS`; `stats()` appears as `endpoints[0].data`. Stop it with `.stop()`.

        The convention carries data per endpoint only, hence the endpoint `status`; it answers the same JSON.
        """

        def data(_: Any = None) -> dict[str, Any]:
            try:
                return stats()
            except Exception as error:
                self.counters.note("handler_error", "$SRV.STATS", exc_info=error)
                return {"error": str(error)}

        async def status(request: nats.micro.request.Request) -> None:
            await request.respond(json.dumps(data(), default=str).encode())

        announced = await nats.micro.add_service(
            self._client,
            name=service,
            version=version,
            metadata={"instance": instance},
            stats_handler=data,
        )
        await announced.add_endpoint(name="status", subject=service_status(service, instance), handler=status)
        return announced

    async def _send(self, subject: str, payload: bytes) -> None:
        try:
            await self._client.publish(subject, payload)
        except _DISCONNECTED:
            raise BusDown("disconnected from NATS") from None
        except nats.errors.MaxPayloadError:
            raise PayloadTooLarge(len(payload), self._client.max_payload) from None

    async def _subscribe(
        self, subject: str, queue: str, callback: Any, direct: DeliverNow | None = None
    ) -> NatsSubscription:
        try:
            inner = await self._client.subscribe(subject, queue, cb=callback)
        except _DISCONNECTED:
            raise BusDown("the connection to NATS is closed") from None
        if direct is not None:
            # Nothing was awaited since the client sent SUB, so no message can have come yet.
            self._client.direct[inner._id] = direct
        if self._client.is_connected:
            # A round trip, so that the broker knows of it (or has denied it, loudly) when we return.
            # Twice, because the client writes a PING before the commands that wait in its buffer.
            with suppress(TimeoutError, nats.errors.Error):
                await self._client.flush(timeout=FLUSH_TIMEOUT_S)
                await self._client.flush(timeout=FLUSH_TIMEOUT_S)
        return NatsSubscription(self._client, inner)

    async def _on_error(self, error: Exception) -> None:
        # Wrong credentials and denied subjects arrive only here; the call itself succeeds.
        text = str(error)
        if "permissions violation" in text.lower():
            self.counters.note("denied", text)
        elif isinstance(error, nats.errors.SlowConsumerError):
            self.counters.note("slow_consumer", error.subject)
        elif not self._closing:
            if not self._client.is_connected and (leftover := self._client._transport) is not None:
                # A failed attempt: the client forgets its socket when it makes the next one.
                leftover.close()
            if len(self._reasons) < 5:
                self._reasons[f"{type(error).__name__} {text}"] = None
            self.counters.note("error", type(error).__name__, error=text)
            if "authorization violation" in text.lower():
                # The client would ask for ever; other credentials need another process.
                self.lost.set()
                self._background = asyncio.ensure_future(self._give_up())

    async def _give_up(self) -> None:
        was_closing, self._closing = self._closing, True
        with suppress(Exception):
            await self._client.close()
        if not was_closing:
            log.error("the session with NATS has ended for good", reasons=list(self._reasons))
            self._tell(False)
            self.lost.set()

    async def _on_disconnected(self) -> None:
        # What was accepted but not written must not be flushed after the reconnect: it is stale by then.
        self._client._pending.clear()
        self._client._pending_data_size = 0
        if not self._closing:
            log.warning("disconnected from NATS")
            self._tell(False)

    async def _on_reconnected(self) -> None:
        log.info("connected to NATS again")
        self._tell(True)

    async def _on_closed(self) -> None:
        # Not by us: the client gives up on errors it cannot recover from.
        if not self._closing:
            await self._give_up()

    def _tell(self, connected: bool) -> None:
        for listener in self._listeners:
            listener(connected)


async def _unused(message: Msg) -> None:
    """The client wants a callback also for subscriptions whose messages never reach its queue."""
