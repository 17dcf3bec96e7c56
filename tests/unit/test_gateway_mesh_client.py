"""The client's shell: frames in, sinks called, messages out, whatever breaks."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest

from shared.bus.memory import MemoryBroker
from shared.client import MeshClient, Open, OpenRequest, OpenSeq
from shared.wire import Answer, EndRow, Sampling
from tests.support.fake_backend import FakeBackend, Script


@dataclass
class Listener:
    """A sink that remembers; `broken` ones raise at every token."""

    broken: bool = False
    ids: list[int] = field(default_factory=list)
    taken: bool = False
    end: EndRow | None = None
    refusal: Answer | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def accepted(self, request: OpenRequest) -> None:
        self.taken = True

    def tokens(self, seq: OpenSeq, ids: Sequence[int]) -> None:
        if self.broken:
            raise RuntimeError("this sink is broken")
        self.ids += ids

    def ended(self, seq: OpenSeq, end: EndRow) -> None:
        self.end = end
        self.over.set()

    def refused(self, request: OpenRequest, answer: Answer) -> None:
        self.refusal = answer
        self.over.set()


@dataclass
class Mesh:
    client: MeshClient
    backend: FakeBackend
    broker: MemoryBroker

    def open(self, name: str, listener: Listener, prompt: Sequence[int] = (1, 2), tokens: int = 6) -> None:
        sampling = Sampling(max_tokens=tokens)
        self.client.open(Open(request_id=name, prompt=list(prompt), sampling=sampling, sinks=(listener,)))


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    broker = MemoryBroker(max_payload=4096)
    client = MeshClient(broker.connect(), "c1", "m")
    async with FakeBackend(broker.connect(), "m", lambda _: Script(ids=range(10, 20))) as backend:
        await client.start()
        yield Mesh(client, backend, broker)
        await client.close()


async def over(*listeners: Listener) -> None:
    async with asyncio.timeout(10):
        for listener in listeners:
            await listener.over.wait()


async def test_a_sequence_is_told_from_acceptance_to_end(mesh: Mesh) -> None:
    listener = Listener()
    mesh.open("r", listener)
    await over(listener)
    assert listener.taken
    assert listener.ids == [10, 11, 12, 13, 14, 15]
    assert listener.end is not None
    assert listener.end.reason == "length"
    assert not mesh.client.core.requests


async def test_a_broken_sink_is_cancelled_and_its_neighbours_notice_nothing(mesh: Mesh) -> None:
    mesh.backend.step_s = 0.002
    good, bad = [Listener(), Listener()], Listener(broken=True)
    mesh.open("a", good[0], tokens=30)
    mesh.open("b", bad, tokens=30)
    mesh.open("c", good[1], tokens=30)
    await over(*good, bad)
    assert [len(listener.ids) for listener in good] == [30, 30]
    assert bad.end is not None
    assert bad.end.reason == "cancelled"


async def test_a_request_above_the_brokers_limit_is_refused_at_once(mesh: Mesh) -> None:
    listener = Listener()
    mesh.open("r", listener, prompt=[60_000] * 5000)
    await over(listener)
    assert listener.refusal is not None
    assert listener.refusal.code == "too_long"


async def test_a_submit_made_while_the_broker_is_away_arrives_when_it_is_back(mesh: Mesh) -> None:
    mesh.broker.stop()
    listener = Listener()
    mesh.open("r", listener)
    await asyncio.sleep(0.02)
    mesh.broker.start()
    await over(listener)
    assert listener.ids == [10, 11, 12, 13, 14, 15]


async def test_every_frame_is_acknowledged_in_the_end(mesh: Mesh) -> None:
    listener = Listener()
    mesh.open("r", listener)
    await over(listener)
    async with asyncio.timeout(5):
        while not mesh.backend.acks or mesh.backend.acks[-1].seq != mesh.backend._next["c1"]:
            await asyncio.sleep(0.01)
    assert not mesh.client.core.is_busy
