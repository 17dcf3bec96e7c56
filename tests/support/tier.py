"""A second tier in a thread of this process, for clients that block."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import uvloop

from services.kvstore.tier.server import TierServer
from services.kvstore.tier.store import TierStore
from shared.wire import TierOffer

T = TypeVar("T")

SECRET = "5ecret" * 8


class RunningTier:
    """`offer` is what kvstore would announce; `call` runs something in the tier's own thread."""

    def __init__(self, store: TierStore, server: TierServer, loop: asyncio.AbstractEventLoop) -> None:
        self.store = store
        self.server = server
        self._loop = loop
        self.offer = TierOffer(
            instance="k0",
            host="127.0.0.1",
            port=server.port,
            secret=SECRET,
            born=1,
            memory_bytes=store.book.arena.budget,
            disk_bytes=store.book.disk_bytes,
        )

    def call(self, work: Callable[[], T]) -> T:
        async def there() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(there(), self._loop).result(10)


@contextmanager
def running_tier(memory: int = 1 << 20, disk: int = 0, folder: Path | None = None) -> Iterator[RunningTier]:
    """A store and its server on a free port of the loopback."""
    started: list[RunningTier] = []
    failure: list[BaseException] = []
    ready = threading.Event()
    over = asyncio.Event()

    async def live() -> None:
        store = TierStore(memory, disk, folder)
        await store.open()
        server = TierServer(store, "127.0.0.1", 0, SECRET)
        await server.start()
        started.append(RunningTier(store, server, asyncio.get_running_loop()))
        ready.set()
        await over.wait()
        await server.close()
        await store.close(5.0)

    def thread() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(live())
        except BaseException as error:
            failure.append(error)
        finally:
            ready.set()

    running = threading.Thread(target=thread, name="tier")
    running.start()
    try:
        ready.wait(10)
        if failure:
            raise failure[0]
        yield started[0]
    finally:
        if started:
            started[0].call(over.set)
        running.join(10)


def block_hash(number: int) -> bytes:
    return sha256(number.to_bytes(8, "little")).digest()


def content(number: int, size: int = 4096) -> bytes:
    """Bytes that tell blocks apart."""
    return (sha256(b"content" + number.to_bytes(8, "little")).digest() * (size // 32 + 1))[:size]
