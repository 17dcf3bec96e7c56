"""The client core on a bus: frames and ticks in, messages out, sinks called."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from shared.bus.port import Bus, BusDown, PayloadTooLarge, Subscription
from shared.client.core import ClientCore
from shared.client.effects import (
    Accepted,
    Close,
    Effect,
    Ended,
    Event,
    Open,
    Progress,
    Refused,
    Tick,
    Unsendable,
)
from shared.client.records import OpenRequest, OpenSeq
from shared.subjects import ACK, BEACON, CANCEL, SUBMIT, TOKENS, Address, subject_token
from shared.wire import Ack, Answer, Beacon, Cancel, EndRow, Submit, Tokens

log = structlog.get_logger()

TICK_S = 0.05
SEND_REST_S = 0.003
"""After a batch of messages the next waits so long: each write wakes the broker, the dearest part of it."""


class Sink(Protocol):
    """Receives one sequence. Called on the loop, in order; must be quick and must not raise."""

    def accepted(self, request: OpenRequest) -> None: ...

    def tokens(self, seq: OpenSeq, ids: Sequence[int]) -> None: ...

    def ended(self, seq: OpenSeq, end: EndRow) -> None: ...

    def refused(self, request: OpenRequest, answer: Answer) -> None: ...


class MeshClient:
    """Speaks for one client name about one model. `start` before use, `close` after."""

    def __init__(self, bus: Bus, client: str, model: str) -> None:
        self.core = ClientCore(client)
        self._bus = bus
        self._model = subject_token(model)
        self._tokens = TOKENS.at(client=client)
        self._to: dict[type, Address] = {
            Submit: SUBMIT.at(model=self._model),
            Cancel: CANCEL.at(model=self._model),
            Ack: ACK.at(client=client),
        }
        self._subscriptions: list[Subscription] = []
        self._outbox: deque[Submit | Cancel | Ack] = deque()
        self._sending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.now: Callable[[], float] = asyncio.get_running_loop().time
        """The clock of `progress_at`, of deadlines and of everything the core does."""
        self.progress_at = 0.0
        """Loop time of the last tokens: proof that the mesh works."""
        self.heard_leader_at = 0.0

    async def start(self) -> None:
        self._subscriptions = [
            await self._bus.subscribe(self._tokens, self._on_tokens),
            await self._bus.subscribe(BEACON.at(), self._on_beacon),
        ]
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._tick()), loop.create_task(self._send())]

    async def close(self) -> None:
        """Idempotent. Open sequences get no further calls; the scheduler ends them when the lease lapses."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._tasks, self._subscriptions = [], []

    def open(self, spec: Open) -> None:
        """`spec.sinks` are `Sink`s, one per choice; `accepted` and `refused` go to the first."""
        self._apply(spec)

    def cancel(self, request_id: str, choices: tuple[int, ...] = ()) -> None:
        """No further tokens are wanted; `ended` still comes."""
        self._apply(Close(request_id, choices))

    def _on_tokens(self, frame: Tokens) -> None:
        self._apply(frame)

    def _on_beacon(self, beacon: Beacon) -> None:
        if beacon.model == "" or subject_token(beacon.model) == self._model:
            self.heard_leader_at = self.now()
            self._apply(beacon)

    async def _tick(self) -> None:
        tick = Tick()
        while True:
            await asyncio.sleep(TICK_S)
            if self.core.is_busy:
                try:
                    self._apply(tick)
                except Exception as error:
                    # Without ticks nothing would ever be repeated or end.
                    log.error("tick failed", exc_info=error)

    def _apply(self, event: Event) -> None:
        now = self.now()
        for effect in self.core.handle(event, now):
            if type(effect) is Progress:
                self.progress_at = now
                for seq, ids in effect.rows:
                    try:
                        seq.sink.tokens(seq, ids)
                    except Exception as error:
                        self._broken(seq, error)
            else:
                try:
                    self._other(effect)
                except Exception as error:
                    log.error("sink failed", effect=type(effect).__name__, exc_info=error)

    def _broken(self, seq: OpenSeq, error: Exception) -> None:
        """A sink raised, which is a bug; the other sequences of the frame must not pay for it."""
        log.error("sink failed, cancelling its request", request=seq.request.id, exc_info=error)
        self.cancel(seq.request.id)

    def _other(self, effect: Effect) -> None:
        if isinstance(effect, Submit | Cancel | Ack):
            self._outbox.append(effect)
            self._sending.set()
        elif isinstance(effect, Ended):
            effect.seq.sink.ended(effect.seq, effect.end)
        elif isinstance(effect, Accepted):
            effect.request.spec.sinks[0].accepted(effect.request)
        elif isinstance(effect, Refused):
            effect.request.spec.sinks[0].refused(effect.request, effect.answer)

    async def _send(self) -> None:
        while True:
            await self._sending.wait()
            self._sending.clear()
            while self._outbox:
                await self._publish(self._outbox.popleft())
            await asyncio.sleep(SEND_REST_S)

    async def _publish(self, message: Submit | Cancel | Ack) -> None:
        to = self._to[type(message)]
        try:
            await self._bus.publish(to, message)
        except BusDown:
            # Everything the core sends is repeated until it is answered.
            self._outbox.clear()
        except PayloadTooLarge as error:
            if isinstance(message, Submit):
                self._apply(Unsendable(message.request_id, str(error)))
        except Exception as error:
            log.error("message could not be sent", kind=type(message).__name__, exc_info=error)
