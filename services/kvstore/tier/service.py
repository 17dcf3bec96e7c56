"""The second tier of one kvstore process, put together: store, server, and what is said of them."""

import asyncio
import secrets
import time
from importlib import metadata
from typing import Any

import structlog

from services.kvstore.settings import TierOptions
from services.kvstore.tier.rates import Rate
from services.kvstore.tier.server import TierServer
from services.kvstore.tier.speaker import TierSpeaker
from services.kvstore.tier.store import TierStore
from shared.bus.port import Bus
from shared.runtime.settings import PREFIX, CannotStart
from shared.wire import TierOffer

log = structlog.get_logger()

TICK_S = 1.0


class SecondTier:
    """`run` is its whole life."""

    def __init__(self, bus: Bus, options: TierOptions, instance: str) -> None:
        self.store = TierStore(options.memory_bytes, options.disk_bytes, options.folder)
        self.received, self.sent = Rate(), Rate()
        """Bytes of blocks."""
        self._bus = bus
        self._options = options
        self._instance = instance
        self._secret = secrets.token_hex(32)
        self.server = TierServer(self.store, options.host, options.port, self._secret)

    async def run(self, stopping: asyncio.Event, flush_s: float) -> None:
        """Raises `CannotStart`. What only memory holds is written to disk at the end, within `flush_s`."""
        await self.store.open()
        try:
            await self._serve(stopping)
        finally:
            await self.store.close(flush_s)

    async def _serve(self, stopping: asyncio.Event) -> None:
        options = self._options
        try:
            await self.server.start()
        except OSError as error:
            raise CannotStart(
                f"the second tier cannot listen at {options.host}:{options.port}: {error}; "
                f"correct {PREFIX}TIER_HOST and {PREFIX}TIER_PORT"
            ) from None
        log.info("second tier listens", host=options.host, port=self.server.port)
        speaker = TierSpeaker(
            self._bus, self.store.book, self.store.changed, self._offer(), metadata.version("hortator")
        )
        speaking = asyncio.ensure_future(speaker.run())
        ending = asyncio.ensure_future(stopping.wait())
        try:
            while not stopping.is_set():
                await asyncio.wait({speaking, ending}, timeout=TICK_S, return_when="FIRST_COMPLETED")
                if speaking.done():
                    speaking.result()
                self._tick(time.monotonic())
        finally:
            ending.cancel()
            speaking.cancel()
            await asyncio.wait({speaking})
            await speaker.say_goodbye()
            await self.server.close()

    def _tick(self, now: float) -> None:
        book = self.store.book
        book.expire(now)
        self.received.note(book.counts.bytes_in, now)
        self.sent.note(book.counts.bytes_out, now)

    def _offer(self) -> TierOffer:
        return TierOffer(
            instance=self._instance,
            host=self._options.announce,
            port=self.server.port,
            secret=self._secret,
            born=time.time_ns() // 1000,
            memory_bytes=self._options.memory_bytes,
            disk_bytes=self._options.disk_bytes,
        )

    def stats(self) -> dict[str, Any]:
        """For service discovery and `hortator status`."""
        book, counts = self.store.book, self.store.book.counts
        return {
            "address": f"{self._options.announce}:{self.server.port}",
            "connections": self.server.connected,
            "memory_bytes": book.arena.used,
            "memory_budget": book.arena.budget,
            "disk_bytes": book.disk_used,
            "disk_budget": book.disk_bytes,
            "blocks": book.blocks,
            "complete": {model: book.complete_count(model) for model in book.models},
            "pinned_bytes": book.pinned_bytes,
            "hits": counts.hits,
            "misses": counts.misses,
            "corrupt": counts.corrupt,
            "evicted": counts.evicted,
            "refused": counts.refused,
            "received_bytes": counts.bytes_in,
            "sent_bytes": counts.bytes_out,
            "received_bytes_per_s": round(self.received.per_s),
            "sent_bytes_per_s": round(self.sent.per_s),
        }
