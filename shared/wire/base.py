"""Encoding of wire messages: MessagePack maps tagged by `kind`, typed on our side by msgspec.

Anyone can read a frame with plain `msgpack`: a message is a map whose `kind` names it; nested rows are
arrays in field order. Fields are only ever appended, with defaults, so an older reader skips what it does
not know and a newer one fills in what is missing (design §4).
"""

from typing import Any, TypeVar

import msgspec


class Wire(msgspec.Struct, frozen=True, tag_field="kind", omit_defaults=True):
    """Base of every message. Subclasses repeat `frozen=True, kw_only=True` (they are not inherited)."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Base of rows nested in a message: an untagged array, fields in order."""


M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


class BadFrame(ValueError):
    """Bytes on a subject that are not the message the subject carries; `reason` says what is wrong."""

    def __init__(self, wanted: str, reason: str) -> None:
        super().__init__(f"not a {wanted} frame: {reason}")
        self.wanted = wanted
        self.reason = reason


def encode(message: Wire) -> bytes:
    return _encoder.encode(message)


class Codec:
    """Decoder for one message type or union, made once per subject. Raises `BadFrame`, nothing else."""

    __slots__ = ("_decoder", "name")

    def __init__(self, type_: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(type_)
        self.name = getattr(type_, "__name__", str(type_))

    def decode(self, payload: bytes) -> Any:
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            # Hostile nesting raises RecursionError, not DecodeError.
            raise BadFrame(self.name, str(error) or type(error).__name__) from None
