"""`python -m services.kvstore`: keeps the prefix index and the instances' health in Redis true."""

import asyncio

from services.kvstore.metrics import KvstoreMetrics
from services.kvstore.service import KvstoreService
from services.kvstore.settings import KvstoreSettings
from shared.runtime.service import ServiceContext, entry, run
from shared.runtime.settings import load

HEALTH_EVERY_S = 0.5


async def serve(context: ServiceContext) -> None:
    settings: KvstoreSettings = context.settings
    service = KvstoreService(
        context.bus, context.store, settings.instance, sweep_every_s=settings.sweep_every_s
    )
    context.metrics.register(KvstoreMetrics(service))
    context.stats = service.stats

    async def watch() -> None:
        while True:
            context.set_health(*service.health())
            await asyncio.sleep(HEALTH_EVERY_S)

    watching = asyncio.ensure_future(watch())
    try:
        await service.run(context.stopping)
    finally:
        watching.cancel()


def main() -> None:
    run(load(KvstoreSettings), "kvstore", serve)


if __name__ == "__main__":
    entry("kvstore", main)
