"""The two threads against tiers that are slow, break, or lie in wait for the worst moment."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import pytest

from services.worker.tier import sender as sending
from services.worker.tier.fetcher import Fetcher
from services.worker.tier.homes import TierState
from services.worker.tier.sender import Sender
from services.worker.tier.staging import Staging
from shared.ids import BlockHash
from shared.subjects import tier_row
from shared.tier.client import TierClient, TierDown
from shared.tier.frames import NO_LINK, Link
from shared.wire import Fetch, TierOffer

SIZE = 32
BLOCKS = 8
OFFER = TierOffer(instance="kv0", host="far", port=1, secret="s", born=1, memory_bytes=1, disk_bytes=0)
ROW = tier_row("kv0", "m")


class Memory:
    block_bytes = SIZE

    def __init__(self) -> None:
        self.blocks = [bytearray(SIZE) for _ in range(BLOCKS)]

    def view(self, block: int) -> memoryview:
        return memoryview(self.blocks[block])

    def write(self, block: int, data: memoryview) -> None:
        self.blocks[block][:] = data

    def fill(self, block: int, text: str) -> BlockHash:
        """New content, and the hash that names it here."""
        self.blocks[block][:] = text.encode().ljust(SIZE)
        return BlockHash(sha256(self.blocks[block]).digest())


@dataclass
class FakeTier(TierClient):
    """Holds what it is given; `before(what)` is called first and may wait, change things, or raise."""

    blocks: dict[bytes, bytes] = field(default_factory=dict)
    links: dict[bytes, Link] = field(default_factory=dict)
    before: Callable[[str], None] = lambda what: None
    closed: int = 0
    block_bytes = SIZE  # type: ignore[assignment]

    def have(self, hashes: Sequence[bytes]) -> list[bool]:
        self.before("have")
        return [each in self.blocks for each in hashes]

    def put(self, block_hash: bytes, data: memoryview, digest: bytes, link: Link = NO_LINK) -> bool:
        self.before("put")
        self.links[block_hash] = link
        arrived = bytes(data)
        if sha256(arrived).digest() != digest:
            return False
        self.blocks[block_hash] = arrived
        return True

    def get(self, hashes: Sequence[bytes], into: memoryview) -> Iterator[tuple[int, memoryview]]:
        for index, each in enumerate(hashes):
            self.before("get")
            if each not in self.blocks:
                return
            into[:SIZE] = self.blocks[each]
            yield index, into[:SIZE]

    def close(self) -> None:
        self.closed += 1

    def right(self) -> bool:
        """Every block's content is what its hash names, probes aside."""
        return all(sha256(c).digest() == h or c == bytes(SIZE) for h, c in self.blocks.items())


class Gate:
    """Lets a thread pass a point when the test says so."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.at = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def __call__(self, what: str) -> None:
        if what == self.what:
            self.at.release()
            assert self.go.acquire(timeout=5)

    def wait(self) -> None:
        assert self.at.acquire(timeout=5), f"nobody came to {self.what}"


class Fetching:
    def __init__(self, tier: FakeTier) -> None:
        self.memory = Memory()
        self.ends: queue.Queue[tuple[tuple[int, int], int]] = queue.Queue()
        self.fetcher = Fetcher(self.memory, Staging(3 * SIZE, SIZE), "m", lambda offer: tier)
        self.fetcher.report = lambda key, count, us: self.ends.put((key, count))
        self.fetcher.use(TierState((OFFER,), ROW, True))

    def begin(self, op: int, blocks: list[int], hashes: list[bytes], session: int = 1) -> None:
        self.fetcher.begin(session, [Fetch(op, ROW, blocks, hashes)])

    def ended(self) -> tuple[tuple[int, int], int]:
        return self.ends.get(timeout=5)


@pytest.fixture
def stored() -> tuple[FakeTier, list[bytes]]:
    """A tier with four blocks, and their hashes."""
    memory, tier = Memory(), FakeTier()
    hashes = [memory.fill(block, f"block {block}") for block in range(4)]
    tier.blocks = {each: bytes(memory.blocks[block]) for block, each in enumerate(hashes)}
    return tier, list(hashes)


def test_nothing_is_written_once_a_new_session_has_begun(stored: tuple[FakeTier, list[bytes]]) -> None:
    tier, hashes = stored
    gate = tier.before = Gate("get")
    fetching = Fetching(tier)
    fetching.begin(1, [4, 5, 6], hashes[:3])
    gate.wait()
    gate.go.release()
    gate.wait()  # the first is written
    fetching.fetcher.end_all()
    before = [bytes(block) for block in fetching.memory.blocks]
    for _ in range(3):
        gate.go.release()
    assert fetching.ended() == ((1, 1), 1)
    assert [bytes(block) for block in fetching.memory.blocks] == before
    fetching.fetcher.close()


def test_a_fetch_ended_from_outside_writes_no_more_while_the_next_goes_on(
    stored: tuple[FakeTier, list[bytes]],
) -> None:
    tier, hashes = stored
    gate = tier.before = Gate("get")
    fetching = Fetching(tier)
    fetching.begin(1, [4, 5], hashes[:2])
    fetching.begin(2, [6, 7], hashes[2:])
    gate.wait()
    fetching.fetcher.end((1, 1))
    for _ in range(8):
        gate.go.release()
    assert fetching.ended() == ((1, 1), 0)
    assert fetching.ended() == ((1, 2), 2)
    assert bytes(fetching.memory.blocks[4]) == bytes(SIZE)
    assert bytes(fetching.memory.blocks[7]) == tier.blocks[hashes[3]]
    fetching.fetcher.close()


def test_a_tier_that_breaks_ends_the_fetch_with_what_has_arrived(
    stored: tuple[FakeTier, list[bytes]],
) -> None:
    tier, hashes = stored
    got: list[str] = []

    def breaks(what: str) -> None:
        got.append(what)
        if len(got) == 3:
            raise TierDown("it is gone")

    tier.before = breaks
    fetching = Fetching(tier)
    fetching.begin(1, [4, 5, 6, 7], hashes)
    assert fetching.ended() == ((1, 1), 2)
    fetching.begin(2, [6, 7], hashes[2:])
    assert fetching.ended() == ((1, 2), 2)
    fetching.fetcher.close()


class Sending:
    def __init__(self, tier: FakeTier, places: int = 2) -> None:
        self.tier = tier
        self.memory = Memory()
        self.sender = Sender(self.memory, Staging((places + 2) * SIZE, SIZE), 100, lambda offer: tier)
        self.reached = threading.Event()
        self.sender.when_reached = self.reached.set

    def use(self) -> None:
        self.sender.use(OFFER, True, [])

    def confirm(self, block: int, text: str) -> BlockHash:
        block_hash = self.memory.fill(block, text)
        self.sender.offer([(block, block_hash)])
        return block_hash

    def hand_out(self, block: int, block_hash: BlockHash) -> None:
        self.sender.give_up([(block, block_hash)])
        self.memory.blocks[block][:] = b"overwritten".ljust(SIZE)

    def wait(self, true: Callable[[], bool]) -> None:
        pause = threading.Event()
        for _ in range(500):
            if true():
                return
            pause.wait(0.01)
        raise AssertionError(f"it never was so: {self.sender.report()}")


@pytest.mark.parametrize("point", ["put", "have"])
def test_a_block_handed_out_while_it_is_being_sent_gets_there_from_what_was_saved(point: str) -> None:
    sending_ = Sending(FakeTier())
    sending_.use()
    assert sending_.reached.wait(5)
    gate = sending_.tier.before = Gate(point)
    block_hash = sending_.confirm(3, "first")
    gate.wait()
    sending_.hand_out(3, block_hash)
    for _ in range(20):
        gate.go.release()
    sending_.wait(lambda: block_hash in sending_.tier.blocks)
    assert sending_.tier.right()
    assert sending_.sender.report()["saved"] == 1
    sending_.sender.close()


def test_what_a_tier_has_dropped_since_gets_there_again_when_a_sequence_begins_with_it() -> None:
    sending_ = Sending(FakeTier())
    sending_.use()
    assert sending_.reached.wait(5)
    links = [Link(bytes(32), depth) for depth in range(10)]
    sending_.sender.knows(lambda block: links[block])
    chain = [(block, BlockHash(sending_.confirm(block, f"block {block}"))) for block in range(4)]
    sending_.wait(lambda: sending_.sender.report()["sent"] == 4)
    dropped = chain[2:]
    for _, block_hash in dropped:
        assert sending_.tier.links[block_hash].depth in (2, 3)
        del sending_.tier.blocks[block_hash]
    sending_.sender.renew([chain])
    sending_.wait(lambda: sending_.sender.report()["sent"] == 6)
    assert sending_.sender.report()["there"] == 2
    assert all(block_hash in sending_.tier.blocks for _, block_hash in chain)
    # Not so soon again.
    del sending_.tier.blocks[dropped[0][1]]
    sending_.sender.renew([chain])
    assert sending_.sender.report()["waiting"] == 0
    assert sending_.tier.right()
    sending_.sender.close()


def test_what_a_broken_frame_may_have_handed_out_is_not_sent() -> None:
    sending_ = Sending(FakeTier())
    sending_.use()
    assert sending_.reached.wait(5)
    gate = sending_.tier.before = Gate("have")
    block_hash = sending_.confirm(3, "first")
    gate.wait()
    sending_.sender.tear()
    sending_.memory.blocks[3][:] = b"overwritten".ljust(SIZE)
    other = sending_.confirm(4, "second")
    for _ in range(20):
        gate.go.release()
    sending_.wait(lambda: other in sending_.tier.blocks)
    assert block_hash not in sending_.tier.blocks
    assert sending_.tier.right()
    sending_.sender.close()


def test_a_tier_that_comes_back_is_reached_again_and_gets_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "RETRY_S", (0.01,))
    down = threading.Event()
    down.set()

    def away(what: str) -> None:
        if down.is_set():
            raise TierDown("away")

    sending_ = Sending(FakeTier(before=away))
    sending_.use()
    block_hash = sending_.confirm(3, "first")
    sending_.wait(lambda: sending_.tier.closed >= 3)
    assert sending_.sender.reached is None
    down.clear()
    sending_.wait(lambda: block_hash in sending_.tier.blocks)
    assert sending_.sender.reached == OFFER
    assert sending_.sender.rates.known
    sending_.sender.close()


def test_a_probe_that_was_damaged_in_the_tier_is_stored_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "PING_S", 0.01)
    tier = FakeTier()
    lost: list[str] = []

    def loses(what: str) -> None:
        if what == "get" and len(lost) < 20:
            lost.append(what)
            tier.blocks.clear()

    tier.before = loses
    sending_ = Sending(tier)
    sending_.use()
    sending_.wait(lambda: sending_.sender.rates.known)
    assert len(lost) == 20, "it gave up for a while, and tried again"
    sending_.sender.close()


def test_the_engine_never_waits_for_a_tier_that_hangs() -> None:
    sending_ = Sending(FakeTier())
    sending_.use()
    assert sending_.reached.wait(5)
    gate = sending_.tier.before = Gate("put")
    hashes = [sending_.confirm(block, f"{block}") for block in range(BLOCKS)]
    gate.wait()
    for block, block_hash in enumerate(hashes):
        sending_.hand_out(block, block_hash)
    report = sending_.sender.report()
    assert report["saved"] == 2, "as many as the staging memory holds"
    assert report["dropped"] == BLOCKS - 2
    for _ in range(20):
        gate.go.release()
    sending_.wait(lambda: sending_.sender.report()["staged"] == 0)
    assert sending_.tier.right()
    sending_.sender.close()
