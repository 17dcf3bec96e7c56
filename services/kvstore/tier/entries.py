"""What the tier knows of each block it holds: whose it is, where it lies, and how it ranks. Pure."""

from dataclasses import dataclass, field
from typing import NamedTuple

from services.kvstore.tier.arena import Block, cost
from services.kvstore.tier.order import NOT_USED, Rank
from shared.ids import BlockHash
from shared.tier.frames import NO_LINK, Link

HEADER_BYTES = 512
"""Of a record on disk, before the block's bytes."""


class Space(NamedTuple):
    """Whose blocks: every rank of a group holds its own heads of each block."""

    model: str
    part: int
    parts: int


class Key(NamedTuple):
    space: Space
    hash: BlockHash


class Place(NamedTuple):
    """Where a record lies on disk."""

    segment: int
    offset: int
    """Of the block's bytes."""


class Record(NamedTuple):
    """What a block's header on disk says of it."""

    key: Key
    size: int
    digest: bytes
    link: Link = NO_LINK
    stretch: int = 0
    """Of time, in which it was used last before it was written."""


def record_bytes(size: int) -> int:
    return HEADER_BYTES + size


@dataclass(eq=False, slots=True)
class Entry:
    key: Key
    size: int
    digest: bytes
    link: Link = NO_LINK
    rank: Rank = NOT_USED
    block: Block | None = None
    """In memory there."""
    place: Place | None = None
    """On disk there."""
    readers: int = 0
    """While there are any, its bytes stay where they are."""
    pins: int = 0
    """Leases that hold it."""

    @property
    def cost(self) -> int:
        """Bytes of the memory's budget while it is there."""
        return cost(self.size)

    @property
    def before(self) -> Key:
        """Of its chain."""
        return Key(self.key.space, BlockHash(self.link.parent))

    @property
    def record(self) -> Record:
        return Record(self.key, self.size, self.digest, self.link, self.rank.stretch)


@dataclass
class Counts:
    stored: int = 0
    had: int = 0
    hits: int = 0
    misses: int = 0
    disk_reads: int = 0
    spilled: int = 0
    evicted: int = 0
    """Left the tier for others."""
    dropped: int = 0
    """Of these, without having been on disk although there is one: it was too slow or failed."""
    corrupt: int = 0
    refused: int = 0
    wrong: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass
class Segment:
    bytes: int = 0
    entries: set[Entry] = field(default_factory=set)


class Spill(NamedTuple):
    """No room until this entry is on disk, too."""

    entry: Entry
