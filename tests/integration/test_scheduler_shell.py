"""The scheduler's shell in one process with a mock worker and a client, on the bus and store in memory."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest

from services.scheduler.admission import ExpectedOutput
from services.scheduler.core import Core, Rules
from services.scheduler.fetching import FetchRules
from services.scheduler.policy import ContinuousPolicy
from services.scheduler.report import CoreMetrics, stats
from services.scheduler.shell import Shell
from services.worker.executors import make_runner
from services.worker.service import Identity, WorkerService
from services.worker.settings import WorkerSettings
from shared import subjects
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.client.effects import Open
from shared.client.mesh import MeshClient
from shared.store.memory import MemoryStore
from shared.store.port import Store
from shared.wire import Answer, Drain, EndRow, Sampling

MODEL = "mock"


@dataclass
class Stream:
    """Sink of one sequence."""

    ids: list[int] = field(default_factory=list)
    end: EndRow | None = None
    refusal: Answer | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def accepted(self, request: Any) -> None:
        return

    def tokens(self, seq: Any, ids: Sequence[int]) -> None:
        self.ids += ids

    def ended(self, seq: Any, end: EndRow) -> None:
        self.end = end
        self.over.set()

    def refused(self, request: Any, answer: Answer) -> None:
        self.refusal = answer
        self.over.set()


class Parts:
    """Schedulers, workers and a client on one broker, each in tasks of its own."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.store: Store = MemoryStore()
        self.cores: dict[str, Core] = {}
        self.workers: dict[str, WorkerService] = {}
        self.fetch = FetchRules()
        self._running: dict[str, tuple[asyncio.Event, asyncio.Task[None], MemoryBus]] = {}

    async def start_scheduler(self, owner: str) -> Core:
        bus = self.broker.connect()
        core = Core(
            owner,
            Rules(MODEL, fetch=self.fetch),
            ContinuousPolicy(),
            ExpectedOutput(),
            rng=random.Random(1),
            now=time.monotonic(),
        )
        shell = Shell(core, bus, self.store, MODEL, structlog.get_logger())
        stopping = asyncio.Event()
        self._running[owner] = stopping, asyncio.create_task(shell.run(stopping)), bus
        self.cores[owner] = core
        return core

    async def start_worker(self, name: str) -> None:
        settings = WorkerSettings(mock=True, instance=name, model=MODEL, mock_blocks=512, max_slots=16)
        bus = self.broker.connect()
        identity = Identity(name, MODEL, time.time_ns() // 1000, settings.slots, settings.max_step_tokens)
        worker = WorkerService(bus, make_runner(settings), identity, CollectorRegistry())
        self.workers[name] = worker
        stopping = asyncio.Event()
        self._running[name] = stopping, asyncio.create_task(worker.run(stopping)), bus
        await worker.ready.wait()

    async def stop(self, name: str) -> None:
        stopping, task, bus = self._running.pop(name)
        stopping.set()
        await task
        await bus.close()

    async def ended(self, name: str) -> None:
        """It ends by itself; raises what it raised."""
        _, task, bus = self._running.pop(name)
        async with asyncio.timeout(10):
            await asyncio.wait({task})
        await bus.close()
        task.result()

    async def kill(self, name: str) -> None:
        """No goodbye, no release of anything."""
        _, task, bus = self._running.pop(name)
        bus.disconnect()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await bus.close()

    async def close(self) -> None:
        for name in list(self._running):
            await self.stop(name)


@contextlib.asynccontextmanager
async def mesh(*workers: str) -> AsyncIterator[tuple[Parts, MeshClient]]:
    parts = Parts()
    for name in workers:
        await parts.start_worker(name)
    client = MeshClient(parts.broker.connect(), "c0", MODEL)
    await client.start()
    try:
        yield parts, client
    finally:
        await client.close()
        await parts.close()


def ask(client: MeshClient, name: str, tokens: int = 20, n: int = 1, **spec: Any) -> list[Stream]:
    streams = [Stream() for _ in range(n)]
    sampling = Sampling(max_tokens=tokens, seed=7)
    client.open(Open(request_id=name, prompt=list(range(40)), sampling=sampling, sinks=streams, **spec))
    return streams


async def ended(streams: list[Stream], within_s: float = 15.0) -> None:
    async with asyncio.timeout(within_s):
        for stream in streams:
            await stream.over.wait()


async def test_requests_are_answered_and_everything_is_free_again():
    async with mesh("w0") as (parts, client):
        core = await parts.start_scheduler("s0")
        streams = [stream for i in range(20) for stream in ask(client, f"r{i}", n=1 + i % 3)]
        await ended(streams)
        assert {stream.end.reason for stream in streams if stream.end} == {"length"}
        assert all(len(stream.ids) == 20 for stream in streams)
        report = stats(core)
        assert report["state"] == "leader"
        assert report["queue"] == 0
        (instance,) = report["instances"]
        assert instance["state"] == "ready"
        async with asyncio.timeout(5):
            while instance["blocks_free"] != 512 or instance["running"]:
                await asyncio.sleep(0.01)
                (instance,) = stats(core)["instances"]
        core.check()
        registry = CollectorRegistry()
        registry.register(CoreMetrics(core))
        assert b"hortator_scheduler_tokens_total" in generate_latest(registry)


async def test_a_standby_takes_over_and_the_stream_goes_on_without_a_break_or_repetition():
    async with mesh("w0") as (parts, client):
        await parts.start_scheduler("s1")
        (first,) = ask(client, "before")
        await ended([first])
        standby = await parts.start_scheduler("s2")
        (stream,) = ask(client, "across", tokens=3000)
        async with asyncio.timeout(10):
            while len(stream.ids) < 100:
                await asyncio.sleep(0.005)
        await parts.kill("s1")
        await ended([stream])
        assert standby.leads
        assert stream.end is not None
        assert stream.end.reason == "length"
        assert len(stream.ids) == 3000
        assert stream.ids[:20] == first.ids


async def test_a_draining_instance_finishes_what_it_has_and_takes_nothing_new():
    async with mesh("w0", "w1") as (parts, client):
        core = await parts.start_scheduler("s0")
        await ended(ask(client, "first"))
        bus = parts.broker.connect()
        drain = subjects.INSTANCE.at(instance="w0", verb="drain")
        await bus.request(drain, Drain(), reply=subjects.INSTANCE.reply_codec, timeout_s=2)
        async with asyncio.timeout(5):
            while {i["id"]: i["state"] for i in stats(core)["instances"]} != {
                "w0": "draining",
                "w1": "ready",
            }:
                await asyncio.sleep(0.01)
        before = core.fleet.instances["w0"].next_seq
        await ended([stream for i in range(8) for stream in ask(client, f"r{i}")])
        assert core.fleet.instances["w0"].next_seq == before


async def test_an_instance_that_says_goodbye_hands_its_sequences_to_another_at_once():
    async with mesh("w0", "w1") as (parts, client):
        core = await parts.start_scheduler("s0")
        await ended(ask(client, "warm"))
        streams = [stream for i in range(6) for stream in ask(client, f"r{i}", tokens=1500)]
        async with asyncio.timeout(10):
            while not all(stream.ids for stream in streams):
                await asyncio.sleep(0.005)
        busy = max(core.fleet.instances.values(), key=lambda i: len(i.running)).id
        await parts.stop(busy)
        await ended(streams)
        assert {stream.end.reason for stream in streams if stream.end} == {"length"}
        assert len({tuple(stream.ids) for stream in streams}) == 1


async def test_without_a_store_the_mesh_serves_all_the_same():
    async with mesh("w0") as (parts, client):
        parts.store = None  # type: ignore[assignment]
        await parts.start_scheduler("s0")
        (stream,) = ask(client, "r")
        await ended([stream])
        assert len(stream.ids) == 20


class Index(MemoryStore):
    """Says that a tier holds every chain, or does not answer in time."""

    def __init__(self, slow: bool = False) -> None:
        super().__init__()
        self.asked: list[int] = []
        self._slow = slow

    async def longest_prefix(self, model: str, hashes: Sequence[bytes]) -> dict[str, int]:
        self.asked.append(len(hashes))
        if self._slow:
            await asyncio.sleep(30)
        return {"tier-k0": len(hashes)}


@pytest.mark.parametrize("slow", [False, True], ids=["forged", "silent"])
async def test_what_the_index_says_wrongly_or_late_of_a_tier_costs_a_moment(slow: bool):
    async with mesh("w0") as (parts, client):
        index = parts.store = Index(slow)
        parts.fetch = FetchRules(lookup_s=1e-3, lookup_worth=0.0, share=1e9)
        core = await parts.start_scheduler("s0")
        (reference,) = ask(client, "reference", salt="a")
        await ended([reference])
        parts.workers["w0"].tier_changed("tier-k0", 1e-4, 1e-4)
        async with asyncio.timeout(5):
            while not core.fleet.choices[0].info.tier:
                await asyncio.sleep(0.005)
        (stream,) = ask(client, "r", salt="b")
        await ended([stream])
        assert index.asked == [2]
        assert stream.ids == reference.ids
        assert core.counters.fetches == core.counters.fetches_short == (0 if slow else 1)
        core.check()


async def test_a_core_that_fails_ends_the_process_and_a_restarted_one_goes_on():
    async with mesh("w0") as (parts, client):
        core = await parts.start_scheduler("s0")
        (reference,) = ask(client, "reference", tokens=800)
        await ended([reference])
        (stream,) = ask(client, "stream", tokens=800)
        async with asyncio.timeout(10):
            while len(stream.ids) < 50:
                await asyncio.sleep(0.005)
        core.fleet.active.append(None)  # type: ignore[arg-type]
        with pytest.raises(AttributeError):
            await parts.ended("s0")
        await parts.start_scheduler("s0-again")
        await ended([stream])
        assert stream.ids == reference.ids


async def test_books_that_contradict_each_other_are_found_when_idle():
    async with mesh("w0") as (parts, client):
        core = await parts.start_scheduler("s0")
        await ended(ask(client, "a"))
        core.fleet.instances["w0"].reserved += 1
        ask(client, "b")  # books are looked at once after each burst of work: maybe not yet after the first
        with pytest.raises(AssertionError, match="reservation"):
            await parts.ended("s0")
