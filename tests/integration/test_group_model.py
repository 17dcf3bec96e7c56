"""Groups of real rank processes with the default model: golden tokens, on one node and on two, and kills."""

import asyncio
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.servers import free_port
from services.worker.service import EngineFailed
from services.worker.settings import WorkerSettings
from shared.model import resolve
from shared.wire import Beat, Sampling
from tests.integration.test_group_mock import driven, lives, ranks_of
from tests.integration.test_group_nodes import node
from tests.support.running_worker import Worker, running

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())
START_S = 200


def settings(tp: int) -> WorkerSettings:
    return WorkerSettings(
        instance="w0",
        model="m",
        model_dir=str(resolve("smol").path),
        dtype="float32",
        kv_memory="256MiB",
        max_len=2048,
        tp=tp,
        threads=1,
    )


async def golden(worker: Worker) -> None:
    scheduler = worker.scheduler(in_flight=3)
    await scheduler.connect()
    how = [Sampling(max_tokens=len(case["golden"]), temperature=0.0) for case in GOLDEN]
    sequences = await scheduler.generate([case["ids"] for case in GOLDEN], how, chunk=200)
    assert [s.tokens for s in sequences] == [case["golden"] for case in GOLDEN]


async def test_golden_tokens_come_out_of_two_processes() -> None:
    async with running(settings(2), START_S) as worker:
        await golden(worker)


async def test_golden_tokens_come_out_of_three_processes_on_two_nodes() -> None:
    group = replace(
        settings(3), nodes=2, group_secret="a secret of this test", rendezvous=f"127.0.0.1:{free_port()}"
    )
    with node(group):
        async with running(group, START_S) as worker:
            await golden(worker)


async def test_a_rank_killed_in_the_middle_of_a_pass_hangs_nobody() -> None:
    async with running(settings(3), START_S) as worker:
        scheduler = await driven(worker)
        await scheduler.claim()
        pids = ranks_of(worker)
        long = [Sampling(max_tokens=100, temperature=0.0)] * 2
        generating = asyncio.ensure_future(
            scheduler.generate([list(range(100, 700 + i)) for i in range(2)], long, chunk=60)
        )
        await scheduler.result(2, timeout_s=60)
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        beat = await scheduler.hear(Beat, lambda beat: beat.info.state == "failed")
        assert time.monotonic() - began < 1.0
        assert f"rank 1 (pid {pids[1]}) was killed by SIGKILL" in dict(beat.info.detail)["failure"]
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(worker.task, 5)
        assert not [pid for rank, pid in pids.items() if rank and lives(pid)]
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)
