"""A worker inside the test's own event loop, on a broker in memory."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from services.worker.executors import make_runner
from services.worker.runner import Runner
from services.worker.service import EngineFailed, Identity, WorkerService
from services.worker.settings import WorkerSettings
from shared.bus.memory import MemoryBroker
from tests.support.fake_scheduler import FakeScheduler


@dataclass
class Worker:
    broker: MemoryBroker
    service: WorkerService
    runner: Runner
    registry: CollectorRegistry
    stopping: asyncio.Event
    task: asyncio.Task[None]

    def scheduler(self, **options: object) -> FakeScheduler:
        return FakeScheduler(self.broker.connect(), "w0", **options)  # type: ignore[arg-type]

    async def stop(self) -> None:
        self.stopping.set()
        await self.task


@contextlib.asynccontextmanager
async def running(
    settings: WorkerSettings,
    start_s: float = 5,
    max_payload: int = 1 << 20,
    broker: MemoryBroker | None = None,
) -> AsyncIterator[Worker]:
    broker = broker or MemoryBroker(max_payload)
    registry = CollectorRegistry()
    runner = make_runner(settings)
    identity = Identity("w0", settings.model, 1000, settings.slots, settings.max_step_tokens)
    service = WorkerService(broker.connect(), runner, identity, registry)
    stopping = asyncio.Event()
    task = asyncio.ensure_future(service.run(stopping))
    ready = asyncio.ensure_future(service.ready.wait())
    await asyncio.wait({ready, task}, timeout=start_s, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    assert ready.done(), f"not ready within {start_s} s"
    worker = Worker(broker, service, runner, registry, stopping, task)
    try:
        yield worker
    finally:
        stopping.set()
        with contextlib.suppress(EngineFailed):
            await task
