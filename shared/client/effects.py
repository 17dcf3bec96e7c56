"""What goes into the client core (events) and what comes out (effects).

Besides the events here, `Tokens` and `Beacon` frames are events as they are. Besides the effects here,
`Submit`, `Cancel` and `Ack` messages are effects: publish them on the subject that carries their type.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from shared.wire import Ack, Answer, Beacon, Cancel, EndRow, Sampling, Submit, Tokens

if TYPE_CHECKING:
    from shared.client.records import OpenRequest, OpenSeq


class Open(msgspec.Struct, frozen=True, kw_only=True):
    """Start a request. One sequence per element of `sinks`; the core only carries them along."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    sinks: Sequence[Any] = (None,)
    priority: int = 0
    timeout_s: float = 600.0
    queue_timeout_s: float = 60.0
    salt: str = ""
    pin: str = ""


class Close(msgspec.Struct, frozen=True):
    """The caller wants no more tokens of these choices (empty: of all)."""

    request_id: str
    choices: tuple[int, ...] = ()


class Tick(msgspec.Struct, frozen=True):
    """Time passed. Give one at least every 0.05 s while the core `is_busy`."""


class Unsendable(msgspec.Struct, frozen=True):
    """The broker takes no frame as large as this request's `Submit`."""

    request_id: str
    reason: str


Event = Open | Close | Tick | Unsendable | Tokens | Beacon


class Accepted(msgspec.Struct, frozen=True):
    """The scheduler has taken the request; said once, also when a first token says it."""

    request: "OpenRequest"


class Progress(msgspec.Struct, frozen=True):
    """New tokens in order: (sequence, ids). `ids` are already at the end of `sequence.accepted`."""

    rows: list[tuple["OpenSeq", list[int]]]


class Ended(msgspec.Struct, frozen=True):
    """The one end of a sequence; nothing follows for it."""

    seq: "OpenSeq"
    end: EndRow


class Refused(msgspec.Struct, frozen=True):
    """The request was not taken and never will be; its sequences get no `Ended`."""

    request: "OpenRequest"
    answer: Answer


Effect = Submit | Cancel | Ack | Accepted | Progress | Ended | Refused


@dataclass(slots=True)
class Counts:
    """What the core met, for metrics and for tests."""

    stale_frames: int = 0
    duplicate_frames: int = 0
    gaps: int = 0
    stale_rows: int = 0
    repeated_tokens: int = 0
    impossible_rows: int = 0
    takeovers: int = 0
    resubmitted: int = 0
    unknown_to_scheduler: int = 0
    by_end: dict[str, int] = field(default_factory=dict)
