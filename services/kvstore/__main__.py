"""`python -m services.kvstore`: keeps the prefix index and the instances' health in Redis true, and blocks of
its own for whoever can use them."""

import asyncio

from services.kvstore.metrics import KvstoreMetrics, TierMetrics
from services.kvstore.service import KvstoreService
from services.kvstore.settings import KvstoreSettings, tier_options
from services.kvstore.tier.service import SecondTier
from shared.runtime.service import ServiceContext, entry, run
from shared.runtime.settings import load

HEALTH_EVERY_S = 0.5
FLUSH_SHARE = 0.6
"""Of `stop_grace_s`: how long blocks may be written to disk at the end."""


async def serve(context: ServiceContext) -> None:
    settings: KvstoreSettings = context.settings
    service = KvstoreService(
        context.bus, context.store, settings.instance, sweep_every_s=settings.sweep_every_s
    )
    options = tier_options(settings)
    tier = None if options is None else SecondTier(context.bus, options, settings.instance)
    context.metrics.register(KvstoreMetrics(service))
    if tier is not None:
        context.metrics.register(TierMetrics(tier))
    context.stats = lambda: (
        service.stats() | {"instance": settings.instance, "tier": None if tier is None else tier.stats()}
    )
    # The tier's goodbye is still to be written to the index.
    tier_over = asyncio.Event()

    async def keep_blocks(tier: SecondTier) -> None:
        try:
            await tier.run(context.stopping, FLUSH_SHARE * settings.stop_grace_s)
        finally:
            tier_over.set()

    async def watch() -> None:
        while True:
            context.set_health(*service.health())
            await asyncio.sleep(HEALTH_EVERY_S)

    watching = asyncio.ensure_future(watch())
    indexing = asyncio.ensure_future(service.run(context.stopping if tier is None else tier_over))
    keeping = [] if tier is None else [asyncio.ensure_future(keep_blocks(tier))]
    try:
        await asyncio.wait({indexing, *keeping}, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        watching.cancel()
        for task in keeping:
            task.cancel()
        # Not cancelled, but told to end: it may be in the midst of a word with the broker.
        ended = await asyncio.gather(*keeping, indexing, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


def main() -> None:
    settings = load(KvstoreSettings)
    tier_options(settings)  # refused before anything is started
    run(settings, "kvstore", serve)


if __name__ == "__main__":
    entry("kvstore", main)
