"""What the tier holds, where, and what has to leave: entries, use, pins, completeness. Pure.

A block is in memory, on disk, or both; `Book` decides which block leaves which place and says so, and others
move the bytes. Time is an argument.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.kvstore.tier.arena import Arena, Block, cost
from shared.ids import BlockHash

MAX_LEASES = 10_000
PINNED_SHARE = 0.5
"""Of the budget of memory and disk together: leases alone must not freeze the tier."""


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


@dataclass(eq=False, slots=True)
class Entry:
    key: Key
    size: int
    digest: bytes
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
class _Segment:
    bytes: int = 0
    entries: set[Entry] = field(default_factory=set)


class Spill(NamedTuple):
    """No room until this entry is on disk, too."""

    entry: Entry


class Book:
    """`spills` says whether there is a disk that blocks go to before they leave memory."""

    def __init__(self, memory_bytes: int, disk_bytes: int = 0) -> None:
        self.arena = Arena(memory_bytes)
        self.disk_bytes = disk_bytes
        self.disk_used = 0
        self.spills = disk_bytes > 0
        self.counts = Counts()
        self.pinned_bytes = 0
        self.changes: list[tuple[str, BlockHash, bool]] = []
        """(model, hash, came or went), in order, since somebody last took them: of blocks with all parts."""
        self._entries: dict[Key, Entry] = {}
        self._memory: OrderedDict[Entry, None] = OrderedDict()
        # least recently used first
        self._unspilled: OrderedDict[Entry, None] = OrderedDict()
        # those of them that are not on disk, about in the same order
        self._unspilled_bytes = 0
        self._segments: OrderedDict[int, _Segment] = OrderedDict()
        # oldest first
        self._leases: dict[bytes, tuple[float, list[Entry]]] = {}
        self._parts: dict[tuple[str, int, BlockHash], int] = {}
        # (model, parts, hash) → how many of the parts are here
        self._complete: dict[str, dict[BlockHash, None]] = {}

    # --- what is there ------------------------------------------------------------------------------------

    def find(self, key: Key) -> Entry | None:
        return self._entries.get(key)

    def complete(self, model: str) -> list[BlockHash]:
        """Hashes whose parts are all here."""
        return list(self._complete.get(model, ()))

    def complete_count(self, model: str) -> int:
        return len(self._complete.get(model, ()))

    @property
    def models(self) -> list[str]:
        """Models of which anything is or was complete."""
        return list(self._complete)

    @property
    def blocks(self) -> dict[str, int]:
        """Place → blocks there; one in both counts in both."""
        on_disk = sum(len(segment.entries) for segment in self._segments.values())
        return {"memory": len(self._memory), "disk": on_disk}

    @property
    def leases(self) -> int:
        return len(self._leases)

    def used(self, entries: Sequence[Entry]) -> None:
        """They were asked for. The first of a chain is worth most: without it the others are of no use."""
        for entry in reversed(entries):
            if entry.block is not None:
                self._memory.move_to_end(entry)
                if entry in self._unspilled:
                    self._unspilled.move_to_end(entry)

    # --- coming -------------------------------------------------------------------------------------------

    def room(self, size: int, *, waiting: bool) -> Block | Spill | None:
        """Memory for a block, others leaving for it; None: nothing may leave. While `waiting`, one that
        is not on disk yet is named instead of lost."""
        while (block := self.arena.take(size)) is None:
            leaving = self._leaving(size)
            if not leaving:
                return None
            if waiting and self.spills:
                for entry in leaving:
                    if entry.place is None:
                        return Spill(entry)
            for entry in leaving:
                self._leave_memory(entry)
        return block

    def _leaving(self, size: int) -> list[Entry]:
        """The least recently used block, or with one of another size its whole slab."""
        held: list[Entry] = []
        found: list[Entry] = []
        for entry in self._memory:
            assert entry.block is not None
            if not self._may_leave(entry):
                if entry.pins:
                    held.append(entry)
                continue
            if entry.block.slab.size == size:
                found = [entry]
                break
            owners = [block.owner for block in entry.block.slab.blocks]
            slab = [each for each in owners if isinstance(each, Entry) and self._may_leave(each)]
            if len(slab) == len(owners):
                found = slab
                break
        # A lease is a use: who is held by one does not stand in the way of the next search.
        for entry in held:
            self._memory.move_to_end(entry)
        return found

    @staticmethod
    def _may_leave(entry: Entry) -> bool:
        """Memory, that is; a pinned block may if the disk has it."""
        return not entry.readers and (entry.place is not None or not entry.pins)

    def add(self, key: Key, digest: bytes, block: Block) -> Entry:
        """Its bytes have arrived in `block`, and are right."""
        entry = Entry(key, block.slab.size, digest)
        self._enter(entry)
        self.brought(entry, block)
        self.counts.stored += 1
        return entry

    def brought(self, entry: Entry, block: Block) -> None:
        """It is in memory, too."""
        entry.block, block.owner = block, entry
        self._memory[entry] = None
        if entry.place is None:
            self._unspilled[entry] = None
            self._unspilled_bytes += entry.cost

    def _enter(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        space, block_hash = entry.key
        parts = (space.model, space.parts, block_hash)
        there = self._parts[parts] = self._parts.get(parts, 0) + 1
        if there == space.parts:
            self._complete.setdefault(space.model, {})[block_hash] = None
            self.changes.append((space.model, block_hash, True))

    # --- leaving ------------------------------------------------------------------------------------------

    def _leave_memory(self, entry: Entry) -> None:
        assert entry.block is not None
        self.arena.give(entry.block)
        entry.block = None
        del self._memory[entry]
        self._spilled_or_gone(entry)
        if entry.place is None:
            self.counts.evicted += 1
            self.counts.dropped += self.spills
            self._gone(entry)

    def drop(self, entry: Entry) -> None:
        """It turned out to be wrong: it leaves every place, pinned or not, once its readers are done."""
        if self._entries.get(entry.key) is entry:
            self._gone(entry)
        if not entry.readers:
            self._forget(entry)

    def read_begins(self, entry: Entry) -> None:
        entry.readers += 1

    def read_ends(self, entry: Entry) -> None:
        entry.readers -= 1
        if not entry.readers and self._entries.get(entry.key) is not entry:
            self._forget(entry)

    def _gone(self, entry: Entry) -> None:
        del self._entries[entry.key]
        space, block_hash = entry.key
        parts = (space.model, space.parts, block_hash)
        self._parts[parts] -= 1
        if self._parts[parts] == space.parts - 1:
            del self._complete[space.model][block_hash]
            self.changes.append((space.model, block_hash, False))
        if not self._parts[parts]:
            del self._parts[parts]
        if entry.pins:
            self.pinned_bytes -= entry.cost
            entry.pins = 0

    def _forget(self, entry: Entry) -> None:
        """The places of one that is gone."""
        if entry.block is not None:
            self.arena.give(entry.block)
            entry.block = None
            del self._memory[entry]
            self._spilled_or_gone(entry)
        if entry.place is not None:
            if (segment := self._segments.get(entry.place.segment)) is not None:
                segment.entries.discard(entry)
            entry.place = None

    def _spilled_or_gone(self, entry: Entry) -> None:
        if entry in self._unspilled:
            del self._unspilled[entry]
            self._unspilled_bytes -= entry.cost

    # --- the disk -----------------------------------------------------------------------------------------

    def spill_next(self, headroom: int) -> Entry | None:
        """What should go to disk so that `headroom` bytes of memory can be had without losing anything."""
        if self.arena.budget - self._unspilled_bytes >= headroom:
            return None
        return next((entry for entry in self._unspilled if not entry.readers), None)

    def unspilled_latest_first(self) -> list[Entry]:
        return [entry for entry in reversed(self._memory) if entry.place is None]

    def disk_fits(self, record_bytes: int) -> bool:
        return self.disk_used + record_bytes <= self.disk_bytes

    def end_oldest(self, current: int | None) -> int | None:
        """Forget the oldest segment, except `current`, which is written to, and those of which anything is
        pinned or being read: its number, or None."""
        oldest = next((n for n in self._segments if n != current and self._may_end(n)), None)
        if oldest is not None:
            self._end(oldest)
        return oldest

    def written(self, record_bytes: int, segment: int) -> None:
        """The segment has grown by that much, whatever becomes of the record."""
        self._segments.setdefault(segment, _Segment()).bytes += record_bytes
        self.disk_used += record_bytes

    def spilled(self, entry: Entry, place: Place) -> None:
        """It is on disk, too."""
        if self._entries.get(entry.key) is not entry:
            return
        self._put_down(entry, place)
        self.counts.spilled += 1

    def recovered(self, key: Key, digest: bytes, size: int, place: Place) -> None:
        """A record of a former life. The latest of several counts."""
        entry = self._entries.get(key)
        if entry is None:
            entry = Entry(key, size, digest)
            self._enter(entry)
        elif entry.place is not None:
            self._segments[entry.place.segment].entries.discard(entry)
        entry.size, entry.digest = size, digest
        self._put_down(entry, place)

    def _put_down(self, entry: Entry, place: Place) -> None:
        entry.place = place
        self._segments[place.segment].entries.add(entry)
        self._spilled_or_gone(entry)

    def _may_end(self, segment: int) -> bool:
        return not any(
            entry.readers or (entry.pins and entry.block is None) for entry in self._segments[segment].entries
        )

    def _end(self, number: int) -> None:
        segment = self._segments.pop(number)
        self.disk_used -= segment.bytes
        for entry in segment.entries:
            entry.place = None
            if entry.block is not None:
                self._unspilled[entry] = None
                self._unspilled_bytes += entry.cost
            else:
                self.counts.evicted += 1
                self._gone(entry)

    # --- leases -------------------------------------------------------------------------------------------

    def pin(self, lease: bytes, keys: Iterable[Key], until: float) -> int:
        """Keep these from leaving the tier until then, instead of what the lease held before: how many, from
        the first, are here and within what may be pinned."""
        self.release(lease)
        held: list[Entry] = []
        if len(self._leases) >= MAX_LEASES:
            return 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            if not entry.pins:
                if self.pinned_bytes + entry.cost > self._pinnable:
                    break
                self.pinned_bytes += entry.cost
            entry.pins += 1
            held.append(entry)
        if held:
            self._leases[lease] = (until, held)
        return len(held)

    def release(self, lease: bytes) -> None:
        """Unknown ones are none."""
        _, held = self._leases.pop(lease, (0.0, []))
        for entry in held:
            if entry.pins:
                entry.pins -= 1
                if not entry.pins:
                    self.pinned_bytes -= entry.cost

    def expire(self, now: float) -> None:
        for lease in [lease for lease, (until, _) in self._leases.items() if now >= until]:
            self.release(lease)

    @property
    def _pinnable(self) -> float:
        return PINNED_SHARE * (self.arena.budget + self.disk_bytes)

    # --- for tests ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant; raises AssertionError."""
        entries = set(self._entries.values())
        in_memory = {entry for entry in entries if entry.block is not None}
        assert in_memory == {entry for entry in self._memory if self._entries.get(entry.key) is entry}
        assert all(entry.readers for entry in self._memory if entry not in entries)
        assert set(self._unspilled) == {entry for entry in self._memory if entry.place is None}
        assert self._unspilled_bytes == sum(entry.cost for entry in self._unspilled)
        assert all(entry.block is not None or entry.place is not None for entry in entries)
        assert self.disk_used == sum(segment.bytes for segment in self._segments.values()) <= self.disk_bytes
        for number, segment in self._segments.items():
            assert all(entry.place is not None and entry.place.segment == number for entry in segment.entries)
        assert self.pinned_bytes == sum(entry.cost for entry in entries if entry.pins) <= self._pinnable
        for model, hashes in self._complete.items():
            for block_hash in hashes:
                assert any(
                    all(
                        Key(Space(model, part, key.space.parts), block_hash) in self._entries
                        for part in range(key.space.parts)
                    )
                    for key in self._entries
                    if key.space.model == model and key.hash == block_hash
                )
