"""The tier's store with its disk: restarts, torn files, failing disks, and many at once."""

import asyncio
import errno
import os
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from services.kvstore.tier import segments as disk
from services.kvstore.tier import store as shell
from services.kvstore.tier.arena import cost
from services.kvstore.tier.entries import Key, Place, Record, Space, record_bytes
from services.kvstore.tier.segments import DiskFault, Found, Segments
from services.kvstore.tier.store import Receive, TierStore
from shared.ids import BlockHash
from shared.runtime.settings import CannotStart
from shared.tier.frames import Put
from tests.support.tier import block_hash, content

SIZE = 4096
SPACE = Space("m", 0, 1)
RECORD = record_bytes(SIZE)


@asynccontextmanager
async def opened(folder: Path | None, memory: int = 8, disk_records: int = 64, flush_s: float = 5.0) -> Any:
    store = TierStore(memory * cost(SIZE), disk_records * RECORD, folder)
    await store.open()
    try:
        yield store
    finally:
        await store.close(flush_s)
        store.book.check()


def arriving(number: int) -> Receive:
    async def receive(room: memoryview | None) -> None:
        await asyncio.sleep(0)
        if room is not None:
            room[:] = content(number)

    return receive


async def put(store: TierStore, number: int) -> Put:
    return await store.put(
        SPACE, block_hash(number), sha256(content(number)).digest(), SIZE, arriving(number)
    )


async def get(store: TierStore, number: int) -> bytes | None:
    async with store.reading(SPACE, block_hash(number)) as entry:
        return None if entry is None or entry.block is None else bytes(entry.block.view)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_blocks_that_memory_has_no_room_for_come_back_from_disk(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for n in range(40):
            assert await put(store, n) is Put.STORED
        assert [await get(store, n) for n in range(40)] == [content(n) for n in range(40)]
        assert store.book.arena.used <= 8 * cost(SIZE)
        assert store.book.counts.evicted == 0
        assert store.book.counts.disk_reads >= 32


async def test_a_full_disk_loses_the_oldest_and_keeps_to_its_budget(tmp_path: Path) -> None:
    async with opened(tmp_path, disk_records=20) as store:
        for n in range(60):
            assert await put(store, n) is Put.STORED
        assert await get(store, 0) is None
        assert await get(store, 59) == content(59)
        assert sum(file.stat().st_size for file in segment_files(tmp_path)) <= 20 * RECORD
        kept = [n for n in range(60) if store.have(SPACE, [block_hash(n)])[0]]
        assert len(kept) >= 20
        # In memory each takes the place of another, for which the disk may have no room without losing one.
        got = {n: await get(store, n) for n in kept}
        assert all(data in (None, content(n)) for n, data in got.items())
        assert sum(data is not None for data in got.values()) >= 15


async def test_a_tier_without_a_disk_forgets_what_memory_has_no_room_for() -> None:
    async with opened(None) as store:
        for n in range(20):
            assert await put(store, n) is Put.STORED
        assert store.have(SPACE, [block_hash(n) for n in range(20)]) == [False] * 12 + [True] * 8


async def test_everything_is_there_again_after_a_graceful_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for n in range(30):
            await put(store, n)
    async with opened(tmp_path) as store:
        assert {h for _, h, came in store.book.changes if came} == {block_hash(n) for n in range(30)}
        assert store.changed.is_set()
        assert [await get(store, n) for n in range(30)] == [content(n) for n in range(30)]


async def test_a_flush_that_may_not_take_long_keeps_the_latest(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=32, disk_records=9) as store:
        for n in range(24):
            await put(store, n)
    async with opened(tmp_path, memory=32, disk_records=9) as store:
        kept = [n for n in range(24) if store.have(SPACE, [block_hash(n)])[0]]
        assert kept == list(range(24 - len(kept), 24))
        assert len(kept) >= 8
    async with opened(tmp_path / "b", memory=32, flush_s=-1.0) as store:
        await put(store, 1)
    async with opened(tmp_path / "b") as store:
        assert not store.book.blocks["disk"]


async def test_a_smaller_budget_after_a_restart_is_kept_to(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for n in range(40):
            await put(store, n)
    async with opened(tmp_path, disk_records=10) as store:
        assert store.book.disk_used <= 10 * RECORD
        assert sum(file.stat().st_size for file in segment_files(tmp_path)) <= 10 * RECORD


def segment_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.segment"))


@pytest.mark.parametrize("cut", [1, 100, SIZE, SIZE + 1, SIZE + 400, RECORD - 1])
async def test_a_record_torn_by_a_crash_is_a_miss_and_costs_no_other(tmp_path: Path, cut: int) -> None:
    async with opened(tmp_path) as store:
        for n in range(3):
            await put(store, n)
    last = segment_files(tmp_path)[-1]
    whole = last.stat().st_size
    os.truncate(last, whole - cut)
    async with opened(tmp_path) as store:
        found = store.have(SPACE, [block_hash(n) for n in range(3)])
        assert sum(found) == 2
        # What is left of the torn one does not count against a budget that does not know of it.
        assert sum(file.stat().st_size for file in segment_files(tmp_path)) == store.book.disk_used
        for n, there in enumerate(found):
            assert await get(store, n) == (content(n) if there else None)
        assert (whole - RECORD) % RECORD == 0
        for n in range(3):
            assert await put(store, n) in (Put.STORED, Put.HAD)
            assert await get(store, n) == content(n)


async def test_damage_on_disk_is_a_miss_whatever_byte_it_hits(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for n in range(4):
            await put(store, n)
    random_ = random.Random(5)
    for _ in range(12):
        file = random_.choice(segment_files(tmp_path))
        raw = bytearray(file.read_bytes())
        raw[random_.randrange(len(raw))] ^= 1 << random_.randrange(8)
        file.write_bytes(raw)
        async with opened(tmp_path) as store:
            for n in range(4):
                assert await get(store, n) in (None, content(n))
                assert await put(store, n) in (Put.STORED, Put.HAD)
                assert await get(store, n) == content(n)


@pytest.mark.parametrize("byte", [0, 8, 10, 12, 16, 24, 40, 56, 88, 300, 479, 480, 511])
def test_a_damaged_header_never_makes_a_block_pass_for_another(tmp_path: Path, byte: int) -> None:
    segments = Segments(tmp_path, 64 * RECORD)
    list(segments.scan())
    key = Key(Space("m", 1, 4), BlockHash(block_hash(1)))
    data = content(1)
    segments.append(Record(key, SIZE, sha256(data).digest()), memoryview(data))
    segments.close()
    (file,) = segment_files(tmp_path)
    for bit in range(8):
        raw = bytearray(file.read_bytes())
        assert len(raw) == RECORD
        raw[byte] ^= 1 << bit
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / "00000001.segment").write_bytes(raw)
        again = Segments(tmp_path / "b", 64 * RECORD)
        assert list(again.scan()) == []
        again.close()


async def test_damage_is_counted_told_and_removed(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, 1)
    (file,) = segment_files(tmp_path)
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    async with opened(tmp_path) as store:
        store.book.changes.clear()
        assert await get(store, 1) is None
        assert store.book.counts.corrupt == 1
        assert store.book.changes == [("m", block_hash(1), False)]
        assert store.have(SPACE, [block_hash(1)]) == [False]


async def test_files_that_vanish_under_a_running_tier_are_misses(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for n in range(30):
            await put(store, n)
        for file in segment_files(tmp_path):
            file.unlink()
        got = [await get(store, n) for n in range(30)]
        assert all(each in (None, content(n)) for n, each in enumerate(got))
        assert None in got


async def test_a_disk_without_room_costs_blocks_and_never_waits_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, full = os.pwritev, [True]

    def pwritev(fd: int, parts: list[Any], offset: int) -> int:
        if full[0]:
            real(fd, [memoryview(parts[-1])[:10]], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, parts, offset)

    monkeypatch.setattr(disk.os, "pwritev", pwritev)
    async with opened(tmp_path, flush_s=0.0) as store:
        began = time.monotonic()
        for n in range(40):
            assert await put(store, n) is Put.STORED
        assert time.monotonic() - began < 5
        assert store.book.counts.dropped >= 30
        assert all(file.stat().st_size == 0 for file in segment_files(tmp_path))
        full[0] = False
        monkeypatch.setattr(shell, "REST_S", 0.0)
        store._rest_until = float("-inf")
        for n in range(40, 60):
            assert await put(store, n) is Put.STORED
        assert [await get(store, n) for n in range(45, 60)] == [content(n) for n in range(45, 60)]


async def test_a_slow_disk_is_waited_for_a_while_and_then_costs_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "PATIENCE_S", 0.05)
    real = Segments.append

    def append(self: Segments, *args: Any) -> Place:
        time.sleep(0.2)
        return real(self, *args)

    monkeypatch.setattr(Segments, "append", append)
    async with opened(tmp_path, flush_s=0.0) as store:
        for n in range(20):
            assert await put(store, n) is Put.STORED
        assert store.book.counts.dropped > 0
        assert await get(store, 19) == content(19)


async def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    async with opened(tmp_path):
        with pytest.raises(CannotStart, match="used by another kvstore"):
            await TierStore(SIZE, RECORD, tmp_path).open()
    async with opened(tmp_path):
        pass


async def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotStart, match="name a folder that we may write to"):
        await TierStore(SIZE, RECORD, tmp_path / "file").open()


async def test_other_peoples_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "12.segment.bak").write_text("mine")
    (tmp_path / "00000007.segment").write_bytes(b"none of ours" * 100)
    async with opened(tmp_path) as store:
        await put(store, 1)
    assert (tmp_path / "notes.txt").read_text() == (tmp_path / "12.segment.bak").read_text() == "mine"
    async with opened(tmp_path) as store:
        assert await get(store, 1) == content(1)


async def test_the_latest_record_of_a_block_counts(tmp_path: Path) -> None:
    one = Segments(tmp_path, 100 * RECORD)
    key = Key(SPACE, BlockHash(block_hash(1)))
    list(one.scan())
    for data in (content(8), content(9)):
        one.append(Record(key, SIZE, sha256(data).digest()), memoryview(data))
    one.close()
    async with opened(tmp_path) as store:
        assert await get(store, 1) == content(9)
        assert store.book.blocks["disk"] == 1


def test_segments_give_back_what_was_appended_after_any_crash(tmp_path: Path) -> None:
    written = {}
    segments = Segments(tmp_path, 32 * RECORD)
    list(segments.scan())
    for n in range(20):
        key = Key(Space("modèle", n % 3, 3), BlockHash(block_hash(n)))
        size = 100 + 777 * n % 3000
        written[key] = content(n, size)
        segments.append(Record(key, size, sha256(written[key]).digest()), memoryview(written[key]))
    segments.close()
    again = Segments(tmp_path, 32 * RECORD)
    for found in again.scan():
        if isinstance(found, Found):
            room = memoryview(bytearray(found.record.size))
            assert again.read(found.place, room)
            assert bytes(room) == written.pop(found.record.key)
    assert written == {}
    again._folder = tmp_path / "gone"
    with pytest.raises(DiskFault):
        again.append(Record(Key(SPACE, BlockHash(block_hash(1))), 1, b"d" * 32), memoryview(b"x"))
    again.close()


async def test_two_who_bring_the_same_block_at_once_bring_it_once() -> None:
    async with opened(None) as store:
        ended = await asyncio.gather(*(put(store, 1) for _ in range(5)))
        assert ended.count(Put.STORED) == 1
        assert set(ended) <= {Put.STORED, Put.FULL, Put.HAD}
        assert store.book.arena.used == cost(SIZE)


async def test_a_block_that_does_not_arrive_leaves_nothing() -> None:
    async with opened(None) as store:

        async def fails(room: memoryview | None) -> None:
            raise EOFError

        with pytest.raises(EOFError):
            await store.put(SPACE, block_hash(1), b"d" * 32, SIZE, fails)
        assert store.book.arena.used == 0
        assert await put(store, 1) is Put.STORED


async def test_a_block_under_a_hash_of_another_size_is_replaced() -> None:
    async with opened(None) as store:
        await put(store, 1)
        data = content(1, 100)

        async def receive(room: memoryview | None) -> None:
            assert room is not None
            room[:] = data

        assert await store.put(SPACE, block_hash(1), sha256(data).digest(), 100, receive) is Put.STORED
        assert await get(store, 1) == data


@pytest.mark.parametrize("seed", range(4))
async def test_many_at_once_get_the_right_bytes_or_none(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    print("seed", seed)
    async with opened(tmp_path, disk_records=30) as store:

        async def one() -> None:
            for _ in range(60):
                number = random_.randrange(45)
                match random_.randrange(5):
                    case 0 | 1:
                        assert await put(store, number) in (Put.STORED, Put.HAD, Put.FULL)
                    case 2 | 3:
                        assert await get(store, number) in (None, content(number))
                    case _:
                        lease = bytes([random_.randrange(3)]) * 16
                        store.pin(SPACE, lease, [block_hash(number)], 0.01)

        async def give_up(work: Callable[[], Awaitable[None]]) -> None:
            try:
                async with asyncio.timeout(random_.random() * 0.2):
                    await work()
            except TimeoutError:
                pass

        async with AsyncExitStack():
            await asyncio.gather(*(one() for _ in range(6)), *(give_up(one) for _ in range(6)))
        await until(lambda: not store._loading)
        store.book.check()
        # One may be on its way to disk; nobody else holds any.
        await until(lambda: not any(entry.readers for entry in store.book._entries.values()))
    async with opened(tmp_path, disk_records=30) as store:
        for n in range(45):
            assert await get(store, n) in (None, content(n))
