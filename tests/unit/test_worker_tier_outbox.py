"""What goes to the tier next; and that under no interleaving a hash there ever names wrong content."""

from collections.abc import Callable
from hashlib import sha256

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.tier.outbox import Job, Outbox
from shared.ids import BlockHash

BLOCKS, PLACES = 6, 2


def outbox(places: int = PLACES) -> Outbox:
    made = Outbox(places, remembered=1000)
    made.wanted = True
    return made


def name(text: str) -> BlockHash:
    return BlockHash(sha256(text.encode()).digest())


A, B, C, D = (name(text) for text in "ABCD")


def taken(box: Outbox) -> list[bytes]:
    """Hashes in the order in which they would be sent."""
    hashes = []
    while (job := box.take()) is not None:
        hashes.append(job.block_hash)
        box.done(job, True)
    return hashes


def save(box: Outbox, block: int, block_hash: BlockHash) -> bool:
    saving = box.give_up(block, block_hash)
    if saving is not None:
        box.save(saving)
    return saving is not None


def test_what_is_wanted_back_goes_first_then_what_was_saved_then_the_rest_in_order() -> None:
    box = outbox()
    for block, block_hash in enumerate((A, B, C, D)):
        box.offer(block, block_hash)
    assert save(box, 2, C)
    box.urge(3, D)
    assert taken(box) == [D, C, A, B]


def test_an_urged_block_that_is_handed_out_keeps_its_urgency() -> None:
    box = outbox()
    box.offer(0, A)
    box.urge(1, B)
    assert save(box, 1, B)
    assert taken(box) == [B, A]


def test_a_saved_content_that_becomes_urgent_goes_first() -> None:
    box = outbox()
    assert save(box, 0, A)
    assert save(box, 1, B)
    box.urge(1, B)
    assert taken(box) == [B, A]


def test_when_the_staging_memory_is_full_contents_are_dropped_but_the_urgent_take_their_place() -> None:
    box = outbox(places=1)
    assert save(box, 0, A)
    assert not save(box, 1, B)
    box.urge(2, C)
    assert save(box, 2, C)
    assert taken(box) == [C]
    assert box.counts.dropped == 2
    # The place is free again.
    assert save(box, 3, D)


def test_nothing_is_sent_or_saved_twice() -> None:
    box = outbox()
    box.offer(0, A)
    box.offer(0, A)
    assert taken(box) == [A]
    box.urge(0, A)
    assert not save(box, 0, A)
    assert taken(box) == []


def test_a_block_that_had_to_be_computed_again_goes_there_again_if_the_tier_has_lost_it() -> None:
    box = outbox()
    for block, block_hash in ((0, A), (1, B)):
        box.offer(block, block_hash)
    assert taken(box) == [A, B]
    for block, block_hash in ((2, A), (3, B)):
        box.offer(block, block_hash)
    assert box.ask(2) == [A, B]
    box.learn([B])
    assert taken(box) == [A]


def test_blocks_that_the_tier_has_already_are_not_sent() -> None:
    box = outbox()
    for block, block_hash in enumerate((A, B, C)):
        box.offer(block, block_hash)
    assert box.ask(2) == [A, B]
    assert box.ask(2) == []
    box.learn([A])
    assert taken(box) == [B, C]


def test_nothing_is_kept_that_is_not_wanted() -> None:
    box = outbox()
    box.wanted = False
    box.offer(0, A)
    box.urge(1, B)
    assert not save(box, 2, C)
    assert taken(box) == []


def test_a_job_in_hand_for_a_tier_that_is_gone_says_nothing_of_the_next() -> None:
    box = outbox()
    box.offer(0, A)
    job = box.take()
    assert job is not None
    box.forget()
    box.done(job, True)
    box.offer(0, A)
    assert taken(box) == [A]


class World:
    """KV memory, staging memory and a tier around an outbox; each move is one that a thread could make."""

    def __init__(self) -> None:
        self.box = outbox()
        self.memory = [b"?"] * BLOCKS
        self.holds: list[BlockHash | None] = [None] * BLOCKS
        self.staging = [b"?"] * PLACES
        self.tier: dict[bytes, bytes] = {}
        self.evicted: set[bytes] = set()
        self.number = 0
        self.job: Job | None = None
        self.digest: bytes | None = None

    def confirm(self, block: int) -> None:
        if self.holds[block] is None:
            self.number += 1
            content = b"content %d" % self.number
            self.memory[block] = content
            self.holds[block] = BlockHash(sha256(content).digest())
            self.box.offer(block, self.holds[block])

    def urge(self, block: int) -> None:
        if (held := self.holds[block]) is not None:
            self.box.urge(block, held)

    def hand_out(self, block: int) -> None:
        if (held := self.holds[block]) is not None:
            saving = self.box.give_up(block, held)
            if saving is not None:
                self.staging[saving.place] = self.memory[block]
                self.box.save(saving)
            self.holds[block] = None
        self.memory[block] = b"being written"

    def fail(self, block: int) -> None:
        """A frame that was refused half-way: the block loses its hash, and nobody says so."""
        self.box.tear()
        self.holds[block] = None
        self.memory[block] = b"being written"

    def forget(self, block: int) -> None:
        self.box.forget()

    def send(self, block: int) -> None:
        """One of the sender's moves: take a job, make its digest, or send it."""
        if self.job is None:
            self.job = self.box.take()
        elif self.digest is None:
            self.digest = sha256(self.content(self.job)).digest()
        else:
            fit = not self.job.torn and not self.job.stale
            self.sends(self.job, self.digest) if fit else self.box.done(self.job, False)
            self.job = self.digest = None

    def sends(self, job: Job, digest: bytes) -> None:
        content = self.content(job)
        kept = sha256(content).digest() == digest
        if kept:
            self.tier[job.block_hash] = content
        self.box.done(job, kept)

    def send_torn(self, block: int) -> None:
        """The block is handed out between the look at `torn` and the sending."""
        if self.job is not None and self.digest is not None and not self.job.torn and not self.job.stale:
            if self.job.place < 0:
                self.hand_out(self.job.block)
            self.sends(self.job, self.digest)
            self.job = self.digest = None

    def content(self, job: Job) -> bytes:
        return self.staging[job.place] if job.place >= 0 else self.memory[job.block]


MOVES: list[Callable[[World, int], None]] = [
    World.confirm,
    World.urge,
    World.hand_out,
    World.send,
    World.send_torn,
    World.send,
    World.confirm,
    World.fail,
    World.forget,
]


@settings(max_examples=400, deadline=None)
@given(moves=st.lists(st.tuples(st.integers(0, len(MOVES) - 1), st.integers(0, BLOCKS - 1)), max_size=60))
def test_whatever_happens_a_hash_in_the_tier_names_its_own_content(moves: list[tuple[int, int]]) -> None:
    world = World()
    for move, block in moves:
        MOVES[move](world, block)
        assert all(sha256(content).digest() == named for named, content in world.tier.items())
    # In the end everything still wanted is sent, and every place is free again.
    while world.job is not None or len(world.box):
        world.send(0)
    assert all(sha256(content).digest() == named for named, content in world.tier.items())
    assert world.box.saved_places == 0
    for place in range(PLACES):
        assert world.box.give_up(place, name(f"new {place}")) is not None, "a place was lost"
