"""`python -m services.worker`: one instance of a model on this machine, from environment settings."""

import asyncio
import gc
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from services.worker.engine.runtime_memory import runtime_bytes
from services.worker.executors import UNSERVABLE, make_runner
from services.worker.fit import fitted
from services.worker.group.layout import layout_of
from services.worker.group.node import run_node
from services.worker.service import Identity, WorkerService
from services.worker.settings import WorkerSettings
from shared.model import ModelError
from shared.model.resolve import served_folder
from shared.runtime.service import ServiceContext, entry, run
from shared.runtime.settings import CannotStart, load

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
    except ModuleNotFoundError as error:
        raise CannotStart(f"{error.name} is not installed: hortator's extra `worker` brings it") from error
    except UNSERVABLE as error:
        if worker.ready.is_set():
            raise
        raise CannotStart(str(error)) from error
    finally:
        watching.cancel()


def main() -> None:
    settings = load(WorkerSettings)
    if settings.model_dir:
        settings = replace(settings, model_dir=str(model_folder(Path(settings.model_dir))))
    if settings.tp > 1:
        layout_of(settings)
    settings = fitted(settings, runtime_bytes)
    if settings.node_rank:
        raise SystemExit(run_node(settings))
    run(settings, "worker", serve)


def model_folder(given: Path) -> Path:
    """What HORTATOR_MODEL_DIR names, a .gguf file converted first. Raises CannotStart."""
    if not given.exists():
        raise CannotStart(
            f"HORTATOR_MODEL_DIR={given}: there is no such folder or .gguf file; "
            "`hortator model pull` (extra `local`) fetches a model and prints its folder"
        )
    try:
        return served_folder(given)
    except ModelError as error:
        raise CannotStart(str(error)) from error


if __name__ == "__main__":
    entry("worker", main)
