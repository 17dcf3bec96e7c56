"""A group on several "nodes", which are processes of this one: meeting over TCP, strangers, and ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.servers import free_port
from services.worker.group.facts import rank_env
from services.worker.service import EngineFailed
from services.worker.settings import WorkerSettings
from shared.runtime.settings import CannotStart
from shared.wire import Beat, Sampling
from tests.support.running_worker import Worker, running

ROOT = Path(__file__).parents[2]
START_S = 60
SECRET = "a secret of this test"


def settings(**more: Any) -> WorkerSettings:
    common = {"mock": True, "max_len": 512, "mock_blocks": 256, "max_slots": 8, "instance": "w0"}
    common |= {"tp": 3, "nodes": 2, "group_secret": SECRET, "rendezvous": f"127.0.0.1:{free_port()}"}
    return WorkerSettings(**common | more)


class Node:
    """A worker process of node 1 and what it logs."""

    def __init__(self, of: WorkerSettings, **other: Any) -> None:
        env = rank_env(replace(of, node_rank=1, **other), os.environ) | {"PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.worker"],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def lines(self) -> list[dict[str, Any]]:
        """All it logs until it ends."""
        out, _ = self.process.communicate(timeout=30)
        return [json.loads(line) for line in out.splitlines()]

    def refusal(self) -> str:
        """Why it cannot start."""
        lines = self.lines()
        return next(line["error"] for line in lines if line["event"] == "cannot start")


@contextmanager
def node(of: WorkerSettings, **other: Any) -> Iterator[Node]:
    started = Node(of, **other)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()
        assert started.process.stdout is not None
        started.process.stdout.close()


async def tokens(worker: Worker) -> list[int]:
    scheduler = worker.scheduler()
    await scheduler.connect()
    (sequence,) = await scheduler.generate([[1, 2, 3]], [Sampling(max_tokens=20)])
    return sequence.tokens


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=pytest.mark.mesh)])
async def test_two_nodes_compute_what_one_rank_does_and_end_together(host: str) -> None:
    async with running(settings(tp=1, nodes=1, group_secret="", rendezvous="")) as worker:
        alone = await tokens(worker)
    group = settings(rendezvous=f"{host}:{free_port()}")
    with node(group) as other:
        async with running(group, START_S) as worker:
            assert await tokens(worker) == alone
            ranks = worker.service.stats()["detail"]["ranks"]
            assert [part.split(":")[0] for part in ranks.split(", ")] == ["0", "1", "2"]
            assert f" on {socket.gethostname()}" in ranks
        assert any(line["event"] == "the group is over" for line in other.lines())
        assert other.process.returncode == 0


@pytest.mark.mesh
async def test_the_end_of_a_node_fails_the_instance_within_a_second_and_names_it() -> None:
    group = settings(mock_step_s=0.02)
    with node(group) as other:
        async with running(group, START_S) as worker:
            scheduler = worker.scheduler()
            await scheduler.connect()
            await scheduler.claim()
            began = time.monotonic()
            other.process.kill()
            beat = await scheduler.hear(Beat, lambda beat: beat.info.state == "failed")
            assert time.monotonic() - began < 1
            assert "rank 2 (node 1, " in dict(beat.info.detail)["failure"]
            with pytest.raises(EngineFailed, match=r"rank 2 \(node 1"):
                await asyncio.wait_for(worker.task, 5)


@pytest.mark.mesh
def test_the_end_of_node_0_ends_the_other_ranks() -> None:
    group = settings()
    with node(group) as other, ExitStack() as stack:
        env = rank_env(group, os.environ)
        lead = subprocess.Popen(
            [sys.executable, "-m", "tests.support.group_process"], cwd=ROOT, env=env, stdout=subprocess.PIPE
        )
        stack.callback(lead.wait)
        stack.callback(lead.kill)
        assert lead.stdout is not None
        stack.callback(lead.stdout.close)
        assert any(line.startswith(b'{"ranks"') for line in lead.stdout)
        lead.kill()
        other.process.wait(1.5)
        assert other.process.returncode == 1


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("other", "theirs", "ours"),
    [
        ({"group_secret": "not that of the other"}, "group_secret is not the one", "another group_secret"),
        ({"dtype": "float32"}, "dtype is float32, of rank 0 float16", "dtype is float32, of rank 0 float16"),
        ({"tp": 2}, "tp is 2, of rank 0 3", "tp is 2, of rank 0 3"),
    ],
    ids=["secret", "dtype", "tp"],
)
async def test_a_node_that_differs_is_told_what_differs_and_the_right_one_still_gets_in(
    other: dict[str, Any], theirs: str, ours: str, capfd: pytest.CaptureFixture[str]
) -> None:
    group = settings()

    async def lead() -> None:
        async with running(group, START_S) as worker:
            assert len(await tokens(worker)) == 20

    start = asyncio.ensure_future(lead())
    with node(group, **other) as wrong:
        assert theirs in await asyncio.to_thread(wrong.refusal)
        assert wrong.process.returncode == 1
    assert not start.done()
    with node(group):
        await start
    assert ours in capfd.readouterr().out


@pytest.mark.mesh
async def test_a_node_that_does_not_come_is_named_with_what_was_turned_away() -> None:
    group = settings(group_start_s=2.0)
    with pytest.raises(CannotStart) as missing:
        async with running(group, START_S):
            pass
    assert "rank 2 (node 1): has not connected to 127.0.0.1:" in str(missing.value)


@pytest.mark.mesh
async def test_a_node_says_that_node_0_does_not_come() -> None:
    with node(settings(group_start_s=1.0)) as lonely:
        refusal = await asyncio.to_thread(lonely.refusal)
    assert refusal.startswith("rank 2 cannot reach node 0 at 127.0.0.1:")
    assert "Connection refused" in refusal


@pytest.mark.mesh
async def test_strangers_and_slow_callers_do_not_keep_a_group_from_forming(
    capfd: pytest.CaptureFixture[str],
) -> None:
    group = settings()
    host, port = group.rendezvous.split(":")

    async def lead() -> None:
        async with running(group, START_S) as worker:
            assert len(await tokens(worker)) == 20

    start = asyncio.ensure_future(lead())
    strangers = []
    while True:
        try:
            strangers.append(socket.create_connection((host, int(port)), 1))
            break
        except OSError:
            assert not start.done()
            await asyncio.sleep(0.01)
    strangers += [socket.create_connection((host, int(port)), 1) for _ in range(30)]
    try:
        strangers[0].sendall(os.urandom(4096))
        strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[2].sendall(b"HORTGRP1" + bytes(35))
        strangers[3].sendall(b"HORTGRP1" + bytes(35) + bytes(32))
        strangers[4].sendall(b"H")
        with node(group):
            await asyncio.wait_for(start, 30)
    finally:
        for stranger in strangers:
            stranger.close()
    out = capfd.readouterr().out
    for why in ("does not speak as ranks do", "does not know the group_secret"):
        assert why in out
    assert SECRET not in out


@pytest.mark.mesh
def test_a_node_stops_its_ranks_when_it_is_told_to() -> None:
    with node(settings()) as other:
        deadline = time.monotonic() + 10
        while len(ranks := children_of(other.process.pid)) < 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert SECRET.encode() not in Path(f"/proc/{ranks[0]}/cmdline").read_bytes()
        other.process.send_signal(signal.SIGTERM)
        assert SECRET not in json.dumps(other.lines())
        assert other.process.returncode == 0
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
