"""The tier's book: who leaves first, what leases hold, and that its account of everything is exact."""

from hashlib import sha256

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.kvstore.tier.arena import Arena, Block, cost
from services.kvstore.tier.book import Book
from services.kvstore.tier.entries import Entry, Key, Place, Space, Spill, record_bytes
from services.kvstore.tier.rates import Rate
from shared.ids import BlockHash

SIZE = 1024
ONLY = Space("m", 0, 1)


def key(number: int, space: Space = ONLY) -> Key:
    return Key(space, BlockHash(sha256(bytes([number])).digest()))


def add(book: Book, number: int, space: Space = ONLY, size: int = SIZE) -> Entry:
    block = book.room(size, waiting=False)
    assert isinstance(block, Block)
    return book.add(key(number, space), b"d" * 32, block)


def held(book: Book) -> list[int]:
    return [n for n in range(100) if book.find(key(n)) is not None]


def spill(book: Book, entry: Entry, segment: int) -> None:
    book.written(record_bytes(entry.size), segment)
    book.spilled(entry, Place(segment, book.counts.spilled))


# --- memory -------------------------------------------------------------------------------------------------


def test_an_arena_gives_each_byte_to_one_block_at_a_time() -> None:
    arena = Arena(64 * cost(SIZE))
    blocks = [arena.take(SIZE) for _ in range(64)]
    assert arena.take(SIZE) is None
    for n, block in enumerate(blocks):
        assert block is not None
        block.view[:] = bytes([n]) * SIZE
    assert [bytes(block.view[:1]) for block in blocks if block] == [bytes([n]) for n in range(64)]


def test_another_size_gets_the_room_of_empty_slabs_and_no_more_than_the_budget() -> None:
    arena = Arena(64 * cost(SIZE))
    small = [arena.take(SIZE) for _ in range(64)]
    assert arena.take(8 * SIZE) is None
    for block in small:
        assert block is not None
        arena.give(block)
    fitting = arena.budget // cost(8 * SIZE)
    large = [arena.take(8 * SIZE) for _ in range(fitting + 1)]
    assert [block is not None for block in large] == [True] * fitting + [False]
    assert arena.used == arena.reserved <= arena.budget


def test_what_is_kept_in_mind_of_tiny_blocks_counts_as_memory() -> None:
    arena = Arena(1 << 20)
    count = 0
    while arena.take(64) is not None:
        count += 1
    assert count <= (1 << 20) // 1024


def test_a_block_larger_than_the_arena_has_no_place() -> None:
    assert Arena(cost(SIZE)).take(SIZE + 1) is None
    assert Book(cost(SIZE)).room(SIZE + 1, waiting=False) is None


# --- who leaves ---------------------------------------------------------------------------------------------


def test_the_least_recently_used_block_leaves_first() -> None:
    book = Book(4 * cost(SIZE))
    entries = [add(book, n) for n in range(4)]
    book.used([entries[0]])
    add(book, 4)
    add(book, 5)
    assert held(book) == [0, 3, 4, 5]


def test_the_end_of_a_chain_that_was_used_leaves_before_its_beginning() -> None:
    book = Book(4 * cost(SIZE))
    chain = [add(book, n) for n in range(4)]
    book.used(chain)
    add(book, 10)
    add(book, 11)
    assert held(book) == [0, 1, 10, 11]


def test_a_size_that_comes_anew_gets_its_share_and_then_replaces_its_own() -> None:
    book = Book(64 * cost(SIZE))
    for n in range(64):
        add(book, n)
    for n in range(70, 75):
        add(book, n, size=4 * SIZE)
        book.check()
    assert [n for n in held(book) if n >= 70][-1] == 74
    assert book.counts.evicted >= 4


def test_what_is_being_read_stays_where_it_is() -> None:
    book = Book(2 * cost(SIZE))
    first, second = add(book, 0), add(book, 1)
    book.read_begins(first)
    book.read_begins(second)
    assert book.room(SIZE, waiting=False) is None
    book.read_ends(second)
    add(book, 2)
    assert held(book) == [0, 2]


def test_a_wrong_block_is_gone_at_once_and_its_memory_when_its_readers_are() -> None:
    book = Book(2 * cost(SIZE))
    entry = add(book, 0)
    book.read_begins(entry)
    book.drop(entry)
    assert held(book) == []
    assert book.arena.used == cost(SIZE)
    again = add(book, 0)
    book.read_ends(entry)
    assert book.arena.used == cost(SIZE)
    assert book.find(key(0)) is again
    book.check()


# --- disk ---------------------------------------------------------------------------------------------------


def test_a_block_that_is_on_disk_too_leaves_memory_without_being_lost() -> None:
    book = Book(2 * cost(SIZE), 100 * SIZE)
    first = add(book, 0)
    add(book, 1)
    asked = book.room(SIZE, waiting=True)
    assert isinstance(asked, Spill)
    assert asked.entry is first
    spill(book, first, 1)
    add(book, 2)
    assert held(book) == [0, 1, 2]
    assert first.block is None
    assert book.counts.evicted == 0


def test_who_does_not_wait_for_the_disk_loses_what_it_has_not_taken_yet() -> None:
    book = Book(2 * cost(SIZE), 100 * SIZE)
    for n in range(3):
        add(book, n)
    assert held(book) == [1, 2]
    assert book.counts.dropped == 1


def test_the_disk_is_given_blocks_ahead_of_need() -> None:
    book = Book(8 * cost(SIZE), 100 * SIZE)
    entries = [add(book, n) for n in range(6)]
    assert book.spill_next(2 * cost(SIZE)) is None
    add(book, 6)
    assert book.spill_next(2 * cost(SIZE)) is entries[0]
    spill(book, entries[0], 1)
    assert book.spill_next(2 * cost(SIZE)) is None


def test_a_full_disk_forgets_its_oldest_segment_whole_except_what_memory_has() -> None:
    book = Book(3 * cost(SIZE), 3 * record_bytes(SIZE))
    entries = [add(book, n) for n in range(3)]
    spill(book, entries[0], 1)
    spill(book, entries[1], 1)
    spill(book, entries[2], 2)
    add(book, 3)  # in place of 0, which is on disk
    assert not book.disk_fits(record_bytes(SIZE))
    assert book.end_oldest(current=2) == 1
    assert held(book) == [1, 2, 3]
    assert book.end_oldest(current=2) is None
    assert book.spill_next(3 * cost(SIZE)) in (entries[1], book.find(key(3)))
    book.check()


# --- leases -------------------------------------------------------------------------------------------------


def test_a_pinned_block_never_leaves_until_its_lease_ends() -> None:
    book = Book(4 * cost(SIZE))
    add(book, 0)
    assert book.pin(b"a", [key(0)], until=10.0) == 1
    for n in range(1, 20):
        add(book, n)
    assert 0 in held(book)
    book.expire(now=9.9)
    add(book, 20)
    assert 0 in held(book)
    book.expire(now=10.0)
    for n in range(21, 25):
        add(book, n)
    assert 0 not in held(book)


def test_a_lease_holds_what_it_held_last_and_another_lease_is_another() -> None:
    book = Book(8 * cost(SIZE))
    for n in range(3):
        add(book, n)
    assert book.pin(b"a", [key(0), key(1)], 10.0) == 2
    assert book.pin(b"b", [key(1)], 10.0) == 1
    assert book.pin(b"a", [key(2)], 20.0) == 1
    assert book.pinned_bytes == 2 * cost(SIZE)
    book.release(b"b")
    assert book.pinned_bytes == cost(SIZE)
    book.release(b"unknown")
    book.release(b"a")
    assert (book.pinned_bytes, book.leases) == (0, 0)


def test_pins_end_at_the_first_block_that_is_missing_and_at_half_of_the_tier() -> None:
    book = Book(8 * cost(SIZE))
    for n in (0, 1, 2, 4, 5, 6):
        add(book, n)
    assert book.pin(b"a", [key(n) for n in range(6)], 10.0) == 3
    assert book.pin(b"b", [key(n) for n in (4, 5, 6)], 10.0) == 1
    assert book.pinned_bytes == 4 * cost(SIZE)


def test_a_pinned_block_may_go_to_disk_and_its_segment_stays() -> None:
    book = Book(2 * cost(SIZE), 4 * record_bytes(SIZE))
    entry = add(book, 0)
    book.pin(b"a", [key(0)], 10.0)
    spill(book, entry, 1)
    for n in range(1, 4):
        add(book, n)
    assert entry.block is None
    assert book.end_oldest(current=None) is None
    book.release(b"a")
    assert book.end_oldest(current=None) == 1
    assert 0 not in held(book)


# --- what is told -------------------------------------------------------------------------------------------


def test_only_blocks_of_which_every_rank_has_its_part_are_told() -> None:
    book = Book(8 * cost(SIZE))
    spaces = [Space("m", part, 3) for part in range(3)]
    for space in spaces[:2]:
        add(book, 0, space)
    assert book.changes == []
    last = add(book, 0, spaces[2])
    assert book.changes == [("m", key(0).hash, True)]
    book.drop(last)
    assert book.changes[1:] == [("m", key(0).hash, False)]
    add(book, 0, spaces[2])
    assert len(book.changes) == 3
    assert book.complete("m") == [key(0).hash]


def test_a_rate_is_that_of_the_last_seconds_and_falls_to_zero_when_nothing_comes() -> None:
    rate = Rate()
    assert rate.per_s == 0.0
    for second in range(30):
        rate.note(100.0 * min(second, 20), float(second))
        if 2 <= second <= 20:
            assert rate.per_s == pytest.approx(100.0)
    assert rate.per_s == pytest.approx(10.0)
    rate.note(2000.0, 31.0)
    assert rate.per_s == 0.0


class BookMachine(RuleBasedStateMachine):
    """Random lives of a book. The oracle is what a listener makes of `changes`."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Book(16 * cost(SIZE), 12 * record_bytes(SIZE))
        self.told: set[BlockHash] = set()
        self.reading: list[Entry] = []
        self.segment = 1
        self.now = 0.0

    numbers = st.integers(0, 30)
    spaces = st.sampled_from([Space("m", 0, 2), Space("m", 1, 2)])

    @rule(number=numbers, space=spaces, size=st.sampled_from([SIZE, 3 * SIZE]), waiting=st.booleans())
    def store(self, number: int, space: Space, size: int, waiting: bool) -> None:
        if self.book.find(key(number, space)) is not None:
            return
        room = self.book.room(size, waiting=waiting)
        if isinstance(room, Block):
            self.book.add(key(number, space), b"d" * 32, room)
        elif isinstance(room, Spill):
            assert room.entry.place is None
            assert not room.entry.readers

    @rule(headroom=st.integers(0, 16), fresh=st.booleans())
    def go_to_disk(self, headroom: int, fresh: bool) -> None:
        entry = self.book.spill_next(headroom * cost(SIZE))
        if entry is None:
            return
        self.segment += fresh
        if (hole := self.book.hole(entry)) is not None:
            self.book.spilled(entry, hole)
            return
        while not self.book.disk_fits(record_bytes(entry.size)):
            if self.book.end_oldest(self.segment) is None:
                return
        if entry.block is not None:
            spill(self.book, entry, self.segment)

    @rule(number=numbers, space=spaces)
    def come_back(self, number: int, space: Space) -> None:
        entry = self.book.find(key(number, space))
        if entry is None or entry.block is not None:
            return
        self.book.read_begins(entry)
        room = self.book.room(entry.size, waiting=False)
        if isinstance(room, Block):
            self.book.brought(entry, room)
        self.book.read_ends(entry)

    @rule(numbers=st.lists(numbers, max_size=5), space=spaces)
    def use(self, numbers: list[int], space: Space) -> None:
        found = [self.book.find(key(n, space)) for n in numbers]
        self.book.used([entry for entry in found if entry is not None])

    @rule(number=numbers, space=spaces)
    def begin_reading(self, number: int, space: Space) -> None:
        entry = self.book.find(key(number, space))
        if entry is not None and entry.block is not None:
            self.book.read_begins(entry)
            self.reading.append(entry)

    @precondition(lambda self: self.reading)
    @rule(which=st.integers(0, 1000))
    def end_reading(self, which: int) -> None:
        self.book.read_ends(self.reading.pop(which % len(self.reading)))

    @rule(number=numbers, space=spaces)
    def turn_out_wrong(self, number: int, space: Space) -> None:
        if (entry := self.book.find(key(number, space))) is not None:
            self.book.drop(entry)

    @rule(lease=st.sampled_from([b"a", b"b"]), numbers=st.lists(numbers, max_size=4), space=spaces)
    def pin(self, lease: bytes, numbers: list[int], space: Space) -> None:
        count = self.book.pin(lease, [key(n, space) for n in numbers], self.now + 5)
        assert all(self.book.find(key(n, space)) is not None for n in numbers[:count])

    @rule(seconds=st.floats(0, 6))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.book.expire(self.now)

    @invariant()
    def the_account_is_exact(self) -> None:
        self.book.check()
        assert all(entry.block is not None for entry in self.reading)
        for _, block_hash, came in self.book.changes:
            assert (block_hash in self.told) != came
            (self.told.add if came else self.told.discard)(block_hash)
        self.book.changes.clear()
        assert self.told == set(self.book.complete("m"))


TestBook = pytest.mark.timeout(120)(BookMachine.TestCase)
TestBook.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
