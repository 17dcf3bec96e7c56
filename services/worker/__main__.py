"""`python -m services.worker`: one instance of a model on this machine, from environment settings."""

import asyncio
import gc
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from services.worker.executors import make_runner
from services.worker.service import Identity, WorkerService
from services.worker.settings import WorkerSettings
from shared.model import ModelError
from shared.model.resolve import served_folder
from shared.runtime.service import ServiceContext, run
from shared.runtime.settings import load

HEALTH_EVERY_S = 0.5


async def serve(context: ServiceContext) -> None:
    settings: WorkerSettings = context.settings
    identity = Identity(
        instance=settings.instance,
        model=settings.model,
        born=time.time_ns() // 1000,
        max_slots=settings.slots,
        max_step_tokens=settings.max_step_tokens,
        version=version("hortator"),
    )
    worker = WorkerService(context.bus, make_runner(settings), identity, context.metrics)
    context.stats = worker.stats

    async def watch() -> None:
        while not context.stopping.is_set():
            context.set_health(*worker.health())
            await asyncio.sleep(HEALTH_EVERY_S)

    watching = asyncio.ensure_future(watch())
    # Block hashes live long and are many; a full collection in the middle of a step looks at them all.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    try:
        await worker.run(context.stopping)
    finally:
        watching.cancel()


def main() -> None:
    settings = load(WorkerSettings)
    if settings.model_dir:
        try:  # a .gguf file is converted once, before anybody counts on this worker
            settings = replace(settings, model_dir=str(served_folder(Path(settings.model_dir))))
        except ModelError as error:
            sys.exit(f"worker: {error}")
    run(settings, "worker", serve)


if __name__ == "__main__":
    main()
