"""What responses look like on the wire: completions and chat, whole and as stream events."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import orjson

from services.gateway.tokenizer import ModelCard

DONE = b"data: [DONE]\n\n"
_NO_LOGPROB = -9999.0
"""JSON knows no infinity; OpenAI writes this."""


class Entry(NamedTuple):
    """One token and its log-probabilities; `chosen` None: not known (the first prompt token)."""

    token: int
    chosen: float | None
    top: Sequence[tuple[int, float]]
    offset: int
    """Where its text begins in the choice's text."""


class Usage(msgspec.Struct, frozen=True):
    prompt: int
    completion: int
    cached: int = 0

    def plain(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Finished(msgspec.Struct):
    """All of a choice, for a response in one piece; and its end, for a stream."""

    index: int
    reason: str
    stop_reason: str | int | None = None
    text: str = ""
    entries: Sequence[Entry] = ()
    token_ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    timing: dict[str, float] | None = None


class Format(Protocol):
    """Of one response. Events are whole `data:` lines with their blank line."""

    def fast_parts(self, index: int) -> tuple[bytes, bytes]:
        """An event that carries text and nothing else is first + JSON string + second."""

    def opening(self, index: int, prompt_ids: list[int] | None) -> bytes:
        """What a choice begins with; may be empty."""

    def delta(self, index: int, text: str, entries: Sequence[Entry], usage: Usage | None) -> bytes: ...

    def finish(self, end: Finished, usage: Usage | None) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[Finished], usage: Usage) -> bytes: ...


class Envelope(msgspec.Struct, frozen=True):
    """What every event of a response repeats."""

    id: str
    created: int
    model: str
    card: ModelCard
    usage_wanted: bool
    """Every event then carries a usage key."""
    token_ids: bool
    logprobs: bool


class CompletionFormat:
    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._head = _head(envelope, "text_completion")
        self._tail = b',"usage":null}\n\n' if envelope.usage_wanted else b"}\n\n"

    def fast_parts(self, index: int) -> tuple[bytes, bytes]:
        first = b'%s"choices":[{"index":%d,"text":' % (self._head, index)
        return first, b',"logprobs":null,"finish_reason":null}]' + self._tail

    def opening(self, index: int, prompt_ids: list[int] | None) -> bytes:
        if prompt_ids is None:
            return b""
        choice = {**self._choice(index, ""), "prompt_token_ids": prompt_ids, "token_ids": []}
        return self._event(choice, None)

    def delta(self, index: int, text: str, entries: Sequence[Entry], usage: Usage | None) -> bytes:
        choice = self._choice(index, text)
        if self._envelope.logprobs:
            choice["logprobs"] = self._logprobs(entries)
        if self._envelope.token_ids:
            choice["token_ids"] = [entry.token for entry in entries]
        return self._event(choice, usage)

    def finish(self, end: Finished, usage: Usage | None) -> bytes:
        choice = self._choice(end.index, "")
        choice |= {"finish_reason": end.reason, "stop_reason": end.stop_reason}
        if end.timing is not None:
            choice["timing"] = end.timing
        return self._event(choice, usage)

    def usage(self, usage: Usage) -> bytes:
        return _usage_event(self._head, usage)

    def whole(self, choices: Sequence[Finished], usage: Usage) -> bytes:
        bodies = []
        for end in choices:
            choice = self._choice(end.index, end.text)
            choice |= {"finish_reason": end.reason, "stop_reason": end.stop_reason}
            if self._envelope.logprobs:
                choice["logprobs"] = self._logprobs(end.entries)
            if end.token_ids is not None:
                choice |= {"token_ids": end.token_ids, "prompt_token_ids": end.prompt_ids}
            if end.timing is not None:
                choice["timing"] = end.timing
            bodies.append(choice)
        return _whole(self._envelope, "text_completion", bodies, usage, {})

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _event(self, choice: dict[str, Any], usage: Usage | None) -> bytes:
        return b'%s"choices":[%s]%s' % (self._head, orjson.dumps(choice), self._ending(usage))

    def _ending(self, usage: Usage | None) -> bytes:
        return self._tail if usage is None else b',"usage":%s}\n\n' % orjson.dumps(usage.plain())

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        text_of = self._envelope.card.token_text
        tops: list[dict[str, float] | None] = []
        for entry in entries:
            if entry.chosen is None:
                tops.append(None)
                continue
            best: dict[str, float] = {}
            for token, logprob in entry.top:
                # Two ids may look alike; the likelier one comes first and stays.
                best.setdefault(text_of(token), _finite(logprob))
            best.setdefault(text_of(entry.token), _finite(entry.chosen))
            tops.append(best)
        return {
            "tokens": [text_of(entry.token) for entry in entries],
            "token_logprobs": [None if e.chosen is None else _finite(e.chosen) for e in entries],
            "top_logprobs": tops,
            "text_offset": [entry.offset for entry in entries],
        }


class ChatFormat:
    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._head = _head(envelope, "chat.completion.chunk")
        self._tail = b',"usage":null}\n\n' if envelope.usage_wanted else b"}\n\n"

    def fast_parts(self, index: int) -> tuple[bytes, bytes]:
        first = b'%s"choices":[{"index":%d,"delta":{"content":' % (self._head, index)
        return first, b'},"logprobs":null,"finish_reason":null}]' + self._tail

    def opening(self, index: int, prompt_ids: list[int] | None) -> bytes:
        choice = self._choice(index, {"role": "assistant", "content": ""})
        if prompt_ids is not None:
            choice["token_ids"] = []
            return self._event(choice, None, b'"prompt_token_ids":%s,' % orjson.dumps(prompt_ids))
        return self._event(choice, None)

    def delta(self, index: int, text: str, entries: Sequence[Entry], usage: Usage | None) -> bytes:
        choice = self._choice(index, {"content": text})
        if self._envelope.logprobs:
            choice["logprobs"] = self._logprobs(entries)
        if self._envelope.token_ids:
            choice["token_ids"] = [entry.token for entry in entries]
        return self._event(choice, usage)

    def finish(self, end: Finished, usage: Usage | None) -> bytes:
        choice = self._choice(end.index, {})
        choice |= {"finish_reason": end.reason, "stop_reason": end.stop_reason}
        if end.timing is not None:
            choice["timing"] = end.timing
        return self._event(choice, usage)

    def usage(self, usage: Usage) -> bytes:
        return _usage_event(self._head, usage)

    def whole(self, choices: Sequence[Finished], usage: Usage) -> bytes:
        bodies = []
        extra: dict[str, Any] = {}
        for end in choices:
            message = {"role": "assistant", "content": end.text, "refusal": None}
            choice: dict[str, Any] = {
                "index": end.index,
                "message": message,
                "logprobs": self._logprobs(end.entries) if self._envelope.logprobs else None,
                "finish_reason": end.reason,
                "stop_reason": end.stop_reason,
            }
            if end.token_ids is not None:
                choice["token_ids"] = end.token_ids
                extra["prompt_token_ids"] = end.prompt_ids
            if end.timing is not None:
                choice["timing"] = end.timing
            bodies.append(choice)
        return _whole(self._envelope, "chat.completion", bodies, usage, extra)

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _event(self, choice: dict[str, Any], usage: Usage | None, extra: bytes = b"") -> bytes:
        ending = self._tail if usage is None else b',"usage":%s}\n\n' % orjson.dumps(usage.plain())
        return b'%s%s"choices":[%s]%s' % (self._head, extra, orjson.dumps(choice), ending)

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return {"content": [self._token(entry) for entry in entries], "refusal": None}

    def _token(self, entry: Entry) -> dict[str, Any]:
        top = [self._one(token, logprob) for token, logprob in entry.top]
        return {**self._one(entry.token, entry.chosen or 0.0), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        card = self._envelope.card
        return {
            "token": card.token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(card.token_bytes(token)),
        }


def error_event(body: bytes) -> bytes:
    """An error after the headers; the stream ends behind it without [DONE]."""
    return b"data: " + body + b"\n\n"


def _head(envelope: Envelope, kind: str) -> bytes:
    fields = {"id": envelope.id, "object": kind, "created": envelope.created, "model": envelope.model}
    return b"data: " + orjson.dumps(fields)[:-1] + b","


def _usage_event(head: bytes, usage: Usage) -> bytes:
    return b'%s"choices":[],"usage":%s}\n\n' % (head, orjson.dumps(usage.plain()))


def _whole(
    envelope: Envelope, kind: str, choices: list[dict[str, Any]], usage: Usage, extra: dict[str, Any]
) -> bytes:
    return orjson.dumps(
        {
            "id": envelope.id,
            "object": kind,
            "created": envelope.created,
            "model": envelope.model,
            **extra,
            "choices": choices,
            "usage": usage.plain(),
        }
    )


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NO_LOGPROB
