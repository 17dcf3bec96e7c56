"""Blocks of the second tier with their bytes: arriving, being read, going to disk and coming back from it.

The book decides; here bytes move, with hashing and disk work in threads. In both directions only blocks pass
whose digest was checked.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import structlog

from services.kvstore.tier.arena import Block
from services.kvstore.tier.book import Book
from services.kvstore.tier.entries import Entry, Key, Space, Spill, record_bytes
from services.kvstore.tier.segments import DiskFault, Found, Segments
from shared.ids import BlockHash
from shared.tier.frames import NO_LINK, Link, Put

T = TypeVar("T")

log = structlog.get_logger()

HEADROOM = 1 / 8
"""Of memory: so much can be had at any moment without losing a block, free or on disk already."""
PATIENCE_S = 2.0
"""How long a block that arrives waits for the disk to take another one."""
REST_S = 10.0
"""How long a disk that failed is left alone."""

HASH_INLINE_BYTES = 1 << 20
"""A thread takes a quarter of a millisecond to be handed a block and to answer; hashing goes at 1.2 GB/s."""

Receive = Callable[[memoryview | None], Awaitable[None]]
"""Fills the room with a block's bytes, from wherever they come, or throws them away where there is none;
raises if they do not come."""


class TierStore:
    """`open` before anything else, `close` at the end. Everything belongs to one event loop."""

    def __init__(
        self,
        memory_bytes: int,
        disk_bytes: int = 0,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.book = Book(memory_bytes, disk_bytes if folder is not None else 0)
        self._folder = folder
        self._clock = clock
        self._segments: Segments | None = None
        self._hashing = ThreadPoolExecutor(2, "tier")
        self._writing = ThreadPoolExecutor(1, "tier-disk")
        self._arriving: set[Key] = set()
        self._loading: dict[Key, asyncio.Future[None]] = {}
        self._wanted: Entry | None = None
        # Somebody waits for its being on disk.
        self._spill = asyncio.Event()
        self._progress = asyncio.Event()
        # set, and replaced, whenever a block has reached the disk or failed to
        self._rest_until = float("-inf")
        self._closing = False
        self._spiller: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()
        """Set whenever the book has changes to tell."""

    async def open(self) -> None:
        """Take up what is on disk. Raises `CannotStart`."""
        if self._folder is None:
            return
        began = time.monotonic()
        self._segments = segments = Segments(self._folder, self.book.disk_bytes)
        number = 0
        for each in await self._in(self._writing, lambda: list(segments.scan())):
            if isinstance(each, Found):
                self.book.written(record_bytes(each.record.size), number)
                self.book.recovered(each.record, each.place)
            else:
                number = each
        self.book.settle()
        await self._disk_room(0)
        if number:
            log.info(
                "second tier taken up from disk",
                blocks=self.book.blocks["disk"],
                bytes=self.book.disk_used,
                seconds=round(time.monotonic() - began, 3),
            )
        self._tell()
        self._spiller = asyncio.ensure_future(self._spill_on())

    async def close(self, within_s: float = 0.0) -> None:
        """Write what only memory holds to disk, the most recently used first, as far as disk and time allow.
        Nobody may be connected any more."""
        self._closing = True
        if self._loading:
            await asyncio.wait(self._loading.values())
        if self._spiller is not None:
            self._spill.set()
            await self._spiller
            await self._flush(time.monotonic() + within_s)
        self._hashing.shutdown()
        self._writing.shutdown()
        if self._segments is not None:
            self._segments.close()

    # --- what connections ask -----------------------------------------------------------------------------

    def have(self, space: Space, hashes: Sequence[bytes]) -> list[bool]:
        found = [self.book.find(Key(space, BlockHash(each))) for each in hashes]
        self.book.used([entry for entry in found if entry is not None])
        return [entry is not None for entry in found]

    async def put(
        self,
        space: Space,
        block_hash: bytes,
        digest: bytes,
        size: int,
        receive: Receive,
        link: Link = NO_LINK,
    ) -> Put:
        """`receive` is awaited in any case, once. `FULL` also where the same block is just arriving, and for
        the end of a chain that has no room for its end."""
        key = Key(space, BlockHash(block_hash))
        counts = self.book.counts
        entry = self.book.find(key)
        if entry is not None and entry.size != size:  # its hash covers what decides the size: it is not right
            self._damaged(entry, f"{entry.size} bytes instead of {size}")
        elif entry is not None:
            self.book.used([entry])
            counts.had += 1
            await receive(None)
            return Put.HAD
        if key in self._arriving:
            await receive(None)
            return Put.FULL
        self._arriving.add(key)
        block: Block | None = None
        try:
            before = Key(space, BlockHash(link.parent)) if link.depth else None
            followed = before is not None and self.book.find(before) is not None
            block = await self._room(size, before)
            if block is None:
                counts.refused += 1
                await receive(None)
                return Put.FULL
            await receive(block.view)
            counts.bytes_in += size
            if await self._digest(block.view) != digest:
                counts.wrong += 1
                return Put.WRONG
            if before is not None and followed and self.book.find(before) is None:
                # It left meanwhile, because everything else was worth more.
                counts.refused += 1
                return Put.FULL
            self.book.add(key, digest, block, link)
            block = None
            self._tell()
            return Put.STORED
        finally:
            self._arriving.discard(key)
            if block is not None:
                self.book.arena.give(block)

    @asynccontextmanager
    async def reading(self, space: Space, block_hash: bytes) -> AsyncIterator[Entry | None]:
        """A block in memory whose bytes were just verified, and that stays there meanwhile; None: a miss."""
        entry = await self._found(Key(space, BlockHash(block_hash)))
        try:
            yield entry
        finally:
            if entry is not None:
                self.book.read_ends(entry)

    def pin(self, space: Space, lease: bytes, hashes: Sequence[bytes], lease_s: float) -> int:
        now = self._clock()
        self.book.expire(now)
        return self.book.pin(lease, [Key(space, BlockHash(each)) for each in hashes], now + lease_s)

    # --- reading ------------------------------------------------------------------------------------------

    async def _found(self, key: Key) -> Entry | None:
        entry = self.book.find(key)
        if entry is not None and entry.block is None:
            # Before others leave for it: they might be what comes before it.
            self.book.used([entry])
            if key not in self._loading:
                self.book.read_begins(entry)  # until it is loaded, its segment stays
                # A task of its own: one who gives up must not leave a thread that fills memory given back.
                self._loading[key] = asyncio.ensure_future(self._load(entry))
            await asyncio.shield(self._loading[key])
            entry = self.book.find(key)
        if entry is None or entry.block is None:
            self.book.counts.misses += 1
            return None
        self.book.read_begins(entry)
        try:
            right = await self._digest(entry.block.view) == entry.digest
        except BaseException:
            self.book.read_ends(entry)
            raise
        if not right:
            self.book.read_ends(entry)
            self._damaged(entry, "its digest is another")
            self.book.counts.misses += 1
            return None
        self.book.used([entry])
        self.book.counts.hits += 1
        self.book.counts.bytes_out += entry.size
        return entry

    async def _load(self, entry: Entry) -> None:
        """From disk into memory, if there is room and the bytes are all there. Whether they are right is for
        every reader to see. Ends the read that began before."""
        assert self._segments is not None
        assert entry.place is not None
        segments, place = self._segments, entry.place
        block: Block | None = None
        try:
            block = await self._room(entry.size)
            if block is None:
                return
            view = block.view
            if await self._in(self._hashing, lambda: segments.read(place, view)):
                self.book.counts.disk_reads += 1
                self.book.brought(entry, block)
                block = None
            else:
                self._damaged(entry, "its file is shorter")
        except DiskFault as error:
            self._damaged(entry, str(error))
        finally:
            if block is not None:
                self.book.arena.give(block)
            self.book.read_ends(entry)
            del self._loading[entry.key]

    def _damaged(self, entry: Entry, why: str) -> None:
        on_disk = entry.place is not None
        log.warning("a block of the second tier is not what was stored", why=why, on_disk=on_disk)
        self.book.counts.corrupt += 1
        self.book.drop(entry)
        self._tell()

    # --- making room --------------------------------------------------------------------------------------

    async def _room(self, size: int, before: Key | None = None) -> Block | None:
        """Memory for a block, see `Book.room`. The disk is waited for a while, so that what leaves is not
        lost."""
        patient_until = self._clock() + PATIENCE_S
        self.book.expire(self._clock())
        while True:
            left_s = patient_until - self._clock()
            room = self.book.room(size, waiting=self._can_spill and left_s > 0, before=before)
            if not isinstance(room, Spill):
                self._tell()
                return room
            self._wanted = room.entry
            self._spill.set()
            progress = self._progress
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(progress.wait(), left_s)

    @property
    def _can_spill(self) -> bool:
        return self._segments is not None and not self._closing and self._clock() >= self._rest_until

    async def _spill_on(self) -> None:
        while not self._closing:
            await self._spill.wait()
            self._spill.clear()
            while self._can_spill and (entry := self._next_to_spill()) is not None:
                if not await self._write(entry):
                    self._rest_until = self._clock() + REST_S
                self._progress.set()
                self._progress = asyncio.Event()

    def _next_to_spill(self) -> Entry | None:
        wanted, self._wanted = self._wanted, None
        if wanted is not None and wanted.block is not None and wanted.place is None:
            return wanted
        return self.book.spill_next(int(HEADROOM * self.book.arena.budget))

    async def _write(self, entry: Entry) -> bool:
        """Append a block in memory to the disk. False: the disk failed, or nothing there may leave for it."""
        assert self._segments is not None
        assert entry.block is not None
        segments, view, total = self._segments, entry.block.view, record_bytes(entry.size)
        record = entry.record
        hole = self.book.hole(entry)
        if hole is None and not await self._disk_room(total):
            log.warning("the second tier's disk has no room that may be freed", wanted=total, rest_s=REST_S)
            return False
        self.book.read_begins(entry)
        self.book.writing = entry
        try:
            place = await self._in(
                self._writing,
                lambda: segments.replace(hole, record, view) if hole else segments.append(record, view),
            )
        except DiskFault as error:
            log.warning("the second tier's disk fails", error=str(error), rest_s=REST_S)
            return False
        else:
            if hole is None:
                self.book.written(total, place.segment)
            self.book.spilled(entry, place)
            return True
        finally:
            self.book.writing = None
            self.book.read_ends(entry)
            self._tell()

    async def _disk_room(self, record: int) -> bool:
        assert self._segments is not None
        left: list[int] = []
        while not self.book.disk_fits(record):
            oldest = self.book.end_oldest(self._segments.current)
            if oldest is None:
                break
            left.append(oldest)
        if left:
            segments = self._segments
            await self._in(self._writing, lambda: segments.remove(left))
            self._tell()
        return self.book.disk_fits(record)

    async def _flush(self, until: float) -> None:
        entries, written, total = self.book.unspilled_latest_first(), 0, 0
        for entry in entries:
            total += record_bytes(entry.size)
            # What was just written must not leave for what was used less recently.
            if total > self.book.disk_bytes or time.monotonic() > until or not await self._write(entry):
                break
            written += 1
        if entries:
            log.info("second tier left on disk", written=written, lost=len(entries) - written)

    # --- hands --------------------------------------------------------------------------------------------

    async def _digest(self, view: memoryview) -> bytes:
        if len(view) <= HASH_INLINE_BYTES:
            return sha256(view).digest()
        return await self._in(self._hashing, lambda: sha256(view).digest())

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def _tell(self) -> None:
        if self.book.changes:
            self.changed.set()
        if self._segments is not None:
            self._spill.set()
