"""uvicorn's HTTP protocol with limits on what comes before a request reaches the app.

Headers too large: 431. Headers too slow: 408. Not HTTP: 400. Each with an error object as OpenAI's clients
expect it, then the connection is closed; what the client still sends meanwhile is read and dropped, so that
it gets to read the answer.
"""

import asyncio
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536
"""Request line and headers together."""
MAX_HEADERS = 128
HEAD_TIMEOUT_S = 15.0
"""From the connection, or from the first byte of a further request, to the end of the headers."""
LINGER_S = 1.0
"""How long a refused client may still send."""
MAX_DISCARDED_BYTES = 64 << 20
"""Of a body whose request has been answered already."""

_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class HeadTooLarge(Exception):
    """Makes the parser stop."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused = False
        self._in_head = True
        self._head_bytes = 0
        """Received while headers were incomplete."""
        self._head_seen = 0
        """Parsed of request line and headers."""
        self._discarded = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._in_head and not self._refused:
            # An endless header never reaches `on_header`.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self._head_seen = 0
        self._start_head_timer()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > MAX_DISCARDED_BYTES:
                self.transport.close()
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            self._refuse(400, "This is not a valid HTTP request.", "invalid_http")

    def _count(self, size: int) -> None:
        self._head_seen += size
        if self._head_seen > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            self._refuse_head()
            raise HeadTooLarge

    def _refuse_head(self) -> None:
        message = f"The headers may have at most {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} fields."
        self._refuse(431, message, "headers_too_large")

    def _too_slow(self) -> None:
        self._head_timer = None
        if self._in_head and not self._refused and not self.transport.is_closing():
            self._refuse(408, "The request's headers did not arrive in time.", "request_timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        self._refused = True
        self._stop_head_timer()
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = orjson.dumps({"error": error})
        self.transport.write(
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            + body
        )
        self.loop.call_later(LINGER_S, self.transport.close)

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
