"""One rank of a group that a benchmark has to itself: its transport, its part of a model, and passes to time.

Every rank runs the same calls in the same order; what is decided by a clock is decided on rank 0.
"""

import ctypes
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from services.worker.collective import abi
from services.worker.collective.native import NativeCollective
from services.worker.collective.port import Collective
from services.worker.engine.batch import RaggedBatch, one_sequence
from services.worker.engine.crossing import from_rank_0
from services.worker.engine.formats import weight_format
from services.worker.engine.kvcache import KvCache, KvPlan
from services.worker.engine.native.decoder import Kernels, NativeDecoder
from services.worker.engine.remembered import Remembered
from services.worker.engine.shards import shard_of
from services.worker.engine.tuning import Tuning
from services.worker.engine.weights import ModelFolder
from services.worker.step import I32
from tests.support.tp_sockets import connect_all

BLOCK = 16


def cut(tokens: int, chunks: int) -> I32:
    """`tokens` in `chunks` of nearly equal size."""
    return np.linspace(0, tokens, min(tokens, chunks) + 1).astype(np.int32)


class Silent:
    """An exchange that brings a rank its own part at once: passes over it take what computing takes."""

    def __init__(self, rank: int, size: int, most_floats: int) -> None:
        self._memory = np.zeros(most_floats, np.float32)
        self._calls = (
            abi.ROOM(lambda *_: self._memory.ctypes.data),
            abi.BEGIN(lambda _: None),
            abi.LAND(self._land),
            abi.RELEASE(lambda _: None),
        )
        self.exchange = abi.Exchange(None, rank, size, most_floats, *self._calls)

    def _land(self, _: Any, landed: Any) -> None:
        # As many parts as the real one has: adding them belongs to computing.
        landed.contents.parts = self.exchange.size
        for i in range(self.exchange.size):
            landed.contents.part[i] = self._memory.ctypes.data


@dataclass(frozen=True)
class Timing:
    """One pass on this rank, in seconds."""

    wall: float
    exposed: float


class Rig:
    """A rank's decoder over `collective`. `threads` compute."""

    def __init__(
        self, model: Path, collective: Collective, dtype: str, tokens: int, threads: int = 1
    ) -> None:
        torch.set_num_threads(1)
        self.collective = collective
        shard = shard_of(ModelFolder(model), collective.rank, collective.size)
        self.hidden, self.layers = shard.whole.hidden, shard.whole.layers
        blocks = -(-tokens // BLOCK)
        kv = KvCache(shard.config, KvPlan(BLOCK, 0, blocks), "float32", torch.device("cpu"))
        self.decoder = NativeDecoder(Kernels(threads), shard, weight_format(dtype), kv, collective)
        self._silent = Silent(collective.rank, collective.size, tokens * self.hidden)
        real = self.decoder._exchange
        self._exchange = None if real is None else ctypes.pointer(real)
        self._batch = prompt(tokens, shard.whole.vocab_size)
        self.tokens = tokens
        self._kv, self.config = kv, shard.whole

    def barrier(self) -> None:
        self.collective.gather(np.zeros(1, np.uint8))

    def silence(self, silent: bool) -> None:
        """Whether passes wait for nobody from now on."""
        self.decoder._model.exchange = ctypes.pointer(self._silent.exchange) if silent else self._exchange

    def tune(self, tokens: int) -> Tuning:
        """What a worker's executor does when its group is formed. Nothing of it is remembered."""
        Remembered.recall, Remembered.keep = lambda _: None, lambda *_: None  # type: ignore[method-assign]
        facts: dict[str, object] = {"benchmark": True}
        return Tuning(self.collective, self.decoder, self._kv, self.config, tokens, facts)

    def learn(self, tuning: Tuning) -> None:
        """Between two steps: what rank 0 learnt is told to all."""
        tuning.observe(self.tokens)
        news = from_rank_0(self.collective, msgspec.msgpack.encode(tuning.news()))
        if (state := msgspec.msgpack.decode(news)) is not None:
            tuning.tune(state)

    def whole(self, chunks: I32, repeats: int) -> list[Timing]:
        """A prompt of all tokens, from ids to logits, `repeats` times."""
        self.decoder.plan = lambda _: chunks
        return [self._time(lambda: self.decoder.forward(self._batch)) for _ in range(repeats)]

    def some_layers(self, first: int, stop: int, chunks: I32, repeats: int) -> list[Timing]:
        return [
            self._time(lambda: self.decoder.forward_layers(self._batch, first, stop, chunks))
            for _ in range(repeats)
        ]

    def messages(self, count: int, floats: int, repeats: int) -> list[float]:
        """Seconds of `count` sums of `floats`, one after the other, with nothing computed meanwhile."""
        values = np.zeros(floats, np.float32)
        taken = []
        for _ in range(repeats):
            self.barrier()
            begun = time.perf_counter()
            for _ in range(count):
                self.collective.all_reduce(values)
            taken.append(time.perf_counter() - begun)
        return taken

    def _time(self, work: Any) -> Timing:
        before = self._exposed()
        self.barrier()
        begun = time.perf_counter()
        work()
        wall = time.perf_counter() - begun
        return Timing(wall, self._exposed() - before)

    def _exposed(self) -> float:
        return self.decoder.spent().get("exposed communication", 0.0)


def prompt(tokens: int, vocab: int) -> RaggedBatch:
    ids = np.random.default_rng(0).integers(0, vocab, tokens).astype(np.int32)
    return one_sequence(0, tokens, BLOCK, ids)


def over_sockets(rank: int, addresses: list[str], port: int, most_floats: int) -> NativeCollective:
    """The transport between ranks that share nothing but a network."""
    peers = connect_all(rank, addresses, port)
    return NativeCollective(rank, len(addresses), None, peers, most_floats)
