"""A worker and a second tier in one loop: blocks go there and come back; faults cost a recompute."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from services.worker.mock import MockExecutor
from shared.wire import Admit, Beat, Done, Fetch, Fetched, Sampling, Work
from tests.support.fake_scheduler import FakeScheduler
from tests.support.running_worker import Worker, running
from tests.support.tiers import FULL, PROMPT, ROW, SETTINGS, Tier, tier_on, until


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with running(SETTINGS) as worker:
        yield worker


@pytest.fixture
async def tier(worker: Worker) -> AsyncIterator[Tier]:
    async with tier_on(worker.broker) as tier:
        yield tier


@pytest.fixture
async def scheduler(worker: Worker) -> FakeScheduler:
    scheduler = worker.scheduler()
    await scheduler.connect()
    await scheduler.claim()
    return scheduler


def admission(slot: int, blocks: list[int], computed: int = 0, ids: list[int] = PROMPT) -> Admit:
    return Admit(slot, 0, len(ids), ids, computed, blocks, Sampling(max_tokens=40, seed=1))


async def reached(scheduler: FakeScheduler) -> Beat:
    return await scheduler.hear(Beat, lambda beat: beat.info.tier == ROW, timeout_s=15)


async def fetched(scheduler: FakeScheduler, op: int, timeout_s: float = 5.0) -> Fetched:
    beat: Beat = await scheduler.hear(
        Beat, lambda beat: any(each.op == op for each in beat.fetched), timeout_s=timeout_s
    )
    return next(each for each in beat.fetched if each.op == op)


async def prefill(scheduler: FakeScheduler, blocks: list[int], ids: list[int] = PROMPT) -> Done:
    return await scheduler.step(admit=[admission(0, blocks, ids=ids)], work=[Work(0, len(ids))])


async def keep(scheduler: FakeScheduler, tier: Tier) -> list[bytes]:
    """Compute the prompt in blocks 0 to 10, see its full ones in the tier, and let it go; their hashes."""
    await reached(scheduler)
    done = await prefill(scheduler, list(range(FULL + 1)))
    hashes = [row.hash for row in done.stored]
    await until(lambda: tier.has(hashes))
    await scheduler.step(release=[0])
    return hashes


async def test_blocks_go_to_the_tier_and_come_back_under_their_hashes(
    scheduler: FakeScheduler, tier: Tier, worker: Worker
) -> None:
    hashes = await keep(scheduler, tier)
    first = scheduler.done[1].tokens
    into = list(range(30, 30 + FULL))
    await scheduler.step(fetch=[Fetch(1, ROW, into, hashes)])
    end = await fetched(scheduler, 1)
    assert end.count == FULL
    assert end.us > 0
    # A mock refuses to go on from blocks that hold anything else.
    done = await scheduler.step(admit=[admission(1, [*into, 60], FULL * 16)], work=[Work(1, 4)])
    assert done.tokens == first
    inventory = (await scheduler.claim()).blocks
    assert {row.block for row in inventory} == {*range(FULL), *into}
    report = worker.service.stats()["second_tier"]
    assert (report["sent"], report["fetched"]) == (FULL, FULL)
    counter = "hortator_worker_tier_blocks_total"
    await until(lambda: worker.registry.get_sample_value(counter, {"what": "sent"}) == FULL)


async def test_a_new_life_of_a_worker_finds_what_the_former_left_in_the_tier(
    scheduler: FakeScheduler, tier: Tier, worker: Worker
) -> None:
    hashes = await keep(scheduler, tier)
    tokens = scheduler.done[1].tokens
    await worker.stop()
    async with running(SETTINGS, broker=worker.broker) as reborn:
        scheduler = reborn.scheduler(epoch=2)
        await scheduler.connect()
        await scheduler.claim()
        await reached(scheduler)
        await scheduler.step(fetch=[Fetch(1, ROW, list(range(FULL)), hashes)])
        assert (await fetched(scheduler, 1)).count == FULL
        done = await scheduler.step(admit=[admission(0, list(range(FULL + 1)), FULL * 16)], work=[Work(0, 4)])
        assert done.tokens == tokens


async def test_blocks_stored_by_a_fetch_are_told_to_the_index(
    scheduler: FakeScheduler, tier: Tier, worker: Worker
) -> None:
    from shared import subjects

    heard: list[Any] = []
    bus = worker.broker.connect()
    await bus.subscribe(subjects.KV_EVENTS.at(instance="w0"), heard.append)
    hashes = await keep(scheduler, tier)
    other = list(range(400, 400 + 163))
    await prefill(scheduler, list(range(FULL + 1)), other)  # over the same blocks
    await until(lambda: {each for event in heard for each in event.removed} == set(hashes))
    heard.clear()
    await scheduler.step(fetch=[Fetch(1, ROW, list(range(20, 20 + FULL)), hashes)])
    await until(lambda: {each for event in heard for each in event.stored} == set(hashes))


async def test_a_fetch_gets_what_the_tier_has_of_the_beginning_and_nothing_behind_it(
    scheduler: FakeScheduler, tier: Tier
) -> None:
    hashes = await keep(scheduler, tier)
    chain = [*hashes[:3], bytes(32), *hashes[4:6]]
    await scheduler.step(fetch=[Fetch(7, ROW, list(range(30, 36)), chain)])
    assert (await fetched(scheduler, 7)).count == 3
    inventory = (await scheduler.claim()).blocks
    assert {row.block: row.hash for row in inventory if row.block >= 30} == dict(zip((30, 31, 32), hashes))


async def test_a_corrupt_block_ends_its_fetch_and_is_not_written(
    scheduler: FakeScheduler, tier: Tier
) -> None:
    hashes = await keep(scheduler, tier)
    tier.spoil(hashes[2])
    await scheduler.step(fetch=[Fetch(1, ROW, list(range(30, 40)), hashes)])
    assert (await fetched(scheduler, 1)).count == 2


@pytest.mark.parametrize("row", ["tier-unknown", ""])
async def test_a_fetch_from_a_tier_nobody_knows_ends_at_once_with_nothing(
    row: str, scheduler: FakeScheduler
) -> None:
    await scheduler.step(fetch=[Fetch(3, row, [1, 2], [bytes(32), bytes(32)])])
    assert (await fetched(scheduler, 3)).count == 0
    # The blocks are free again.
    await prefill(scheduler, list(range(FULL + 1)))


async def test_without_a_second_tier_a_fetch_is_answered_all_the_same() -> None:
    async with running(replace(SETTINGS, tier_staging="0")) as worker:
        scheduler = worker.scheduler()
        await scheduler.connect()
        await scheduler.claim()
        await scheduler.step(fetch=[Fetch(3, ROW, [1, 2], [bytes(32), bytes(32)])])
        assert (await fetched(scheduler, 3)).count == 0
        await prefill(scheduler, list(range(FULL + 1)))


async def test_each_end_is_told_in_later_beats_too_and_no_more_after_a_claim(
    scheduler: FakeScheduler,
) -> None:
    await scheduler.step(fetch=[Fetch(3, "tier-x", [1], [bytes(32)])])
    await fetched(scheduler, 3)
    await scheduler.step(fetch=[Fetch(4, "tier-x", [1], [bytes(32)])])
    beat: Beat = await scheduler.hear(Beat, lambda beat: len(beat.fetched) == 2)
    assert [each.op for each in beat.fetched] == [3, 4]
    await scheduler.claim()
    scheduler.heard.clear()
    beat = await scheduler.hear(Beat)
    assert beat.fetched == []


async def test_the_instance_says_when_its_tier_goes_and_when_it_comes_back(
    scheduler: FakeScheduler, tier: Tier, worker: Worker
) -> None:
    beat = await reached(scheduler)
    assert 0 < beat.info.tier_fixed_s + 8 * beat.info.tier_block_s < 8 * 16 * 5e-4
    hashes = await keep(scheduler, tier)
    await tier.stop()
    scheduler.heard.clear()
    await scheduler.hear(Beat, lambda beat: beat.info.tier == "", timeout_s=15)
    await scheduler.step(fetch=[Fetch(1, ROW, [30, 31], hashes[:2])])
    assert (await fetched(scheduler, 1)).count == 0
    scheduler.heard.clear()
    async with tier_on(worker.broker) as again:
        await reached(scheduler)
        # What the worker still holds is brought there anew.
        await until(lambda: again.has(hashes))
        await scheduler.step(fetch=[Fetch(2, ROW, [30, 31], hashes[:2])])
        assert (await fetched(scheduler, 2)).count == 2


async def test_nothing_goes_to_a_tier_from_which_it_is_had_no_sooner_than_it_is_computed() -> None:
    async with running(replace(SETTINGS, mock_token_s=1e-9)) as worker, tier_on(worker.broker) as tier:
        scheduler = worker.scheduler()
        await scheduler.connect()
        await scheduler.claim()

        def timed() -> bool:
            report = worker.service.stats()["second_tier"]
            return report["fetch_fixed_us"] + report["fetch_block_us"] > 0

        await until(timed)
        probes = tier.blocks
        # Too short to say anything of how long tokens really take.
        await prefill(scheduler, list(range(FULL + 1)), PROMPT[:48])
        beats = len([each for each in scheduler.heard if isinstance(each, Beat)])
        beat: Beat = await scheduler.hear(Beat, times=beats + 2)
        assert beat.info.tier == ""
        assert tier.blocks == probes


def test_a_mock_that_takes_no_time_keeps_no_blocks_elsewhere() -> None:
    from services.worker.mock import MockCosts
    from services.worker.step import ExecutorInfo

    info = ExecutorInfo("fp", 16, 10, 100, 64, 0, 0)
    assert MockExecutor(info, 4, MockCosts(step_s=0.1)).kv_memory is None
