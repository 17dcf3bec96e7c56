"""A request as it arrives: the few headers that matter, and its body within limits."""

import asyncio
import re
import secrets
from typing import Any

from services.gateway.drive import finish, start
from services.gateway.errors import ApiError, too_large

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}\Z")


class Incoming:
    """One HTTP request. `receive` is ASGI's."""

    __slots__ = (
        "authorization",
        "content_encoding",
        "content_length",
        "content_type",
        "method",
        "path",
        "receive",
        "request_id",
        "with_timing",
    )

    def __init__(self, scope: Any, receive: Any) -> None:
        self.receive = receive
        self.method: str = scope["method"]
        self.path = _normal(scope["path"])
        self.authorization: bytes | None = None
        self.content_length: bytes | None = None
        self.content_type = b""
        self.content_encoding = b""
        self.with_timing = False
        self.request_id = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                self.authorization = value
            elif name == b"content-length":
                self.content_length = value
            elif name == b"content-type":
                self.content_type = value
            elif name == b"content-encoding":
                self.content_encoding = value
            elif name == b"x-request-id" and _REQUEST_ID.match(value):
                self.request_id = value
            elif name == b"x-hortator-timing":
                self.with_timing = value.strip() not in (b"", b"0")
        if not self.request_id:
            self.request_id = secrets.token_hex(8).encode()

    async def body(self, most: int, timeout_s: float) -> bytes:
        """The whole body. Raises ApiError: 413 above `most` bytes (before reading it if its length is told),
        415 for anything but plain JSON, 408 when it does not come in time, 499 when the client left."""
        self._check_headers(most)
        message = await self._next(timeout_s)
        body: bytes = message.get("body", b"")
        if not message.get("more_body"):
            if len(body) > most:
                raise _too_large(most)
            return body
        parts, size = [body], len(body)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while message.get("more_body"):
            if size > most:
                raise _too_large(most)
            message = await self._next(deadline - asyncio.get_running_loop().time())
            parts.append(message.get("body", b""))
            size += len(parts[-1])
        if size > most:
            raise _too_large(most)
        return b"".join(parts)

    async def disconnect(self) -> None:
        """Returns when the client has gone or the response is complete."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def _check_headers(self, most: int) -> None:
        if self.content_encoding and self.content_encoding.lower() != b"identity":
            raise ApiError(415, "Compressed bodies are not accepted.", code="unsupported_encoding")
        kind = self.content_type.partition(b";")[0].strip().lower()
        if kind and kind != b"application/json" and not kind.endswith(b"+json"):
            sent = kind[:80].decode("latin-1")
            message = f"The body came as {sent}. Add the header 'Content-Type: application/json'."
            raise ApiError(415, message, code="unsupported_media_type")
        length = self.content_length
        if length is not None and length.isdigit() and int(length) > most:
            raise _too_large(most)

    async def _next(self, timeout_s: float) -> Any:
        receiving = self.receive()
        # Most bodies have arrived with their headers: no timer for those.
        there, message = start(receiving)
        if not there:
            try:
                message = await asyncio.wait_for(finish(receiving, message), max(0.0, timeout_s))
            except TimeoutError:
                text = "The request body did not arrive in time."
                raise ApiError(408, text, code="request_timeout") from None
        if message["type"] == "http.disconnect":
            raise ApiError(499, "The client closed the connection.", code="client_closed")
        return message


def _normal(path: str) -> str:
    """`/v1//models/` → `/v1/models`."""
    while "//" in path:
        path = path.replace("//", "/")
    return path.rstrip("/") or "/"


def _too_large(most: int) -> ApiError:
    return too_large(f"The request body may have at most {most} bytes.")
