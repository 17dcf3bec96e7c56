"""What both buses do with a frame that arrives: decode, hand on, survive bad frames and failing handlers."""

import inspect
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from shared.bus.port import Handler
from shared.wire import BadFrame, Codec

log = structlog.get_logger()

LOG_EVERY_S = 10.0
_MAX_REMEMBERED = 1000


@dataclass
class Counters:
    """What went wrong on a bus, by kind: `bad_frame`, `handler_error`, `denied`, `slow_consumer`, `error`."""

    by_kind: Counter[str] = field(default_factory=Counter)
    _logged_at: dict[tuple[str, str], float] = field(default_factory=dict)

    def note(self, kind: str, subject: str, **details: Any) -> None:
        """Count, and log at most once per (kind, subject) in `LOG_EVERY_S`: a flood must not become two."""
        self.by_kind[kind] += 1
        now = time.monotonic()
        key = (kind, subject)
        if now - self._logged_at.get(key, -LOG_EVERY_S) < LOG_EVERY_S:
            return
        if len(self._logged_at) >= _MAX_REMEMBERED:
            self._logged_at.clear()
        self._logged_at[key] = now
        log.error(f"bus {kind}", subject=subject, total=self.by_kind[kind], **details)


Deliver = Callable[[str, bytes], Awaitable[None]]
DeliverNow = Callable[[str, bytes], None]


def is_plain(handler: Handler) -> bool:
    """Whether the handler runs to its end when called, so that nothing has to be awaited."""
    return not (
        inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "func", None))
    )


def intake_now(codec: Codec, handler: Handler, counters: Counters) -> DeliverNow:
    """`intake` for a plain handler: a function (subject, payload) that never raises."""
    decode = codec.decode

    def deliver(subject: str, payload: bytes) -> None:
        try:
            if handler(decode(payload)) is not None:
                raise TypeError(f"handler {handler!r} returned something to await: declare it `async def`")
        except BadFrame as error:
            counters.note("bad_frame", subject, reason=str(error))
        except Exception as error:
            counters.note("handler_error", subject, exc_info=error)

    return deliver


def intake(codec: Codec, handler: Handler, counters: Counters) -> Deliver:
    """A coroutine function (subject, payload) for coroutine handlers; raises nothing but CancelledError."""
    decode = codec.decode

    async def deliver(subject: str, payload: bytes) -> None:
        try:
            pending = handler(decode(payload))
            if pending is not None:
                await pending
        except BadFrame as error:
            counters.note("bad_frame", subject, reason=str(error))
        except Exception as error:
            counters.note("handler_error", subject, exc_info=error)

    return deliver
