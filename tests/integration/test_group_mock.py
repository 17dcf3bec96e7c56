"""A group of real rank processes without a model: what it computes, what is said and left when one ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.group.facts import rank_env
from services.worker.service import EngineFailed
from services.worker.settings import WorkerSettings
from shared.runtime.settings import CannotStart
from shared.wire import Beat, Sampling, Work
from tests.support.fake_scheduler import FakeScheduler
from tests.support.running_worker import Worker, running

ROOT = Path(__file__).parents[2]
SETTINGS = WorkerSettings(mock=True, max_len=512, mock_blocks=256, max_slots=8, instance="w0")
NOTICED_S = 1.0
START_S = 60


def pids_of(text: str) -> dict[int, int]:
    """Rank → pid of `0: 12, 1: 13`."""
    return {int(rank): int(pid) for rank, _, pid in (part.partition(": ") for part in text.split(", "))}


def ranks_of(worker: Worker) -> dict[int, int]:
    return pids_of(worker.service.stats()["detail"]["ranks"])


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def cpu_s(pid: int) -> float:
    """Seconds all threads of a process have computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until_gone(pids: list[int], limit_s: float) -> float:
    """Seconds until none of them lives."""
    began = time.monotonic()
    while left := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() - began < limit_s, f"still alive: {left}"
        time.sleep(0.005)
    return time.monotonic() - began


async def driven(worker: Worker) -> FakeScheduler:
    scheduler = worker.scheduler()
    await scheduler.connect()
    return scheduler


async def tokens(worker: Worker, count: int = 5) -> list[list[int]]:
    scheduler = await driven(worker)
    prompts = [[1 + i, 2, 3, 4] for i in range(count)]
    sampling = [Sampling(max_tokens=20, seed=i) for i in range(count)]
    return [sequence.tokens for sequence in await scheduler.generate(prompts, sampling)]


@pytest.mark.parametrize("tp", [2, 3])
async def test_a_group_gives_the_tokens_of_one_rank_and_leaves_no_process(tp: int) -> None:
    async with running(SETTINGS) as worker:
        alone = await tokens(worker)
    async with running(replace(SETTINGS, tp=tp), START_S) as worker:
        assert await tokens(worker) == alone
        pids = ranks_of(worker)
        assert len(pids) == tp
        # A mock needs no torch, on no rank.
        assert not any("libtorch" in maps_of(pid) for rank, pid in pids.items() if rank)
        before = {pid: cpu_s(pid) for pid in pids.values()}
        await asyncio.sleep(1.0)
        assert all(cpu_s(pid) - spent < 0.1 for pid, spent in before.items()), "a core burns while idle"
        began = time.monotonic()
    assert time.monotonic() - began < 2
    assert not [pid for rank, pid in pids.items() if rank and lives(pid)]


async def test_a_group_leaves_neither_descriptors_nor_threads_nor_memory_in_its_process() -> None:
    async def once() -> tuple[int, int, int]:
        async with running(replace(SETTINGS, tp=2), START_S) as worker:
            await tokens(worker)
        shared = maps_of(os.getpid()).count("hortator-group")
        return len(os.listdir("/proc/self/fd")), threading.active_count(), shared

    first = await once()
    assert await once() == first
    assert first[2] == 0


async def test_a_new_session_and_a_frame_that_contradicts_the_batch_find_all_ranks_alike() -> None:
    async with running(replace(SETTINGS, tp=2), START_S) as worker:
        scheduler = await driven(worker)
        first = await scheduler.generate([[5, 6]], [Sampling(max_tokens=8)])
        await scheduler.send(scheduler.frame(work=[Work(3, 1)]))  # slot 3 is free
        await scheduler.hear(Beat, lambda beat: beat.info.state == "failed")
        scheduler.epoch += 1
        await scheduler.claim()
        again = await scheduler.generate([[5, 6]], [Sampling(max_tokens=8)])
        assert again[0].tokens == first[0].tokens


@pytest.mark.mesh
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a step"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_the_end_of_a_rank_fails_the_instance_within_a_second_and_names_it(
    busy: bool, number: signal.Signals
) -> None:
    async with running(replace(SETTINGS, tp=3, mock_step_s=0.05 if busy else 0.0), START_S) as worker:
        scheduler = await driven(worker)
        pids = ranks_of(worker)
        await scheduler.claim()
        generating = asyncio.ensure_future(
            scheduler.generate([[1, 2]] if busy else [], [Sampling(max_tokens=400)] * busy)
        )
        if busy:
            await scheduler.result(3)
        began = time.monotonic()
        os.kill(pids[1], number)
        beat = await scheduler.hear(Beat, lambda beat: beat.info.state == "failed")
        assert time.monotonic() - began < NOTICED_S
        assert f"rank 1 (pid {pids[1]}) was killed by {number.name}" in dict(beat.info.detail)["failure"]
        with pytest.raises(EngineFailed, match="rank 1"):
            await asyncio.wait_for(worker.task, 5)
        assert time.monotonic() - began < 2 * NOTICED_S
        assert not [pid for rank, pid in pids.items() if rank and lives(pid)]
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)


async def test_a_rank_that_drew_something_else_fails_the_instance_and_says_so() -> None:
    async with running(replace(SETTINGS, tp=2), START_S) as worker:
        scheduler = await driven(worker)
        await scheduler.generate([[1, 2]], [Sampling(max_tokens=3)])
        worker.runner.ask(lambda compute: setattr(compute, "check", compute.check ^ 1), lambda _: None)
        scheduler.epoch += 1
        await scheduler.claim()
        generating = asyncio.ensure_future(scheduler.generate([[1, 2]], [Sampling(max_tokens=400)]))
        with pytest.raises(EngineFailed, match=r"rank 1 .*: it drew other tokens than rank 0"):
            await asyncio.wait_for(worker.task, 5)
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)


@contextmanager
def group_process(settings: WorkerSettings) -> Iterator[tuple["subprocess.Popen[bytes]", dict[int, int]]]:
    env = rank_env(settings, os.environ)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.group_process"],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b'{"ranks"'):
                break
        else:
            pytest.fail("the group did not form")
        yield process, pids_of(json.loads(line)["ranks"])
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.mesh
@pytest.mark.parametrize("step_s", [0.0, 0.2])
def test_no_rank_survives_the_kill_of_rank_0_by_a_second(step_s: float) -> None:
    with group_process(replace(SETTINGS, tp=3, mock_step_s=step_s)) as (process, pids):
        process.kill()
        assert until_gone(list(pids.values())[1:], NOTICED_S) < NOTICED_S


@pytest.mark.mesh
def test_sigterm_to_rank_0_closes_the_group_in_good_order() -> None:
    with group_process(replace(SETTINGS, tp=2, mock_step_s=0.05)) as (process, pids):
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        assert not lives(pids[1])


@pytest.mark.mesh
async def test_a_rank_that_stands_still_does_not_keep_the_instance_from_ending() -> None:
    async with running(replace(SETTINGS, tp=2), START_S) as worker:
        pids = ranks_of(worker)
        os.kill(pids[1], signal.SIGSTOP)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert not lives(pids[1])


@pytest.mark.mesh
async def test_a_rank_that_stands_still_in_a_step_is_lost_after_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.worker.group.form.LIMIT_S", 0.5)
    async with running(replace(SETTINGS, tp=2, mock_step_s=0.01), START_S) as worker:
        scheduler = await driven(worker)
        await scheduler.claim()
        pids = ranks_of(worker)
        generating = asyncio.ensure_future(scheduler.generate([[1, 2]], [Sampling(max_tokens=400)]))
        await scheduler.result(3)
        os.kill(pids[1], signal.SIGSTOP)
        began = time.monotonic()
        await scheduler.hear(Beat, lambda beat: beat.info.state == "failed")
        assert time.monotonic() - began < 2.5
        with pytest.raises(EngineFailed, match=r"rank 1"):
            await asyncio.wait_for(worker.task, 5)
        assert not lives(pids[1])
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)


async def test_settings_that_a_group_cannot_have_are_refused() -> None:
    with pytest.raises(CannotStart, match="device='cuda:0': name one device for each of 2"):
        async with running(replace(SETTINGS, tp=2, device="cuda:0"), START_S):
            pass
