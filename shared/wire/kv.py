"""Messages between instances and the kvstore service."""

from typing import Literal

from shared.wire.base import Wire
from shared.wire.step import InstanceInfo


class KvEvents(Wire, frozen=True, tag="kv_events", kw_only=True):
    """Blocks that became shareable or vanished, in order. `seq` is gapless from 1 within (instance, born).

    Sent when something changed and at least every second (the heartbeat that exposes a lost last frame).
    """

    instance: str
    born: int
    seq: int
    info: InstanceInfo
    stored: list[bytes] = []
    removed: list[bytes] = []
    restate: Literal["", "begin", "part"] = ""
    """`begin`: forget all you know of this instance, then `stored` follows here and in `part` frames."""


class Restate(Wire, frozen=True, tag="restate", kw_only=True):
    """kvstore → instance (subject kv verb `restate`): send everything, in frames with `restate` set."""

    instance: str
    reason: str = ""


class TierOffer(Wire, frozen=True, tag="tier_offer", kw_only=True):
    """kvstore → workers, every second: blocks can be kept in and had from its second tier, by TCP."""

    instance: str
    """Of the kvstore; with the model's name it gives the row in the prefix index (`subjects.tier_row`)."""
    host: str
    port: int
    secret: str
    """What a connection has to begin with; drawn anew in each life of the kvstore."""
    born: int
    """Microseconds since 1970 at its start."""
    memory_bytes: int
    disk_bytes: int
