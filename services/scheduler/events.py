"""What goes into the core besides wire messages, and what comes out of it. All of it is data."""

from dataclasses import dataclass, field
from typing import Any

from shared.ids import BlockHash
from shared.wire import Beacon, Claim, Claimed, Inventory, Step, Tokens

# In


@dataclass(frozen=True)
class Tick:
    """Time has passed; comes every `tick_s` at least. Expires, resends, beats."""


@dataclass(frozen=True)
class Turn:
    """The events of one loop iteration are in: plan frames, collect token frames."""


@dataclass(frozen=True)
class ClaimAnswer:
    """An instance's answer to `AskClaim` or `AskInventory`."""

    instance: str
    claimed: Claimed


@dataclass(frozen=True)
class LeaseSeen:
    """What Redis says of the leader's lease. `known=False`: Redis cannot be asked."""

    known: bool
    epoch: int = 0
    """Highest epoch ever written, also after its lease lapsed."""
    owner: str = ""
    ttl_s: float = 0.0
    """Remaining life of a live lease; 0: there is none."""


@dataclass(frozen=True)
class Connected:
    """The broker's connection came or went."""

    up: bool


@dataclass(frozen=True)
class Hint:
    """The answer to `LookUp`: which rows of the shared index are said to hold how many of its blocks, from
    the first on. None: there is no answer; do not wait for it."""

    client: str
    handles: tuple[int, ...]
    blocks: dict[str, int] | None


@dataclass(frozen=True)
class Stop:
    """This process ends on purpose."""


# Out


@dataclass(frozen=True, slots=True)
class SendStep:
    """A frame for the instance it names."""

    step: Step


@dataclass(frozen=True, slots=True)
class SendTokens:
    """A frame for one client."""

    client: str
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class SendBeacon:
    """To all."""

    beacon: Beacon


@dataclass(frozen=True, slots=True)
class AskClaim:
    """Request to an instance; feed its `ClaimAnswer`. No answer: the core asks again."""

    instance: str
    claim: Claim


@dataclass(frozen=True, slots=True)
class AskInventory:
    """A further page of hashed blocks; answered like a claim."""

    instance: str
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class LookUp:
    """Ask the shared index how far these waiting sequences' blocks are held; feed its `Hint`, and one
    without an answer when there is none within `hold_s`: they are held back for it."""

    client: str
    handles: tuple[int, ...]
    hashes: list[BlockHash]
    hold_s: float


@dataclass(frozen=True, slots=True)
class WriteLease:
    """Take or renew the lease in Redis, and keep renewing it."""

    epoch: int
    owner: str


@dataclass(frozen=True, slots=True)
class DropLease:
    """Give the lease up."""

    epoch: int
    owner: str


@dataclass(frozen=True, slots=True)
class Lead:
    """Subscribe to clients and results."""


@dataclass(frozen=True, slots=True)
class Follow:
    """Unsubscribe from clients and results."""


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log."""

    event: str
    fields: dict[str, Any] = field(default_factory=dict)


Effect = (
    SendStep
    | SendTokens
    | SendBeacon
    | AskClaim
    | AskInventory
    | LookUp
    | WriteLease
    | DropLease
    | Lead
    | Follow
    | Note
)
