"""The health record of an instance as it stands in the store: a msgpack map anyone can read."""

import msgspec

from shared.wire import InstanceInfo


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Written by kvstore from the instance's events; gone three heartbeats after the last one."""

    info: InstanceInfo
    blocks: int
    """Blocks of the instance that the prefix index knows."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(InstanceRecord)


def encode_record(record: InstanceRecord) -> bytes:
    return _encoder.encode(record)


def decode_record(raw: bytes) -> InstanceRecord | None:
    """None for what is not a record (of this version)."""
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
