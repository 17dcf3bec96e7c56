"""Brings blocks from second tiers into KV memory, from a thread of its own.

What arrives is verified in the staging memory before any KV memory is touched. A fetch writes only as long as
it is not over, which its session's end makes it, or its own: that is looked at under the lock that ends it.
"""

import threading
import time
from collections.abc import Callable

import structlog

from services.worker.tier.arrivals import Arrival, Arrivals, Key
from services.worker.tier.homes import TierState
from services.worker.tier.port import KvMemory
from services.worker.tier.sender import Connect
from services.worker.tier.staging import Staging
from shared.subjects import tier_row
from shared.tier.client import TierClient, TierDown
from shared.wire import Fetch, TierOffer

LIMIT_S = 8.0
"""A fetch that has not ended by then ends with what it has. Below the limit for a rank that says nothing."""

Report = Callable[[Key, int, int], None]
"""(fetch, blocks it got, microseconds)."""


class Fetcher:
    """Of one rank. Methods named after what the engine says are called on its thread, between steps."""

    def __init__(self, memory: KvMemory, staging: Staging, model: str, connect: Connect) -> None:
        self.report: Report = lambda key, count, us: None
        """How a fetch has ended here; called from the thread, or from the caller's."""
        self.observe: Callable[[str, int, float], None] = lambda row, blocks, seconds: None
        """Row of a tier, blocks had from it, and the seconds that took."""
        self.blocks = self.failed = 0
        """Blocks that arrived, and those asked for that did not."""
        self._memory = memory
        self._room = staging.arriving
        self._model = model
        self._connect = connect
        self._arrivals = Arrivals()
        self._state = TierState()
        self._clients: dict[str, tuple[TierOffer, TierClient]] = {}
        self._news = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    # What the engine says.

    def use(self, state: TierState) -> None:
        """The tiers that fetches may name."""
        with self._news:
            self._state = state

    def begin(self, session: int, fetches: list[Fetch]) -> None:
        with self._news:
            now = time.perf_counter()
            for fetch in fetches:
                self._arrivals.begin(session, fetch, now)
            self._news.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tier-fetch", daemon=True)
            self._thread.start()

    def end(self, key: Key) -> None:
        """When it returns, nothing more is written for this fetch."""
        with self._news:
            self._arrivals.end(key)

    def end_all(self) -> None:
        """As `end`, for all: the session is over."""
        with self._news:
            self._arrivals.end_all()

    @property
    def under_way(self) -> int:
        return len(self._arrivals)

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._arrivals.end_all()
            self._news.notify_all()
        for _, client in list(self._clients.values()):
            client.close()
        if self._thread is not None:
            self._thread.join(1.0)

    # The thread.

    def _work(self) -> None:
        while (arrival := self._next()) is not None:
            began = time.perf_counter()
            try:
                self._carry_out(arrival)
            except TierDown as down:
                structlog.get_logger().warning("fetch ends early", blocks=arrival.count, why=str(down))
            ended = time.perf_counter()
            if arrival.count:
                self.observe(arrival.fetch.tier, arrival.count, ended - began)
            self.blocks += arrival.count
            self.failed += len(arrival.fetch.blocks) - arrival.count
            self.report(arrival.key, arrival.count, int((ended - arrival.began) * 1e6))

    def _next(self) -> Arrival | None:
        with self._news:
            while (arrival := self._arrivals.take()) is None and not self._closed:
                self._news.wait()
            return None if self._closed else arrival

    def _carry_out(self, arrival: Arrival) -> None:
        """Raises `TierDown`; what arrived until then counts."""
        client = self._client_of(arrival.fetch.tier)
        deadline = arrival.began + LIMIT_S
        if client is None or time.perf_counter() > deadline:
            return
        for index, content in client.get(arrival.fetch.hashes, self._room):
            with self._news:
                if arrival.over:
                    return
                self._memory.write(arrival.fetch.blocks[index], content)
                arrival.count = index + 1
            if time.perf_counter() > deadline:
                return

    def _client_of(self, row: str) -> TierClient | None:
        """None: no such tier has made itself known, or not lately."""
        with self._news:
            offers = {tier_row(offer.instance, self._model): offer for offer in self._state.offers}
        for known, (offer, client) in list(self._clients.items()):
            if offers.get(known) != offer:
                client.close()
                del self._clients[known]
        if row not in offers:
            return None
        if row not in self._clients:
            self._clients[row] = offers[row], self._connect(offers[row])
        return self._clients[row][1]
