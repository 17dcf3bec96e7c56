"""Blocks on disk: checksummed records, appended to segment files or written over others of the same size.

A record is a header of 512 bytes, with a checksum of its own, and the block's bytes, whose digest is in the
header. A crash in the middle leaves a torn record at the end of one file: its header or its length shows it.
Nothing is flushed to the device: after a loss of power some blocks are wrong, and misses by their digests.
"""

import contextlib
import fcntl
import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from services.kvstore.tier.entries import HEADER_BYTES, Key, Place, Record, Space, record_bytes
from shared.ids import BlockHash
from shared.runtime.settings import PREFIX, CannotStart
from shared.tier.frames import MAX_BLOCK_BYTES, MAX_MODEL_BYTES, Link

SEGMENT_BYTES = 256 << 20
SEGMENTS_LEAST = 16
"""The oldest segment leaves as a whole: this part of the budget at most."""

_MAGIC = b"hortseg1"
_FIELDS = struct.Struct(f"<8sHHHxxQ32s32s{MAX_MODEL_BYTES}s32sIQ")
_CHECK_BYTES = 32


class DiskFault(OSError):
    """The disk did not do what it was told; the message says with which file."""


@dataclass(frozen=True)
class Found:
    """A record of a former life, by its header; its bytes are verified when they are read."""

    record: Record
    place: Place


class Segments:
    """One process's segment files in `folder`. Blocking; raises `DiskFault`. One thread at a time appends."""

    def __init__(self, folder: Path, budget: int) -> None:
        """Raises `CannotStart` if the folder cannot be used or another process uses it."""
        self._folder = folder
        self._segment_bytes = max(1, min(SEGMENT_BYTES, budget // SEGMENTS_LEAST))
        self.current: int | None = None
        """The segment that grows."""
        self._fd = -1
        self._end = 0
        self._next = 1
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CannotStart(
                f"{PREFIX}TIER_DIR={folder} cannot be used: {error.strerror}; "
                "name a folder that we may write to"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise CannotStart(
                f"{PREFIX}TIER_DIR={folder} is used by another kvstore: give each a folder of its own"
            ) from None

    def scan(self) -> Iterator[Found | int]:
        """Records of former lives, oldest first, each file's after its number. A file that holds none is
        removed. What follows a torn or damaged header in its file is lost."""
        for number in self._numbers():
            self._next = number + 1
            found = list(self._records(number))
            if not found:
                self.remove([number])
                continue
            yield number
            yield from found

    def append(self, record: Record, data: memoryview) -> Place:
        """Write a record; `current` is its segment then. Nothing remains of one that failed."""
        start = 0
        try:
            if self.next_segment(record.size) is None:
                self._begin()
            start = self._end
            _write(self._fd, [memoryview(_header(record)), data], start)
            self._end += record_bytes(record.size)
        except OSError as error:
            self._abandon(start)
            raise DiskFault(f"cannot write to {self._folder}: {error.strerror}") from None
        assert self.current is not None
        return Place(self.current, start + HEADER_BYTES)

    def replace(self, place: Place, record: Record, data: memoryview) -> Place:
        """Write a record over another of the same size. Of one that failed, or was torn, a header may remain
        whose bytes have another digest."""
        try:
            fd = os.open(self._file(place.segment), os.O_WRONLY | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_size < place.offset + record.size:
                    # Writing would leave a gap, at which the next life would cut the file off.
                    raise DiskFault(f"{self._file(place.segment)} is shorter than it was")
                # The bytes first: whatever is read between the two has a digest that does not fit.
                _write(fd, [data], place.offset)
                _write(fd, [memoryview(_header(record))], place.offset - HEADER_BYTES)
            finally:
                os.close(fd)
        except DiskFault:
            raise
        except OSError as error:
            raise DiskFault(f"cannot write to {self._file(place.segment)}: {error.strerror}") from None
        return place

    def next_segment(self, size: int) -> int | None:
        """Into which segment `append` would write a block of that size; None: a fresh one."""
        fits = self.current is not None and self._end + record_bytes(size) <= self._segment_bytes
        return self.current if fits else None

    def read(self, place: Place, into: memoryview) -> bool:
        """Fill `into` with a block's bytes, whatever they are; False where the file ends too early."""
        try:
            fd = os.open(self._file(place.segment), os.O_RDONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < len(into):
                    got = os.preadv(fd, [into[done:]], place.offset + done)
                    if not got:
                        return False
                    done += got
            finally:
                os.close(fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise DiskFault(f"cannot read {self._file(place.segment)}: {error.strerror}") from None
        return True

    def remove(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            with contextlib.suppress(OSError):
                self._file(number).unlink()

    def close(self) -> None:
        self._close_current()
        os.close(self._lock)

    def _begin(self) -> None:
        self._close_current()
        # A file of that name can only be one that a former life could not remove.
        self._fd = os.open(
            self._file(self._next), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
        )
        self.current, self._end = self._next, 0
        self._next += 1

    def _abandon(self, end: int) -> None:
        """What follows goes into a fresh file: what is behind the end of this one is in doubt."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, end)
        self._close_current()

    def _close_current(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.current = -1, None

    def _numbers(self) -> list[int]:
        names = [re.fullmatch(r"(\d{1,15})\.segment", path.name) for path in self._folder.iterdir()]
        return sorted(int(name[1]) for name in names if name)

    def _records(self, number: int) -> Iterator[Found]:
        try:
            with self._file(number).open("r+b", buffering=0) as file:
                length = os.fstat(file.fileno()).st_size
                start = 0
                while start < length:
                    read = _read_header(os.pread(file.fileno(), HEADER_BYTES, start))
                    if read is None or start + record_bytes(read.size) > length:
                        # It would count against the budget of nobody.
                        file.truncate(start)
                        return
                    yield Found(read, Place(number, start + HEADER_BYTES))
                    start += record_bytes(read.size)
        except OSError:
            return

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:08}.segment"


def _write(fd: int, parts: list[memoryview], at: int) -> None:
    while parts:
        written = os.pwritev(fd, parts, at)
        at += written
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][written:]


def _header(record: Record) -> bytes:
    space, block_hash = record.key
    fields = _FIELDS.pack(
        _MAGIC, space.part, space.parts, len(space.model.encode()), record.size, block_hash, record.digest,
        space.model.encode(), record.link.parent, record.link.depth, record.stretch,
    )  # fmt: skip
    body = fields.ljust(HEADER_BYTES - _CHECK_BYTES, b"\0")
    return body + sha256(body).digest()


def _read_header(raw: bytes) -> Record | None:
    if len(raw) != HEADER_BYTES or sha256(raw[:-_CHECK_BYTES]).digest() != raw[-_CHECK_BYTES:]:
        return None
    magic, part, parts, length, size, block_hash, digest, model, *link, stretch = _FIELDS.unpack_from(raw)
    if magic != _MAGIC or not 0 < size <= MAX_BLOCK_BYTES or not part < parts:
        return None
    key = Key(Space(model[:length].decode(errors="replace"), part, parts), BlockHash(block_hash))
    return Record(key, size, digest, Link(*link), stretch)
