"""The whole worker around the real engine: frames in, golden tokens out."""

import json
from pathlib import Path

import pytest

from services.worker.settings import WorkerSettings
from shared.model import resolve
from shared.wire import Sampling
from tests.support.running_worker import running

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())


async def test_golden_tokens_come_out_of_frames_in_flight_with_small_chunks() -> None:
    settings = WorkerSettings(
        instance="w0",
        model="m",
        model_dir=str(resolve("smol").path),
        dtype="float32",
        kv_memory="256MiB",
        max_len=2048,
    )
    async with running(settings, start_s=60) as worker:
        scheduler = worker.scheduler(in_flight=3)
        await scheduler.connect()
        how = [Sampling(max_tokens=len(case["golden"]), temperature=0.0) for case in GOLDEN]
        sequences = await scheduler.generate([case["ids"] for case in GOLDEN], how, chunk=40)
        assert [s.tokens for s in sequences] == [case["golden"] for case in GOLDEN]
