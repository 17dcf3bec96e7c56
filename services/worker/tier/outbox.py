"""What goes to the second tier next: pure bookkeeping, for callers that hold one lock around it.

Three urgencies: blocks that somebody will want back soon (`urge`), contents saved before their block was
handed out anew (`give_up`), and whatever else was confirmed (`offer`), in the order in which it came. A block
that waits is named, not copied; the moment it is handed out anew it waits no more.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shared.tier.frames import NO_LINK, Link

RENEW_S = 5.0
"""About one chain the tier is asked no more often."""

CHAINS_KEPT = 1024
"""Chains of which it is known when the tier was asked."""


@dataclass(eq=False)
class Job:
    """One block to be sent. Its content lies in KV memory, or saved in a place of the staging memory."""

    block_hash: bytes
    block: int = -1
    place: int = -1
    """In the staging memory; -1: the block itself holds it, as long as it is not `torn`."""
    torn: bool = False
    """The block was handed out anew after the job was taken: what was read may be anything."""
    link: Link = NO_LINK
    """Where in its chain it is."""
    stale: bool = False
    """The tier it was taken for is not the tier any more."""


@dataclass(frozen=True)
class Saving:
    """Content to be copied out of a block before that is overwritten, and then `Outbox.save`d."""

    block: int
    block_hash: bytes
    place: int
    urged: bool


@dataclass
class OutboxCounts:
    """Since the start."""

    sent: int = 0
    refused: int = 0
    """The tier had no room, or what arrived was torn."""
    there: int = 0
    """Blocks that were in the tier already."""
    saved: int = 0
    """Contents copied before their block was handed out anew."""
    dropped: int = 0
    """Contents lost to the tier, as the staging memory was full."""


class Outbox:
    """Jobs of one rank. `places`: contents that the staging memory holds; `remembered`: hashes it knows to be
    in the tier at most."""

    def __init__(self, places: int, remembered: int) -> None:
        self.counts = OutboxCounts()
        self.wanted = False
        """Whether anything is to go there at all; else what comes is forgotten."""
        self.link: Callable[[int], Link] = lambda block: NO_LINK
        """Where in its chain a hashed block is."""
        self._links: OrderedDict[bytes, Link] = OrderedDict()
        # of those that wait, and others
        self._renewed: OrderedDict[bytes, float] = OrderedDict()
        # last hash of a chain → when it was renewed
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._remembered = remembered
        self._urged: dict[bytes, int] = {}
        self._saved_urged: dict[bytes, int] = {}
        self._saved: dict[bytes, int] = {}
        self._offered: dict[bytes, int] = {}
        # hash → block, hash → place
        self._free = list(range(places - 1, -1, -1))
        self._in_hand: Job | None = None
        self._asked = 0
        # the first of `_offered`, about which the tier was asked

    def __len__(self) -> int:
        """Jobs waiting."""
        return len(self._urged) + len(self._saved_urged) + len(self._saved) + len(self._offered)

    @property
    def saved_places(self) -> int:
        """Of the staging memory in use."""
        return len(self._saved_urged) + len(self._saved)

    # What the engine says.

    def offer(self, block: int, block_hash: bytes) -> None:
        """The block was confirmed under this hash."""
        if not self.wanted:
            return
        # It had to be computed again: the tier may have lost it meanwhile, and is asked.
        self._known.pop(block_hash, None)
        if not self._has(block_hash):
            self._offered[block_hash] = block
            self._note(block, block_hash)

    def renew(self, chain: Sequence[tuple[int, bytes]], now: float) -> None:
        """A sequence begins with these blocks: the tier is asked whether it has them, which keeps them there
        longer, and gets what it has lost since."""
        if not chain or now < self._renewed.get(chain[-1][1], now - RENEW_S) + RENEW_S:
            return
        self._renewed[chain[-1][1]] = now
        self._renewed.move_to_end(chain[-1][1])
        if len(self._renewed) > CHAINS_KEPT:
            self._renewed.popitem(last=False)
        for block, block_hash in chain:
            self.offer(block, block_hash)

    def urge(self, block: int, block_hash: bytes) -> None:
        """As `offer`, ahead of everything else."""
        if not self.wanted or block_hash in self._known or block_hash in self._saved_urged:
            return
        if (place := self._saved.pop(block_hash, None)) is not None:
            self._saved_urged[block_hash] = place
            return
        self._withdraw(block_hash)
        self._urged[block_hash] = block
        self._note(block, block_hash)

    def give_up(self, block: int, block_hash: bytes) -> Saving | None:
        """The block is about to be overwritten. None: its content need not be saved, or there is no room."""
        urged = self._urged.get(block_hash) == block
        if urged or self._offered.get(block_hash) == block:
            self._withdraw(block_hash)
        if (job := self._in_hand) is not None and job.block == block and job.place < 0:
            job.torn = True
        if not self.wanted or self._has(block_hash):
            return None
        if not self._free and not (urged and self._drop_saved()):
            self.counts.dropped += 1
            return None
        self._note(block, block_hash)
        return Saving(block, block_hash, self._free.pop(), urged)

    def save(self, saving: Saving) -> None:
        """The content lies in its place now."""
        if not self.wanted or self._has(saving.block_hash):
            self._free.append(saving.place)
            return
        self.counts.saved += 1
        queue = self._saved_urged if saving.urged else self._saved
        queue[saving.block_hash] = saving.place

    def tear(self) -> None:
        """Blocks may have been handed out anew that nobody named: forget all that lie only in KV memory."""
        self._urged.clear()
        self._offered.clear()
        self._asked = 0
        if self._in_hand is not None and self._in_hand.place < 0:
            self._in_hand.torn = True

    # What the sender says.

    def ask(self, most: int) -> list[bytes]:
        """Hashes offered about which the tier was not asked yet, if there are no others to be taken first."""
        if self._asked or self._urged or self.saved_places:
            return []
        hashes = [block_hash for block_hash, _ in zip(self._offered, range(most), strict=False)]
        self._asked = len(hashes)
        return hashes

    def learn(self, hashes: Iterable[bytes]) -> None:
        """The tier has these."""
        for block_hash in hashes:
            self._know(block_hash)
            self.counts.there += 1
            self._withdraw(block_hash)

    def take(self) -> Job | None:
        """The next job, which is in hand until `done`; None: nothing waits."""
        job: Job | None = None
        for queue, saved in (
            (self._saved_urged, True),
            (self._urged, False),
            (self._saved, True),
            (self._offered, False),
        ):
            while queue and job is None:
                block_hash = next(iter(queue))
                where = queue.pop(block_hash)
                if queue is self._offered:
                    self._asked = max(0, self._asked - 1)
                if block_hash not in self._known:
                    job = Job(block_hash, place=where) if saved else Job(block_hash, where)
                    job.link = self._links.get(block_hash, NO_LINK)
                elif saved:
                    self._free.append(where)
        self._in_hand = job
        return job

    def done(self, job: Job, kept: bool) -> None:
        """The job in hand has ended; `kept`: the tier has the block now."""
        self._in_hand = None
        if job.place >= 0:
            self._free.append(job.place)
        if kept:
            self.counts.sent += 1
            if not job.stale:
                self._know(job.block_hash)
        else:
            self.counts.refused += 1

    def forget(self) -> None:
        """The tier is another, or gone: nothing waits, nothing is known to be there."""
        self.tear()
        if self._in_hand is not None:
            self._in_hand.stale = True
        self._known.clear()
        self._renewed.clear()
        for saved in (self._saved_urged, self._saved):
            self._free += saved.values()
            saved.clear()

    def _has(self, block_hash: bytes) -> bool:
        """It is in the tier, or certain to be sent (if nobody overwrites the block it is in)."""
        return (
            block_hash in self._known
            or block_hash in self._offered
            or block_hash in self._urged
            or block_hash in self._saved
            or block_hash in self._saved_urged
            or (
                self._in_hand is not None
                and self._in_hand.block_hash == block_hash
                and not self._in_hand.torn
            )
        )

    def _withdraw(self, block_hash: bytes) -> None:
        self._urged.pop(block_hash, None)
        if self._offered.pop(block_hash, None) is not None:
            self._asked = max(0, self._asked - 1)

    def _drop_saved(self) -> bool:
        """Make room for a content that is more urgent."""
        if not self._saved:
            return False
        self._free.append(self._saved.pop(next(iter(self._saved))))
        self.counts.dropped += 1
        return True

    def _note(self, block: int, block_hash: bytes) -> None:
        self._links[block_hash] = self.link(block)
        self._links.move_to_end(block_hash)
        if len(self._links) > self._remembered:
            self._links.popitem(last=False)

    def _know(self, block_hash: bytes) -> None:
        self._known[block_hash] = None
        self._known.move_to_end(block_hash)
        if len(self._known) > self._remembered:
            self._known.popitem(last=False)
