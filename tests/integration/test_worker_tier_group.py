"""A group of ranks with a second tier: each rank's part goes there and comes back; all end with the same."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from shared.bus.memory import MemoryBroker
from shared.wire import Admit, Beat, Fetch, Fetched, Sampling, Work
from tests.support.fake_scheduler import FakeScheduler
from tests.support.running_worker import Worker, running
from tests.support.tiers import FULL, PROMPT, ROW, Tier, tier_on, until
from tests.support.tiers import SETTINGS as ALONE

SETTINGS = replace(ALONE, tp=2)


@pytest.fixture
async def group() -> AsyncIterator[tuple[Worker, Tier]]:
    broker = MemoryBroker()
    async with tier_on(broker) as tier, running(SETTINGS, start_s=60, broker=broker) as worker:
        yield worker, tier


async def claimed(worker: Worker) -> FakeScheduler:
    scheduler = worker.scheduler()
    await scheduler.connect()
    await scheduler.claim()
    await scheduler.hear(Beat, lambda beat: beat.info.tier == ROW, timeout_s=15)
    return scheduler


async def fetched(scheduler: FakeScheduler, op: int) -> Fetched:
    beat = await scheduler.hear(Beat, lambda beat: any(each.op == op for each in beat.fetched), timeout_s=15)
    return next(each for each in beat.fetched if each.op == op)


async def keep(scheduler: FakeScheduler, tier: Tier) -> tuple[list[bytes], list[int]]:
    """Hashes of the prompt's blocks, all parts of which are in the tier, and the token it gave."""
    admit = Admit(0, 0, len(PROMPT), PROMPT, 0, list(range(FULL + 1)), Sampling(max_tokens=40, seed=1))
    done = await scheduler.step(admit=[admit], work=[Work(0, len(PROMPT))])
    hashes = [row.hash for row in done.stored]
    await until(lambda: tier.has(hashes))
    await scheduler.step(release=[0])
    return hashes, done.tokens


async def test_every_rank_brings_back_its_own_part(group: tuple[Worker, Tier]) -> None:
    worker, tier = group
    scheduler = await claimed(worker)
    hashes, tokens = await keep(scheduler, tier)
    into = list(range(30, 30 + FULL))
    await scheduler.step(fetch=[Fetch(1, ROW, into, hashes)])
    assert (await fetched(scheduler, 1)).count == FULL
    # Each rank of mocks refuses to go on from another rank's part.
    admit = Admit(1, 0, len(PROMPT), PROMPT, FULL * 16, [*into, 60], Sampling(max_tokens=40, seed=1))
    assert (await scheduler.step(admit=[admit], work=[Work(1, 4)])).tokens == tokens


async def test_a_part_that_is_spoilt_ends_the_fetch_there_on_all_ranks(group: tuple[Worker, Tier]) -> None:
    worker, tier = group
    scheduler = await claimed(worker)
    hashes, tokens = await keep(scheduler, tier)
    tier.spoil(hashes[3], part=1, parts=2)
    into = list(range(30, 30 + FULL))
    await scheduler.step(fetch=[Fetch(1, ROW, into, hashes)])
    assert (await fetched(scheduler, 1)).count == 3
    admit = Admit(1, 0, len(PROMPT), PROMPT, 48, [*into[:3], *range(50, 58)], Sampling(max_tokens=40, seed=1))
    done = await scheduler.step(admit=[admit], work=[Work(1, len(PROMPT) - 48)])
    assert done.tokens == tokens
    # The other blocks belong to nobody and hold nothing.
    inventory = (await scheduler.claim()).blocks
    assert not {row.block for row in inventory} & set(into[3:])


async def test_a_new_life_of_a_group_finds_what_the_former_left() -> None:
    broker = MemoryBroker()
    async with tier_on(broker) as tier:
        async with running(SETTINGS, start_s=60, broker=broker) as worker:
            hashes, tokens = await keep(await claimed(worker), tier)
        async with running(replace(SETTINGS, mock_blocks=32), start_s=60, broker=broker) as worker:
            scheduler = worker.scheduler(epoch=2)
            await scheduler.connect()
            await scheduler.claim()
            await scheduler.hear(Beat, lambda beat: beat.info.tier == ROW, timeout_s=15)
            into = list(range(FULL))
            await scheduler.step(fetch=[Fetch(1, ROW, into, hashes)])
            assert (await fetched(scheduler, 1)).count == FULL
            admit = Admit(1, 0, len(PROMPT), PROMPT, FULL * 16, [*into, 20], Sampling(max_tokens=40, seed=1))
            assert (await scheduler.step(admit=[admit], work=[Work(1, 4)])).tokens == tokens
