"""What the tier holds, where, and what has to leave: entries, use, pins, completeness. Pure.

A block is in memory, on disk, or both; `Book` decides which block leaves which place and says so, and others
move the bytes. Time is an argument.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from services.kvstore.tier.arena import Arena, Block
from services.kvstore.tier.entries import (
    Counts,
    Entry,
    Key,
    Place,
    Record,
    Segment,
    Space,
    Spill,
    record_bytes,
)
from services.kvstore.tier.order import Order, Rank
from shared.ids import BlockHash
from shared.tier.frames import NO_LINK, Link

MAX_LEASES = 10_000
STRETCHES = 16
"""A new stretch of time begins when as many uses have come as a 16th of the blocks that are here."""
PINNED_SHARE = 0.5
"""Of the budget of memory and disk together: leases alone must not freeze the tier."""


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
        self._memory: Order[Entry] = Order()
        self._unspilled: Order[Entry] = Order()
        # those of them that are not on disk
        self._unspilled_bytes = 0
        self._on_disk: Order[Entry] = Order()
        self.writing: Entry | None = None
        """On its way to disk."""
        self._holes: dict[int, list[Place]] = {}
        # size → where on disk one of that size was that is gone
        self._stretch = 1
        self._uses = self._uses_of_stretch = 0
        self._segments: OrderedDict[int, Segment] = OrderedDict()
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
        """They were asked for, in the order of their chain: without its first the others are of no use."""
        self._uses_of_stretch += 1
        if self._uses_of_stretch * STRETCHES > len(self._entries):
            self._stretch, self._uses_of_stretch = self._stretch + 1, 0
        for entry in reversed(entries):
            self._renew(entry, self._stretch)

    def _renew(self, entry: Entry, stretch: int) -> None:
        """It was used then, and with it what comes before it in its chain."""
        each: Entry | None = entry
        while each is not None and each.rank.stretch < stretch:
            self._uses += 1
            each.rank = Rank(stretch, -each.link.depth, self._uses)
            for place in (self._memory, self._unspilled, self._on_disk):
                if each in place:
                    place.put(each)
            each = self._entries.get(each.before)

    # --- coming -------------------------------------------------------------------------------------------

    def room(self, size: int, *, waiting: bool, before: Key | None = None) -> Block | Spill | None:
        """Memory for a block, others leaving for it; None: nothing may leave. While `waiting`, one that
        is not on disk yet is named instead of lost. For one that comes behind `before` in its chain, nothing
        is lost that is worth more than it: not that block, and if it is not here, none but such ones."""
        while (block := self.arena.take(size)) is None:
            leaving = self._leaving(size)
            if not leaving:
                return None
            unspilled = [entry for entry in leaving if entry.place is None]
            spilling = waiting and self.spills
            spill = next((entry for entry in unspilled if spilling and self._worth_disk(entry)), None)
            if spilling and unspilled and spill is None and self.writing is not None:
                # The end of the same chain may be on its way to disk, and no more than that.
                return Spill(self.writing)
            lost = unspilled if spill is None else self._lost_to(spill)
            if before is not None and lost:
                stays = before not in self._entries and any(entry.rank.stretch for entry in lost)
                if stays or any(entry.key == before for entry in lost):
                    return None
            if spill is not None:
                return Spill(spill)
            for entry in leaving:
                self._leave_memory(entry)
        return block

    def _leaving(self, size: int) -> list[Entry]:
        """The least recently used block, or with one of another size its whole slab."""
        held: list[Entry] = []
        found: list[Entry] = []

        def may(entry: Entry) -> bool:
            assert entry.block is not None
            if not self._may_leave(entry):
                if entry.pins:
                    held.append(entry)
                return False
            if entry.block.slab.size == size:
                found.append(entry)
                return True
            owners = [block.owner for block in entry.block.slab.blocks]
            slab = [each for each in owners if isinstance(each, Entry) and self._may_leave(each)]
            if len(slab) < len(owners):
                return False
            found.extend(slab)
            return True

        self._memory.first(may)
        # A lease is a use: who is held by one does not stand in the way of the next search.
        for entry in held:
            self._renew(entry, self._stretch)
        return found

    @staticmethod
    def _may_leave(entry: Entry) -> bool:
        """Memory, that is; a pinned block may if the disk has it."""
        return not entry.readers and (entry.place is not None or not entry.pins)

    def add(self, key: Key, digest: bytes, block: Block, link: Link = NO_LINK) -> Entry:
        """Its bytes have arrived in `block`, and are right."""
        entry = Entry(key, block.slab.size, digest, link)
        if link.depth and entry.before not in self._entries:
            self._uses += 1
            entry.rank = Rank(0, -link.depth, self._uses)
        else:
            self.used([entry])
        self._enter(entry)
        self.brought(entry, block)
        self.counts.stored += 1
        return entry

    def brought(self, entry: Entry, block: Block) -> None:
        """It is in memory, too."""
        entry.block, block.owner = block, entry
        self._memory.put(entry)
        if entry.place is None:
            self._unspilled.put(entry)
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
        self._memory.discard(entry)
        self._spilled_or_gone(entry)
        if entry.place is None:
            self.counts.evicted += 1
            self.counts.dropped += self.spills and self._worth_disk(entry)
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
            self._memory.discard(entry)
            self._spilled_or_gone(entry)
        if entry.place is not None:
            self._take_up(entry)

    def _spilled_or_gone(self, entry: Entry) -> None:
        if entry in self._unspilled:
            self._unspilled.discard(entry)
            self._unspilled_bytes -= entry.cost

    # --- the disk -----------------------------------------------------------------------------------------

    def spill_next(self, headroom: int) -> Entry | None:
        """What should go to disk so that `headroom` bytes of memory can be had without losing anything."""
        if self.arena.budget - self._unspilled_bytes >= headroom:
            return None
        entry = self._unspilled.first(lambda entry: not entry.readers)
        return entry if entry is not None and self._worth_disk(entry) else None

    def unspilled_latest_first(self) -> list[Entry]:
        return sorted(self._unspilled, key=lambda entry: entry.rank, reverse=True)

    def hole(self, entry: Entry) -> Place | None:
        """Where on disk it may take the place of one that is gone, or that leaves for it as it ranks lower;
        None: it has to be appended."""
        if not self._holes.get(entry.size) and not self.disk_fits(record_bytes(entry.size)):
            lowest = self._on_disk.first(self._may_leave_disk)
            if lowest is not None and lowest.size == entry.size and lowest.rank < entry.rank:
                self._leave_disk(lowest)
        holes = self._holes.get(entry.size)
        return holes.pop() if holes else None

    def _worth_disk(self, entry: Entry) -> bool:
        """Whether the disk has room for it, or something there that ranks lower."""
        if self._holes.get(entry.size) or self.disk_fits(record_bytes(entry.size)):
            return True
        lowest = self._on_disk.first(self._may_leave_disk)
        return lowest is not None and lowest.rank < entry.rank

    def _lost_to(self, entry: Entry) -> list[Entry]:
        """What leaves the tier when this goes to disk."""
        if self._holes.get(entry.size) or self.disk_fits(record_bytes(entry.size)):
            return []
        lowest = self._on_disk.first(self._may_leave_disk)
        return [lowest] if lowest is not None and lowest.block is None else []

    @staticmethod
    def _may_leave_disk(entry: Entry) -> bool:
        return not entry.readers and (entry.block is not None or not entry.pins)

    def _leave_disk(self, entry: Entry) -> None:
        self._take_up(entry)
        if entry.block is not None:
            self._unspilled.put(entry)
            self._unspilled_bytes += entry.cost
        else:
            self.counts.evicted += 1
            self._gone(entry)

    def _take_up(self, entry: Entry) -> None:
        """It is not on disk any more, and another may be written there."""
        assert entry.place is not None
        if (segment := self._segments.get(entry.place.segment)) is not None:
            segment.entries.discard(entry)
            self._holes.setdefault(entry.size, []).append(entry.place)
        self._on_disk.discard(entry)
        entry.place = None

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
        self._segments.setdefault(segment, Segment()).bytes += record_bytes
        self.disk_used += record_bytes

    def spilled(self, entry: Entry, place: Place) -> None:
        """It is on disk, too."""
        if self._entries.get(entry.key) is not entry:
            self._holes.setdefault(entry.size, []).append(place)
            return
        self._put_down(entry, place)
        self.counts.spilled += 1

    def recovered(self, record: Record, place: Place) -> None:
        """A record of a former life. The latest of several counts."""
        entry = self._entries.get(record.key)
        if entry is None:
            entry = Entry(record.key, record.size, record.digest)
            self._enter(entry)
        elif entry.place is not None:
            self._take_up(entry)
        entry.size, entry.digest, entry.link = record.size, record.digest, record.link
        self._uses += 1
        entry.rank = Rank(record.stretch, -record.link.depth, self._uses)
        self._stretch = max(self._stretch, record.stretch)
        self._put_down(entry, place)

    def settle(self) -> None:
        """All records are recovered. A block may have been used after it was written, and its record does not
        say so, but the records of those behind it do."""
        for entry in sorted(self._entries.values(), key=lambda entry: entry.rank, reverse=True):
            if (before := self._entries.get(entry.before)) is not None:
                self._renew(before, entry.rank.stretch)

    def _put_down(self, entry: Entry, place: Place) -> None:
        entry.place = place
        self._segments[place.segment].entries.add(entry)
        self._on_disk.put(entry)
        self._spilled_or_gone(entry)

    def _may_end(self, segment: int) -> bool:
        return not any(
            entry.readers or (entry.pins and entry.block is None) for entry in self._segments[segment].entries
        )

    def _end(self, number: int) -> None:
        segment = self._segments.pop(number)
        self.disk_used -= segment.bytes
        for size, holes in self._holes.items():
            self._holes[size] = [place for place in holes if place.segment != number]
        for entry in segment.entries:
            self._leave_disk(entry)

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
        on_disk = {entry for segment in self._segments.values() for entry in segment.entries}
        assert set(self._on_disk) == on_disk
        holes = [hole for each in self._holes.values() for hole in each]
        places = [entry.place for entry in on_disk] + holes
        assert len(places) == len(set(places))
        for entry in entries:
            before = self._entries.get(entry.before)
            assert before is None or before.link.depth >= entry.link.depth or before.rank > entry.rank
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
