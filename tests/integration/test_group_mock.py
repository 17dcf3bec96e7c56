"""A group of real rank processes without a model: what it computes, and what is said when one ends."""

import os
import time

import pytest

from services.worker.settings import WorkerSettings
from shared.wire import Sampling
from tests.support.running_worker import Worker, running


def settings(**more: object) -> WorkerSettings:
    return WorkerSettings(mock=True, max_len=512, mock_blocks=256, max_slots=8, instance="w0", **more)  # type: ignore[arg-type]


def ranks_of(worker: Worker) -> dict[int, int]:
    """Rank → pid."""
    text = worker.service.stats()["detail"]["ranks"]
    return {int(rank): int(pid) for rank, _, pid in (part.partition(": ") for part in text.split(", "))}


def lives(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


async def tokens(worker: Worker, count: int = 5) -> list[list[int]]:
    scheduler = worker.scheduler()
    await scheduler.connect()
    prompts = [[1 + i, 2, 3, 4] for i in range(count)]
    sampling = [Sampling(max_tokens=20, seed=i) for i in range(count)]
    return [sequence.tokens for sequence in await scheduler.generate(prompts, sampling)]


@pytest.mark.parametrize("tp", [2, 3])
async def test_a_group_gives_the_tokens_of_one_rank(tp: int) -> None:
    async with running(settings()) as worker:
        alone = await tokens(worker)
    async with running(settings(tp=tp), start_s=60) as worker:
        assert await tokens(worker) == alone
        pids = ranks_of(worker)
        assert len(pids) == tp
        began = time.monotonic()
    assert time.monotonic() - began < 3
    assert not [pid for rank, pid in pids.items() if rank and lives(pid)]
