"""Bytes of a response on their way to ASGI: many events, few writes.

A stream appends to its outlet's `parts` and marks it; the flusher then writes each marked outlet once, after
every frame that has arrived was handled. `send` is driven by hand: as long as the client reads, it finishes
at once, and a task per write would cost more than the write.
"""

import asyncio
from collections.abc import Callable
from time import thread_time
from typing import Any

import structlog

from services.gateway.drive import finish, start
from services.gateway.errors import ApiError

log = structlog.get_logger()

Send = Callable[[Any], Any]
Headers = list[tuple[bytes, bytes]]

SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PING = b": ping\n\n"
REST_SHARE = 8.0
"""After a pass that took t of processor time, the next begins t times this later, so that under load a write
carries more events."""
LONGEST_REST_S = 0.015


class Flusher:
    """Writes marked outlets, once each, soon. One per event loop."""

    __slots__ = ("_loop", "_marked", "_not_before", "_scheduled", "passes", "writes")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._marked: list[Outlet] = []
        self._scheduled = False
        self._not_before = 0.0
        self.passes = 0
        self.writes = 0

    def mark(self, outlet: "Outlet") -> None:
        self._marked.append(outlet)
        if not self._scheduled:
            self._scheduled = True
            if self._loop.time() >= self._not_before:
                self._loop.call_soon(self._flush)
            else:
                self._loop.call_at(self._not_before, self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        marked, self._marked = self._marked, []
        began = thread_time()
        now = self._loop.time()
        for outlet in marked:
            outlet.flush(now)
        took = thread_time() - began
        self._not_before = self._loop.time() + min(LONGEST_REST_S, took * REST_SHARE)
        self.passes += 1
        self.writes += len(marked)


class Outlet:
    """One HTTP response. Nothing is sent before the first flush, so an error can still choose the status."""

    __slots__ = (
        "_backlog",
        "_blocked",
        "_flusher",
        "_headers",
        "_limit",
        "_on_overflow",
        "_send",
        "_start",
        "_task",
        "_waiting",
        "closed",
        "finished",
        "marked",
        "parts",
        "started",
        "written_at",
    )

    def __init__(self, send: Send, flusher: Flusher, headers: Headers, limit: int) -> None:
        self._send = send
        self._flusher = flusher
        self._headers = headers
        self._limit = limit
        self._start: tuple[int, Headers] = (200, [*SSE_HEADERS, *headers])
        self._backlog: list[bytes] = []
        """Parts that wait for the client to read."""
        self._waiting = 0
        self._blocked = False
        self._task: asyncio.Task[None] | None = None
        self._on_overflow: Callable[[], None] | None = None
        self.parts: list[bytes] = []
        """What the next flush writes."""
        self.marked = False
        self.started = False
        self.finished = False
        """The last part is in `parts`."""
        self.closed = False
        """Nothing can be sent any more."""
        self.written_at = 0.0
        """Loop time of the last write."""

    def on_overflow(self, call: Callable[[], None]) -> None:
        """`call` once when the client leaves more than the limit unread."""
        self._on_overflow = call

    def mark(self) -> None:
        """Have `parts` written soon. Callers in a hurry check `marked` first."""
        if not self.marked:
            self.marked = True
            self._flusher.mark(self)

    def finish(self) -> None:
        self.finished = True
        self.mark()

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole response at once; only before the first flush."""
        length = (b"content-length", str(len(body)).encode())
        self._start = (status, [*headers, length, *self._headers])
        self.parts.clear()
        self.parts.append(body)
        self.finished = True
        self.flush(0.0)

    def refuse(self, error: ApiError) -> None:
        self.respond(error.status, error.headers(), error.body())

    def flush(self, now: float) -> None:
        self.marked = False
        if self.closed:
            self.parts.clear()
            return
        if not self.started and not self._blocked:
            self.started = True
            status, headers = self._start
            self._drive({"type": "http.response.start", "status": status, "headers": headers})
        if self._blocked:
            self._hold_back()
            return
        body = b"".join(self._backlog + self.parts if self._backlog else self.parts)
        self.parts.clear()
        self._backlog.clear()
        self._waiting = 0
        self.written_at = now
        if self.finished:
            self.closed = True
            self._drive({"type": "http.response.body", "body": body, "more_body": False})
        elif body:
            self._drive({"type": "http.response.body", "body": body, "more_body": True})

    def close(self) -> None:
        """Forget what is unsent; the client is gone."""
        self.closed = True
        self.parts.clear()
        self._backlog.clear()

    def _drive(self, message: dict[str, Any]) -> None:
        coroutine = self._send(message)
        try:
            sent, waits_for = start(coroutine)
        except Exception as error:
            self._give_up(error)
            return
        if not sent:
            self._blocked = True
            self._task = asyncio.get_running_loop().create_task(self._resume(coroutine, waits_for))

    async def _resume(self, coroutine: Any, waits_for: Any) -> None:
        """The transport is full: go on when it is not."""
        try:
            await finish(coroutine, waits_for)
        except Exception as error:
            self._give_up(error)
        finally:
            self._blocked = False
        if not self.closed and (self.parts or self._backlog or self.finished):
            self.mark()

    def _give_up(self, error: Exception) -> None:
        log.warning("response could not be written", error=repr(error))
        self.close()

    def _hold_back(self) -> None:
        self._backlog += self.parts
        self._waiting += sum(map(len, self.parts))
        self.parts.clear()
        if self._waiting > self._limit:
            self.close()
            if self._on_overflow is not None:
                self._on_overflow()
