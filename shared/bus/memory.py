"""The bus in memory: same behaviour as NATS core, for tests and simulated meshes in one event loop.

Frames are really encoded and decoded, so a message that would not survive the wire does not pass here either.
Delivery is asynchronous: a publish never runs a handler on its own stack.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shared.bus.intake import Counters, intake, intake_now, is_plain
from shared.bus.port import BusDown, Handler, NoAnswer, PayloadTooLarge, Responder
from shared.subjects import Address
from shared.wire import BadFrame, Codec, Wire, encode


def matches(pattern: str, subject: str) -> bool:
    """NATS matching of `*` (one token) and a final `>` (the rest)."""
    want, have = pattern.split("."), subject.split(".")
    for position, token in enumerate(want):
        if token == ">":
            return len(have) > position
        if position >= len(have) or token not in ("*", have[position]):
            return False
    return len(want) == len(have)


@dataclass(eq=False)
class MemorySubscription:
    """One interest in a pattern; frames wait in order until its task has handed them on."""

    broker: "MemoryBroker"
    bus: "MemoryBus"
    pattern: str
    queue: str
    deliver: Callable[[str, bytes, "_Reply | None"], Any]
    waiting: deque[tuple[str, bytes, "_Reply | None"]] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None

    async def unsubscribe(self) -> None:
        self.broker.subscriptions = [s for s in self.broker.subscriptions if s is not self]
        self.waiting.clear()

    def put(self, subject: str, payload: bytes, reply: "_Reply | None") -> None:
        self.waiting.append((subject, payload, reply))
        if self.task is None or self.task.done():
            self.task = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        while self.waiting:
            await self.deliver(*self.waiting.popleft())


@dataclass(eq=False)
class _Reply:
    """Where the answer to a request goes: its requester, while it waits."""

    requester: "MemoryBus"
    future: asyncio.Future[bytes]


class MemoryBroker:
    """What the NATS server is to `NatsBus`: connect several buses to one broker."""

    def __init__(self, max_payload: int = 1 << 20) -> None:
        self.max_payload = max_payload
        self.subscriptions: list[MemorySubscription] = []
        self.buses: list[MemoryBus] = []
        self._turn = 0

    def connect(self) -> "MemoryBus":
        bus = MemoryBus(self)
        self.buses.append(bus)
        return bus

    def stop(self) -> None:
        """The broker goes away: every bus is disconnected, frames under way are lost."""
        for bus in self.buses:
            bus.disconnect()

    def start(self) -> None:
        """The broker is back; subscriptions are as they were."""
        for bus in self.buses:
            bus.reconnect()

    def inject(self, subject: str, payload: bytes, reply: "_Reply | None" = None) -> int:
        """Raw bytes on a subject, as any program could send them. Returns how many subscriptions got them."""
        interested = [s for s in self.subscriptions if s.bus.connected and matches(s.pattern, subject)]
        groups: dict[tuple[str, str], list[MemorySubscription]] = {}
        chosen = []
        for subscription in interested:
            if subscription.queue:
                groups.setdefault((subscription.pattern, subscription.queue), []).append(subscription)
            else:
                chosen.append(subscription)
        for members in groups.values():
            self._turn += 1
            chosen.append(members[self._turn % len(members)])
        for subscription in chosen:
            subscription.put(subject, payload, reply)
        return len(chosen)

    async def settle(self) -> None:
        """Return once nothing is under way: every delivered frame has been handled, also those it caused."""
        while busy := [s.task for s in self.subscriptions if s.task is not None and not s.task.done()]:
            await asyncio.wait(busy)


class MemoryBus:
    """`Bus` on a `MemoryBroker`; `disconnect` and `reconnect` play the network."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._connected = True
        self._closed = False
        self._listeners: list[Callable[[bool], None]] = []
        self.counters = Counters()

    @property
    def connected(self) -> bool:
        return self._connected

    async def publish(self, to: Address, message: Wire) -> None:
        self._broker.inject(to.subject, self._outgoing(message))

    def publish_soon(self, to: Address, message: Wire) -> None:
        self._broker.inject(to.subject, self._outgoing(message))

    async def subscribe(self, to: Address, handler: Handler, *, queue: str = "") -> MemorySubscription:
        now = intake_now(to.codec, handler, self.counters) if is_plain(handler) else None
        later = intake(to.codec, handler, self.counters)

        async def deliver(subject: str, payload: bytes, _: _Reply | None) -> None:
            if now is not None:
                now(subject, payload)
            else:
                await later(subject, payload)

        return self._add(to.subject, queue, deliver)

    async def respond(self, to: Address, responder: Responder, *, queue: str = "") -> MemorySubscription:
        async def deliver(subject: str, payload: bytes, reply: _Reply | None) -> None:
            async def answer(request: Any) -> None:
                message = await responder(request)
                if message is not None and reply is not None:
                    self._answer(reply, self._outgoing(message))

            await intake(to.codec, answer, self.counters)(subject, payload)

        return self._add(to.subject, queue, deliver)

    async def request(self, to: Address, message: Wire, *, reply: Codec, timeout_s: float) -> Any:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if not self._broker.inject(to.subject, self._outgoing(message), _Reply(self, future)):
            raise NoAnswer(f"nobody answers on {to.subject}")
        try:
            payload = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise NoAnswer(f"no answer on {to.subject} within {timeout_s} s") from None
        try:
            return reply.decode(payload)
        except BadFrame as error:
            self.counters.note("bad_frame", to.subject, reason=str(error))
            raise NoAnswer(f"the answer on {to.subject} is {error}") from None

    def on_state(self, listener: Callable[[bool], None]) -> None:
        self._listeners.append(listener)

    async def close(self) -> None:
        self._closed = True
        self._connected = False
        self._broker.buses = [bus for bus in self._broker.buses if bus is not self]
        mine = [s for s in self._broker.subscriptions if s.bus is self]
        for subscription in mine:
            await subscription.unsubscribe()

    def disconnect(self) -> None:
        """As if the connection broke: frames not yet handled are lost, subscriptions are kept for later."""
        if self._connected:
            self._connected = False
            for subscription in self._broker.subscriptions:
                if subscription.bus is self:
                    subscription.waiting.clear()
            self._tell()

    def reconnect(self) -> None:
        if not self._connected and not self._closed:
            self._connected = True
            self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener(self._connected)

    def _outgoing(self, message: Wire) -> bytes:
        if not self._connected:
            raise BusDown("disconnected from the broker")
        payload = encode(message)
        if len(payload) > self._broker.max_payload:
            raise PayloadTooLarge(len(payload), self._broker.max_payload)
        return payload

    @staticmethod
    def _answer(reply: _Reply, payload: bytes) -> None:
        if reply.requester.connected and not reply.future.done():
            reply.future.set_result(payload)

    def _add(self, pattern: str, queue: str, deliver: Any) -> MemorySubscription:
        subscription = MemorySubscription(self._broker, self, pattern, queue, deliver)
        self._broker.subscriptions.append(subscription)
        return subscription
