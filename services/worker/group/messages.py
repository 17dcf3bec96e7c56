"""What rank 0 and the other ranks of a group say to each other. All are of one version: that is checked."""

from typing import Any

import msgspec

from shared.wire import TierOffer
from shared.wire.base import Codec


class Message(msgspec.Struct, frozen=True, tag_field="kind", array_like=True):
    """Base of every message: an array that begins with its kind."""


# From a rank.


class Hello(Message, frozen=True, tag="hello"):
    rank: int
    node: int
    """Which of the group's nodes it runs on."""
    host: str
    pid: int
    facts: dict[str, str]
    """What has to be the same on all ranks."""
    can_native: bool
    """It can speak the compiled transports."""
    data_port: int = 0
    """Where other ranks connect to it; 0: it was handed its connections."""


class Built(Message, frozen=True, tag="built"):
    """Its executor is there, and it follows."""

    facts: dict[str, str]
    memory: dict[str, Any] = {}
    """What it takes, as `services.worker.step.AccountedExecutor` tells."""


class Failed(Message, frozen=True, tag="failed"):
    """It ends, and why."""

    reason: str


class Part(Message, frozen=True, tag="part"):
    """Its part of a fetch has ended here, and with how many blocks."""

    session: int
    op: int
    count: int
    us: int


# From rank 0.


class Welcome(Message, frozen=True, tag="welcome"):
    """The group is complete; what its collective is made of."""

    native: bool
    most_floats: int
    addresses: list[str] = []
    """HOST:PORT of every rank's data connections, by rank; none where they were handed out."""


class Refusal(Message, frozen=True, tag="refusal"):
    """The group does not take this rank."""

    reason: str


class Follow(Message, frozen=True, tag="follow"):
    """Compute this frame, as rank 0 does."""

    frame: bytes
    behind: bool
    """It is begun before the frame under way is finished."""
    check: int
    """`Compute.check` of rank 0 before it."""


class Begin(Message, frozen=True, tag="begin"):
    """A new session: `Compute.begin`."""


class Tune(Message, frozen=True, tag="tune"):
    """What the executor is told before the next frame."""

    state: dict[str, Any]


class Measure(Message, frozen=True, tag="measure"):
    """Take part in a measurement that the executor knows by this name."""

    name: str


class Tiers(Message, frozen=True, tag="tiers"):
    """The second tiers there are: `Compute.use_tiers`."""

    offers: list[TierOffer]
    home: str
    wanted: bool


class EndFetch(Message, frozen=True, tag="end_fetch"):
    """A fetch has ended on all ranks: `Compute.end_fetch`."""

    session: int
    op: int
    count: int


class Close(Message, frozen=True, tag="close"):
    """The instance ends in good order."""


FROM_RANK = Codec(Hello | Built | Failed | Part)
TO_RANK = Codec(Welcome | Refusal | Follow | Begin | Tune | Measure | Tiers | EndFetch | Close)

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)
