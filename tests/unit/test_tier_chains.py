"""Chains leave the tier from their end, from memory and from disk; what is left of each is its beginning."""

import errno
import os
import random
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.tier import segments as disk
from services.kvstore.tier import store as shell
from services.kvstore.tier.arena import Block, cost
from services.kvstore.tier.book import Book
from services.kvstore.tier.entries import Entry, Key, Place, Record, Space, Spill, record_bytes
from services.kvstore.tier.order import Order, Rank
from services.kvstore.tier.segments import DiskFault, Found, Segments
from services.kvstore.tier.store import TierStore
from shared.ids import BlockHash
from shared.tier.frames import Link, Put
from tests.support.tier import block_hash, content

SIZE = 1024
SPACE = Space("m", 0, 1)


def name(chain: int, depth: int) -> bytes:
    return block_hash(1000 * (chain + 1) + depth)


def key(chain: int, depth: int) -> Key:
    return Key(SPACE, BlockHash(name(chain, depth)))


def link(chain: int, depth: int) -> Link:
    return Link(name(chain, depth - 1), depth)


# --- the order ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class One:
    rank: Rank


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 3)), max_size=300))
def test_the_first_of_an_order_is_that_of_a_sorted_list(moves: list[tuple[int, int, int]]) -> None:
    order: Order[One] = Order()
    everyone = [One(Rank(0, 0, n)) for n in range(10)]
    there: set[One] = set()
    for use, (which, what, stretch) in enumerate(moves):
        one = everyone[which]
        if what == 0:
            order.discard(one)
            there.discard(one)
        elif what == 1 or one in there:
            one.rank = Rank(stretch, -which % 3, 100 + use)
            order.put(one)
            there.add(one)
        odd = [each for each in sorted(there, key=lambda each: each.rank) if everyone.index(each) % 2]
        assert order.first(lambda each: everyone.index(each) % 2 == 1) is (odd[0] if odd else None)
        assert set(order) == there
        assert len(order._heap) <= 2 * len(there) + 65


# --- memory and disk ----------------------------------------------------------------------------------------

CHAINS = 5


class Tier:
    """A book with somebody who moves the bytes, in no time."""

    def __init__(self, memory: int, disk: int) -> None:
        self.book = Book(memory * cost(SIZE), disk * record_bytes(SIZE))
        self.lengths = [0] * CHAINS
        self.appended = 0

    def room(self, before: Key | None) -> Block | None:
        while isinstance(room := self.book.room(SIZE, waiting=True, before=before), Spill):
            self.spill(room.entry)
        return room

    def spill(self, entry: Entry) -> None:
        if (hole := self.book.hole(entry)) is None:
            assert self.book.disk_fits(record_bytes(SIZE)), "a segment would have to leave"
            self.appended += 1
            hole = Place(self.appended // 4, self.appended)
            self.book.written(record_bytes(SIZE), hole.segment)
        self.book.spilled(entry, hole)

    def store(self, chain: int, amount: int) -> None:
        """Its next blocks, as a worker would: as far as the tier keeps them."""
        for _ in range(amount):
            depth = len(self.held(chain))
            before = key(chain, depth - 1) if depth else None
            block = self.room(before)
            if block is None:
                return
            self.book.add(key(chain, depth), b"d" * 32, block, link(chain, depth))

    def use(self, chain: int, amount: int) -> None:
        found = [self.book.find(key(chain, depth)) for depth in range(amount)]
        self.book.used([entry for entry in found if entry is not None])

    def fetch(self, chain: int, depth: int) -> None:
        entry = self.book.find(key(chain, depth))
        if entry is None:
            return
        self.book.used([entry])
        if entry.block is None:
            self.book.read_begins(entry)
            if (block := self.room(None)) is not None:
                self.book.brought(entry, block)
            self.book.read_ends(entry)

    def ahead(self, chain: int, amount: int) -> None:
        """Blocks go to disk ahead of need."""
        if self.book.spills and (entry := self.book.spill_next(amount * cost(SIZE))) is not None:
            self.spill(entry)

    def pin(self, chain: int, amount: int) -> None:
        count = self.book.pin(bytes([chain]), [key(chain, depth) for depth in range(amount)], 1.0)
        assert count <= len(self.held(chain))

    def release(self, chain: int, amount: int) -> None:
        self.book.release(bytes([chain]))

    def held(self, chain: int) -> list[int]:
        return [depth for depth in range(60) if self.book.find(key(chain, depth)) is not None]


MOVES = [Tier.store, Tier.store, Tier.store, Tier.use, Tier.fetch, Tier.ahead, Tier.pin, Tier.release]


@settings(max_examples=300, deadline=None, report_multiple_bugs=False)
@given(
    memory=st.integers(4, 20),
    disk=st.sampled_from([0, 0, 3, 8, 25]),
    moves=st.lists(
        st.tuples(st.sampled_from(MOVES), st.integers(0, CHAINS - 1), st.integers(1, 8)), max_size=60
    ),
)
def test_what_is_left_of_each_chain_is_its_beginning(memory: int, disk: int, moves: list) -> None:
    tier = Tier(memory, disk)
    for move, chain, amount in moves:
        pinned = {entry.key for entry in tier.book._entries.values() if entry.pins}
        move(tier, chain, amount)
        for each in range(CHAINS):
            held = tier.held(each)
            assert held == list(range(len(held)))
        if move is not Tier.release and move is not Tier.pin:
            assert all(tier.book.find(each) is not None for each in pinned)
        tier.book.check()


@pytest.mark.parametrize("disk", [0, 12])
def test_chains_stored_in_turn_and_never_asked_for_lose_their_ends(disk: int) -> None:
    tier = Tier(24, disk)
    for _ in range(12):
        for chain in range(3):
            tier.store(chain, 1)
            assert all(tier.held(each) == list(range(len(tier.held(each)))) for each in range(3))
    assert sum(len(tier.held(chain)) for chain in range(3)) == 24 + disk
    # Of a chain that comes later the beginning is worth more than the end of one that was never asked for.
    tier.store(3, 6)
    assert tier.held(3) == list(range(6))
    assert all(tier.held(each) == list(range(len(tier.held(each)))) for each in range(3))


def test_a_chain_longer_than_the_tier_leaves_its_beginning_there() -> None:
    tier = Tier(16, 0)
    tier.store(0, 50)
    assert tier.held(0) == list(range(16))
    # Its later blocks, which come behind nothing that is here, take no room from others either.
    assert tier.room(key(0, 40)) is None
    tier.store(1, 2)
    assert tier.held(0) == list(range(14))


def test_blocks_that_come_before_what_they_come_behind_are_the_first_to_leave() -> None:
    tier = Tier(8, 0)
    for depth in (5, 4):
        block = tier.room(key(0, depth - 1))
        assert block is not None
        tier.book.add(key(0, depth), b"d" * 32, block, link(0, depth))
    tier.store(1, 7)
    assert tier.held(0) == [4]
    tier.store(2, 1)
    assert (tier.held(0), tier.held(1), tier.held(2)) == ([], list(range(7)), [0])


def test_a_use_of_a_block_is_one_of_all_that_come_before_it() -> None:
    tier = Tier(8, 0)
    tier.store(0, 4)
    tier.store(1, 4)
    entry = tier.book.find(key(0, 2))
    assert entry is not None
    tier.book.used([entry])
    tier.store(2, 5)
    assert (tier.held(0), tier.held(1)) == ([0, 1, 2], [])


# --- the store ----------------------------------------------------------------------------------------------


async def put(store: TierStore, chain: int, depth: int) -> Put:
    data = content(1000 * (chain + 1) + depth, SIZE)

    async def receive(room: memoryview | None) -> None:
        if room is not None:
            room[:] = data

    return await store.put(
        SPACE, name(chain, depth), sha256(data).digest(), SIZE, receive, link(chain, depth)
    )


def prefix(store: TierStore, chain: int) -> int:
    held = [depth for depth in range(60) if store.book.find(key(chain, depth)) is not None]
    assert held == list(range(len(held)))
    return len(held)


@pytest.mark.parametrize("seed", range(3))
async def test_on_disk_too_and_after_a_restart_chains_end_earlier_but_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(shell, "PATIENCE_S", 60.0)
    random_ = random.Random(seed)
    print("seed", seed)
    lengths = [0] * CHAINS

    async def press(store: TierStore, rounds: int) -> None:
        for _ in range(rounds):
            chain = random_.randrange(CHAINS)
            lengths[chain] = prefix(store, chain)
            for depth in range(lengths[chain], min(59, lengths[chain] + random_.randrange(1, 9))):
                if await put(store, chain, depth) not in (Put.STORED, Put.HAD):
                    break
            if random_.random() < 0.3:
                async with store.reading(SPACE, name(chain, 0)) as entry:
                    assert entry is None or entry.block is not None
            assert [prefix(store, each) for each in range(CHAINS)]

    for _ in range(3):
        store = TierStore(16 * cost(SIZE), 40 * record_bytes(SIZE), tmp_path)
        await store.open()
        before = [prefix(store, each) for each in range(CHAINS)]
        if any(lengths):
            assert sum(before) >= 36
        await press(store, 60)
        assert sum(prefix(store, each) for each in range(CHAINS)) >= 36
        for chain in range(CHAINS):
            for depth in range(prefix(store, chain)):
                async with store.reading(SPACE, name(chain, depth)) as entry:
                    assert entry is None or bytes(entry.block.view) == content(
                        1000 * (chain + 1) + depth, SIZE
                    )
        await store.close(60.0)
        store.book.check()
    assert sum(os.stat(entry).st_size for entry in os.scandir(tmp_path)) <= 40 * record_bytes(SIZE)


@pytest.mark.parametrize("written", [0, 1, SIZE // 2, SIZE])
def test_a_record_torn_while_it_takes_the_place_of_another_is_a_miss_and_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    def record(number: int) -> Record:
        data = content(number, SIZE)
        return Record(key(number, 0), SIZE, sha256(data).digest(), link(number, 3), 7)

    segments = Segments(tmp_path, 640 * record_bytes(SIZE))
    list(segments.scan())
    places = [segments.append(record(n), memoryview(content(n, SIZE))) for n in range(3)]
    real, torn = os.pwritev, [True]

    def pwritev(fd: int, parts: list[memoryview], offset: int) -> int:
        if torn:
            real(fd, [parts[0][:written]], offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, parts, offset)

    monkeypatch.setattr(disk.os, "pwritev", pwritev)
    with pytest.raises(DiskFault):
        segments.replace(places[1], record(8), memoryview(content(8, SIZE)))
    segments.close()
    again = Segments(tmp_path, 640 * record_bytes(SIZE))
    found = [each for each in again.scan() if isinstance(each, Found)]
    assert [each.record for each in found] == [record(0), record(1), record(2)]
    room = memoryview(bytearray(SIZE))
    for n, each in enumerate(found):
        assert again.read(each.place, room)
        assert (sha256(room).digest() == each.record.digest) == (n != 1 or not written)
    torn.clear()
    assert again.replace(places[1], record(9), memoryview(content(9, SIZE))) == places[1]
    assert [each.record for each in again.scan() if isinstance(each, Found)] == [
        record(0),
        record(9),
        record(2),
    ]
    (file,) = tmp_path.glob("*.segment")
    os.truncate(file, record_bytes(SIZE))
    with pytest.raises(DiskFault, match="shorter"):
        again.replace(places[1], record(9), memoryview(content(9, SIZE)))
    again.close()
