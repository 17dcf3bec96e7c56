"""Carries blocks to the second tier, from a thread of its own: the engine never waits for the network.

A block that waits is read where it lies, in live KV memory. What makes that safe is an order: the engine says
which blocks a frame hands out (`give_up`) before anything is computed; a digest counts only if the block was
not among them when it was done; and the tier refuses what does not have the digest it came with. So content
that is overwritten while it is read never gets there under a hash it does not belong to.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

import structlog

from services.worker.tier.outbox import Job, Outbox
from services.worker.tier.port import KvMemory
from services.worker.tier.rates import FetchRates
from services.worker.tier.staging import Staging
from shared.ids import BlockHash
from shared.tier.client import TierClient, TierDown
from shared.tier.frames import Link
from shared.wire import TierOffer

Connect = Callable[[TierOffer], TierClient]

ASK = 64
"""Hashes about which the tier is asked at once, before their blocks are sent."""

PING_S = 1.0
"""An idle connection is tried this often."""

RETRY_S = (0.2, 0.5, 1.0, 2.0, 4.0)
"""Pauses between attempts to reach a tier that is away."""

PROBE = 4
"""Blocks of the larger of the two fetches that are timed when a tier is reached."""

PROBE_ROUNDS = 3

NICE = 10
"""Of the thread: where cores are scarce, steps come first."""


class Sender:
    """Of one rank. Methods named after what the engine says are called on its thread, between steps."""

    def __init__(self, memory: KvMemory, staging: Staging, remembered: int, connect: Connect) -> None:
        self.rates = FetchRates()
        self.reached: TierOffer | None = None
        """The tier it is connected to, whose rates these are. Read from any thread."""
        self.when_reached: Callable[[], None] = lambda: None
        """Called from the thread when that has changed."""
        self._memory = memory
        self._staging = staging
        self._connect = connect
        self._outbox = Outbox(staging.places, remembered)
        self._news = threading.Condition()
        self._home: TierOffer | None = None
        self._closed = self._idle = False
        self._client: TierClient | None = None
        self._thread: threading.Thread | None = None

    # What the engine says.

    def use(self, home: TierOffer | None, wanted: bool, hashed: Iterable[tuple[int, BlockHash]]) -> None:
        """Blocks go to `home` from now on, those that are `hashed` at this moment as well."""
        with self._news:
            if home != self._home:
                self._outbox.forget()
                self._home = home
            self._outbox.wanted = wanted and home is not None
            for block, block_hash in hashed if self._outbox.wanted else ():
                self._outbox.offer(block, block_hash)
            self._news.notify_all()
        if self._thread is None and home is not None:
            self._thread = threading.Thread(target=self._work, name="tier-send", daemon=True)
            self._thread.start()

    def offer(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """These were confirmed."""
        with self._news:
            for block, block_hash in blocks:
                self._outbox.offer(block, block_hash)
            self._wake()

    def knows(self, link: Callable[[int], Link]) -> None:
        """Where in its chain a block is."""
        self._outbox.link = link

    def renew(self, chains: Iterable[Sequence[tuple[int, BlockHash]]]) -> None:
        """Sequences begin with these: the tier is to keep them longer, and to get again what it has lost."""
        now = time.monotonic()
        with self._news:
            for chain in chains:
                self._outbox.renew(chain, now)
            self._wake()

    def urge(self, blocks: Iterable[tuple[int, BlockHash]]) -> None:
        """These will be wanted back soon."""
        with self._news:
            for block, block_hash in blocks:
                self._outbox.urge(block, block_hash)
            self._wake()

    def give_up(self, blocks: Sequence[tuple[int, BlockHash]]) -> None:
        """These are about to be overwritten: what the tier lacks is copied now, as far as there is room."""
        with self._news:
            savings = [
                saving for block, held in blocks if (saving := self._outbox.give_up(block, held)) is not None
            ]
        for saving in savings:
            self._staging.put(saving.place, self._memory.view(saving.block))
        if savings:
            with self._news:
                for saving in savings:
                    self._outbox.save(saving)
                self._wake()

    def tear(self) -> None:
        """A frame failed half-way: blocks may have changed hands that nobody named."""
        with self._news:
            self._outbox.tear()

    def report(self) -> dict[str, int]:
        """From any thread."""
        with self._news:
            counts = self._outbox.counts
            return {
                "waiting": len(self._outbox),
                "staged": self._outbox.saved_places,
                "sent": counts.sent,
                "there": counts.there,
                "refused": counts.refused,
                "saved": counts.saved,
                "dropped": counts.dropped,
            }

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        if (client := self._client) is not None:
            client.close()
        if self._thread is not None:
            self._thread.join(1.0)

    def _wake(self) -> None:
        if self._idle:
            self._news.notify_all()

    # The thread.

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        tries = 0
        while (home := self._next_home()) is not None:
            self._client = client = self._connect(home)
            try:
                self._probe(client)
                tries = 0
                self._reach(home)
                self._serve(client, home)
            except TierDown as down:
                if not tries and not self._closed:
                    structlog.get_logger().warning("second tier is away", why=str(down))
                self._reach(None)
                self._pause(RETRY_S[min(tries, len(RETRY_S) - 1)], home)
                tries += 1
            finally:
                client.close()
        self._reach(None)

    def _next_home(self) -> TierOffer | None:
        """Once there is one; None: closed."""
        with self._news:
            while self._home is None and not self._closed:
                self._reach(None)
                self._news.wait()
            return None if self._closed else self._home

    def _pause(self, seconds: float, home: TierOffer) -> None:
        with self._news:
            self._news.wait_for(lambda: self._closed or self._home != home, seconds)

    def _reach(self, offer: TierOffer | None) -> None:
        if offer != self.reached:
            self.reached = offer
            self.when_reached()

    def _probe(self, client: TierClient) -> None:
        """Time fetches of blocks that mean nothing, and are the same in every life."""
        size = client.block_bytes
        content = memoryview(bytes(size))
        hashes = [sha256(f"hortator probe {size} {i}".encode()).digest() for i in range(PROBE)]
        room = memoryview(bytearray(size))
        digest = sha256(content).digest()
        self.rates.forget()
        for _ in range(PROBE_ROUNDS):
            for block_hash, there in zip(hashes, client.have(hashes), strict=True):
                if not there and not client.put(block_hash, content, digest):
                    return  # It is full now.
            for count in (1, PROBE):
                began = time.perf_counter()
                got = sum(1 for _ in client.get(hashes[:count], room))
                if got == count:  # else it was damaged there, and is put anew
                    self.rates.observe(count, time.perf_counter() - began)

    def _serve(self, client: TierClient, home: TierOffer) -> None:
        """Until `home` is another, or closed. Raises `TierDown`."""
        while True:
            ask: list[bytes] = []
            job: Job | None = None
            with self._news:
                if self._closed or self._home != home:
                    return
                ask = self._outbox.ask(ASK)
                job = None if ask else self._outbox.take()
                if not ask and job is None:
                    self._idle = True
                    told = self._news.wait(PING_S)
                    self._idle = False
                    if told:
                        continue
            if job is None and not self.rates.known:
                self._probe(client)
            if job is not None:
                self._send(client, job)
            else:
                there = client.have(ask or [bytes(32)])
                with self._news:
                    self._outbox.learn([each for each, is_there in zip(ask, there) if is_there])

    def _send(self, client: TierClient, job: Job) -> None:
        kept = False
        try:
            content = self._staging.view(job.place) if job.place >= 0 else self._memory.view(job.block)
            digest = sha256(content).digest()
            # `torn` is set before the engine goes on to overwrite the block: if it is not, this is the
            # digest of what the hash names.
            with self._news:
                fit = not job.torn and not job.stale
            kept = fit and client.put(job.block_hash, content, digest, job.link)
        finally:
            with self._news:
                self._outbox.done(job, kept)
