"""`python -m services.scheduler`: one scheduler of a model, from environment settings."""

import asyncio
import gc
import random
import secrets
import time

from services.scheduler.core import Core
from services.scheduler.leadership import owner_name
from services.scheduler.report import CoreMetrics, stats
from services.scheduler.settings import (
    SchedulerSettings,
    make_placement,
    make_policy,
    make_preemption,
    make_reservation,
    make_rules,
)
from services.scheduler.shell import Shell
from shared.runtime.service import ServiceContext, entry, run
from shared.runtime.settings import load

HEALTH_EVERY_S = 0.5


async def serve(context: ServiceContext) -> None:
    settings: SchedulerSettings = context.settings
    core = Core(
        # One life of a process: the name alone would let a restarted one pass for its former self.
        owner_name(settings.model, settings.instance, secrets.token_hex(4)),
        make_rules(settings),
        make_policy(settings),
        make_reservation(settings),
        rng=random.Random(secrets.randbits(64)),
        now=time.monotonic(),
        preemption=make_preemption(settings),
        placement=make_placement(settings),
    )
    context.metrics.register(CoreMetrics(core))
    context.stats = lambda: stats(core)

    async def watch() -> None:
        while True:
            ready = len(core.fleet.choices)
            state = core.leadership.rule.value
            context.set_health(True, {"owner": core.owner, "state": state, "instances_ready": ready})
            await asyncio.sleep(HEALTH_EVERY_S)

    watching = asyncio.ensure_future(watch())
    # Frames are short-lived and acyclic: full collections over what lives long only cost time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    try:
        await Shell(core, context.bus, context.store, settings.model, context.log).run(context.stopping)
    finally:
        watching.cancel()


def main() -> None:
    run(load(SchedulerSettings), "scheduler", serve)


if __name__ == "__main__":
    entry("scheduler", main)
