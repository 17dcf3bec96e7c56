"""A second tier inside the test's own event loop, on a broker in memory and a free port of this machine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from services.kvstore.settings import TierOptions
from services.kvstore.tier.entries import Key, Space
from services.kvstore.tier.service import SecondTier
from services.worker.settings import WorkerSettings
from shared.bus.memory import MemoryBroker
from shared.ids import BlockHash
from shared.subjects import tier_row

ROW = tier_row("kv0", "m")
"""In the prefix index, of model m in the tier of kvstore kv0."""
SETTINGS = WorkerSettings(
    model="m",
    mock=True,
    mock_blocks=64,
    mock_token_s=5e-4,
    block_tokens=16,
    max_slots=8,
    max_len=1024,
    tier_staging="1KiB",
)
"""Of a mock that has blocks worth keeping: it takes time to compute them."""
PROMPT = list(range(100, 100 + 164))
FULL = len(PROMPT) // 16
"""Blocks that it fills."""

OPTIONS = TierOptions(64 << 20, 0, None, "127.0.0.1", 0, "127.0.0.1")


async def until(true: Callable[[], Any], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.01)


@dataclass
class Tier:
    service: SecondTier
    stopping: asyncio.Event
    task: asyncio.Task[None]

    @property
    def blocks(self) -> int:
        """Of model m, complete."""
        return self.service.store.book.complete_count("m")

    def has(self, hashes: Iterable[bytes]) -> bool:
        """All parts of all of these, of model m."""
        return set(hashes) <= set(self.service.store.book.complete("m"))

    def spoil(self, block_hash: bytes, part: int = 0, parts: int = 1) -> None:
        """Change a byte of what it has in memory of that block of model m."""
        entry = self.service.store.book.find(Key(Space("m", part, parts), BlockHash(block_hash)))
        assert entry is not None
        assert entry.block is not None
        entry.block.view[0] ^= 1

    async def stop(self) -> None:
        self.stopping.set()
        await self.task


@contextlib.asynccontextmanager
async def tier_on(broker: MemoryBroker, name: str = "kv0", **options: object) -> AsyncIterator[Tier]:
    service = SecondTier(broker.connect(), replace(OPTIONS, **options), name)  # type: ignore[arg-type]
    stopping = asyncio.Event()
    task = asyncio.ensure_future(service.run(stopping, 0.0))
    try:
        yield Tier(service, stopping, task)
    finally:
        stopping.set()
        await task
