"""One streamed completion over a connection of its own, timed as its bytes arrive."""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast
from urllib.parse import urlsplit

import orjson

from deploy.bench.records import Record
from deploy.bench.sse import BadResponse, EventParser, ResponseParser


class RequestFailed(Exception):
    """A request that ended in anything but a whole, successful answer."""

    advice = ""
    """What the person at the keyboard may do, where that is known."""


class Unreachable(RequestFailed):
    """There is no connection to the server."""

    advice = "Is a mesh up? `hortator up` starts one"


class Refused(RequestFailed):
    """The server answered with another status than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {_told(body)}")
        self.advice = "Pass --api-key KEY, or set OPENAI_API_KEY" if status == 401 else ""


def described(error: Exception) -> str:
    """A failure and what may be done about it."""
    advice = getattr(error, "advice", "")
    return f"{str(error).rstrip('.')}. {advice}" if advice else str(error)


def _told(body: bytes) -> str:
    """The message of an error in OpenAI's envelope, else the body's beginning."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:300]


@dataclass(frozen=True)
class Target:
    """A server under test."""

    name: str
    url: str
    """Base URL; `/v1` at its end is understood."""
    model: str
    api_key: str = ""

    def at(self, path: str) -> "_Address":
        parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url!r} is not a http:// or https:// URL")
        base = parts.path.rstrip("/").removesuffix("/v1")
        secure = parts.scheme == "https"
        return _Address(parts.hostname, parts.port or (443 if secure else 80), secure, base + path)


@dataclass(frozen=True)
class _Address:
    host: str
    port: int
    secure: bool
    path: str


class _Exchange(asyncio.Protocol):
    """Sends one request; hands body bytes over with the time they came; `closed` ends with the connection."""

    def __init__(self, request: bytes, on_body: Callable[[float, bytes], bool]) -> None:
        self._request = request
        self._on_body = on_body
        self.parser = ResponseParser()
        self.error_body = b""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports implement the class without inheriting from it.
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        try:
            body = self.parser.feed(data)
            if self.parser.status == 200:
                done = self._on_body(now, body) if body else False
            else:
                self.error_body += body[:4096]
                done = False
            if done or self.parser.finished:
                self._finish(None)
        except Exception as error:  # a malformed answer fails this request, not the generator
            self._finish(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.closed.done():
            return
        try:
            if exc is not None:
                raise exc
            self.parser.end()
            self.closed.set_result(None)
        except Exception as error:
            self.closed.set_exception(error)

    def _finish(self, error: Exception | None) -> None:
        if not self.closed.done():
            if error is None:
                self.closed.set_result(None)
            elif isinstance(error, BadResponse):
                self.closed.set_exception(error)
            else:
                self.closed.set_exception(BadResponse(f"the answer cannot be read: {error!r}"))
        self._transport.close()


async def exchange(
    target: Target, path: str, body: Any, on_body: Callable[[float, bytes], bool], timeout_s: float
) -> None:
    """POST `body` as JSON (GET where it is None) until `on_body(now, bytes)` returns True or the answer ends.

    Raises RequestFailed.
    """
    where = target.at(path)
    payload = b"" if body is None else orjson.dumps(body)
    head = f"{'GET' if body is None else 'POST'} {where.path} HTTP/1.1\r\nHost: {where.host}:{where.port}\r\n"
    head += "Accept: text/event-stream, application/json\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
    if target.api_key:
        head += f"Authorization: Bearer {target.api_key}\r\n"
    request = head.encode("latin-1") + b"\r\n" + payload
    loop = asyncio.get_running_loop()
    transport = None
    try:
        async with asyncio.timeout(timeout_s):
            transport, session = await loop.create_connection(
                lambda: _Exchange(request, on_body),
                where.host,
                where.port,
                ssl=ssl.create_default_context() if where.secure else None,
            )
            await session.closed
    except TimeoutError:
        raise RequestFailed(f"no whole answer within {timeout_s:g} s") from None
    except (OSError, BadResponse, ValueError) as error:
        if transport is None and isinstance(error, OSError):
            why = error.strerror or str(error)
            raise Unreachable(f"cannot connect to {where.host}:{where.port} ({why})") from None
        raise RequestFailed(str(error) or type(error).__name__) from None
    finally:
        if transport is not None:
            transport.abort()
    if session.parser.status != 200:
        raise Refused(session.parser.status or 0, session.error_body)


async def get_json(target: Target, path: str, timeout_s: float = 10.0) -> Any:
    """Raises RequestFailed."""
    parts: list[bytes] = []
    await exchange(target, path, None, lambda _, body: parts.append(body) or False, timeout_s)  # type: ignore[func-returns-value]
    try:
        return orjson.loads(b"".join(parts))
    except ValueError as error:
        raise RequestFailed(f"{path} did not answer with JSON: {error}") from None


class _Reader:
    """Turns a completion stream's events into a record."""

    def __init__(self, record: Record, began: float) -> None:
        self._record = record
        self._began = began
        self._events = EventParser()
        self._counted = 0
        self._usage: int | None = None
        self.done = False

    def __call__(self, now: float, body: bytes) -> bool:
        record, at = self._record, now - self._began
        for payload in self._events.feed(body):
            if payload == b"[DONE]":
                self.done = True
                break
            event = orjson.loads(payload)
            if event.get("error"):
                raise BadResponse(f"error in the stream: {_told(payload)}")
            if usage := event.get("usage"):
                self._usage = int(usage["completion_tokens"])
                record.cached_tokens = int(
                    (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                )
            if event.get("choices"):
                self._counted += 1
                if record.last is None:
                    record.first = at
                else:
                    record.gaps.append(at - record.last)
                record.last = at
        record.tokens = self._counted if self._usage is None else self._usage
        return self.done


async def stream_completion(
    target: Target,
    prompt: list[int] | str,
    record: Record,
    began: float,
    ignore_eos: bool,
    timeout_s: float,
    *,
    more: dict[str, Any] | None = None,
) -> None:
    """Run one request, with `more` fields in its body, and fill in its record; failures go into
    `record.error`, nothing is raised."""
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": record.wanted_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= more or {}
    if ignore_eos:
        body["ignore_eos"] = True
    reader = _Reader(record, began)
    record.sent = perf_counter() - began
    try:
        await exchange(target, "/v1/completions", body, reader, timeout_s)
        if not reader.done:
            raise RequestFailed("the stream ended without [DONE]")
        if ignore_eos and record.tokens != record.wanted_tokens:
            raise RequestFailed(f"{record.tokens} tokens came, {record.wanted_tokens} were asked for")
        if record.last is None:
            raise RequestFailed("the stream carried no choices")
    except RequestFailed as error:
        record.error = str(error)
