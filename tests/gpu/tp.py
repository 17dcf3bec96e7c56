"""A tensor-parallel group over this machine's GPUs: is it right, and what do its sums and chunks take?

    python -m tests.gpu.tp [MODEL_FOLDER | tiny | 135m | 1b | 8b] [--tp 2] [--dtype bfloat16]

Each rank is a process with a device of its own. Prints one table; exit status 1 if anything is wrong.
`--device cpu` runs the same code over gloo on CPUs: that checks this script, and times nothing worth knowing.
"""

import argparse
import hashlib
import multiprocessing
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from services.worker.collective.port import Collective
from services.worker.collective.tensors import ChosenReducer, HostReducer, Laps, Way
from services.worker.collective.torch_dist import TorchDistCollective, open_store
from services.worker.engine.batch import RaggedBatch
from services.worker.engine.cuda.decoder import CudaDecoder
from services.worker.engine.cuda.group import DeviceGroup
from services.worker.engine.cuda.planning import plan_by_measuring
from services.worker.engine.decoder import TorchDecoder
from services.worker.engine.device import Device
from services.worker.engine.kvcache import KvCache, KvPlan
from services.worker.engine.shards import ShardedFolder, shard_of
from services.worker.engine.weights import ModelFolder
from tests.gpu.random_model import SIZES, write_random
from tests.support.device_executor import kv_with_scratch

BLOCK_TOKENS = 16
SUMS = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
"""Bytes of the messages timed."""
LIMITS = {"float32": 5e-4, "bfloat16": 0.08, "float16": 0.02}


class Rank:
    """One process's part of the check; every rank makes the same calls."""

    def __init__(self, rank: int, args: argparse.Namespace, model: Path, meeting: str) -> None:
        self.args, self.rank = args, rank
        self.right = True
        store = open_store(f"file://{meeting}", rank, args.tp)
        self.end: Collective = TorchDistCollective(store, rank, args.tp, 120.0, "127.0.0.1")
        self.device = torch.device("cpu" if args.device == "cpu" else f"cuda:{rank}")
        self.folder = ModelFolder(model, 4096)
        args.tokens = min(args.tokens, self.folder.config.max_len - 1)
        self.group: DeviceGroup | None = None
        if args.device == "cpu":
            way = Way(HostReducer(self.end).all_reduce)
            self.reducer = ChosenReducer(rank, args.tp, {"host": way}, self.device, False)
        else:
            self.group = DeviceGroup(self.end, self.device, 4 * self.folder.config.hidden * args.tokens)
            self.reducer = self.group.reducer

    def say(self, what: str, found: str, right: bool = True) -> None:
        """A line of the table; wrong if it is on any rank."""
        everywhere = bool(self.end.gather(np.array([right], np.uint8)).all())
        self.right = self.right and everywhere
        if self.rank == 0:
            print(f"{what:44} {found:44} {'' if everywhere else 'WRONG'}", flush=True)

    def same_everywhere(self, value: torch.Tensor) -> bool:
        digest = hashlib.sha256(value.float().cpu().numpy().tobytes()).digest()
        rows = self.end.gather(np.frombuffer(digest, np.uint8))
        return bool((rows == rows[0]).all())

    def sums(self) -> None:
        """Every algorithm: right, the same bits everywhere, also replayed from a graph; its times."""
        for name in self.reducer.algorithms():
            self.reducer.set_table([(1 << 62, name)])
            for bytes_ in SUMS:
                generators = [torch.Generator().manual_seed(rank) for rank in range(self.args.tp)]
                parts = [torch.randn(bytes_ // 4, generator=g) for g in generators]
                expected = torch.stack(parts).double().sum(0).float()
                part = parts[self.rank].to(self.device)
                total = self.reducer.all_reduce(part.clone()).cpu()
                close = torch.allclose(total, expected, rtol=1e-4, atol=1e-4)
                right = close and self.same_everywhere(total)
                if self.reducer.queues:
                    right = right and torch.equal(self._replayed(part), total)
                least, _ = self.reducer.time(name, bytes_ // 4, 20)
                self.say(f"sum of {bytes_} bytes, {name}", f"{least * 1e6:.1f} µs", right)

    def _replayed(self, part: torch.Tensor) -> torch.Tensor:
        held = part.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.reducer.all_reduce(held)
        held.copy_(part)
        graph.replay()
        return held.cpu()

    @torch.inference_mode()
    def logits(self) -> None:
        """The whole model's, on rank 0's CPU: a prompt, in one chunk and in several, and single tokens."""
        dtype = getattr(torch, self.args.dtype)
        shard = shard_of(self.folder, self.rank, self.args.tp, filled=True)
        blocks = max(200, self.args.tokens) // BLOCK_TOKENS + 4
        kv = kv_with_scratch(shard.config, self.args.dtype, self.device, blocks, BLOCK_TOKENS)
        decoder = CudaDecoder(shard, kv, dtype, reducer=self.reducer)
        if self.group is not None:
            decoder.joins(self.group)
        ids = np.random.default_rng(1).integers(0, shard.whole.vocab_size, 200).astype(np.int32)
        batches = [span(ids, 0, 190), *(span(ids, at, at + 1) for at in range(190, 200))]
        expected = self._whole(batches) if self.rank == 0 and self.args.check else None
        for chunks in (1, 4):
            decoder.plan = lambda tokens, n=chunks: np.linspace(0, tokens, min(tokens, n) + 1).astype(
                np.int32
            )
            worst = 0.0
            for step, batch in enumerate(batches):
                whole = self._joined(decoder.forward(batch), shard)
                if expected is not None:
                    worst = max(
                        worst, float((whole - expected[step]).abs().max() / expected[step].abs().max())
                    )
            self.say(
                f"logits, {chunks} chunk(s), against the CPU", f"{worst:.2e}", worst < LIMITS[self.args.dtype]
            )
        self._times(decoder, kv)

    def _whole(self, batches: list[RaggedBatch]) -> list[torch.Tensor]:
        whole = shard_of(self.folder, filled=True)
        kv = KvCache(whole.config, KvPlan(BLOCK_TOKENS, 0, 16), "float32", torch.device("cpu"))
        reference = TorchDecoder(whole, Device("cpu", "float32"), kv)
        return [reference.forward(batch).clone() for batch in batches]

    def _joined(self, logits: torch.Tensor, shard: ShardedFolder) -> torch.Tensor:
        """Of all ranks side by side; told as a sum with zeros for the others'."""
        every = torch.zeros(len(logits), shard.whole.vocab_size)
        every[:, shard.shard.vocab.start : shard.shard.vocab.stop] = logits.cpu()
        self.end.all_reduce(every.numpy())
        return every

    def _times(self, decoder: CudaDecoder, kv: KvCache) -> None:
        ids = np.zeros(self.args.tokens + 1, np.int32)
        prompt, token = span(ids, 0, self.args.tokens), span(ids, self.args.tokens, self.args.tokens + 1)
        for chunks in (1, 2, 4, 8):
            decoder.plan = lambda tokens, n=chunks: np.linspace(0, tokens, min(tokens, n) + 1).astype(
                np.int32
            )
            taken = self._least(decoder, prompt)
            self.say(f"prefill, {self.args.tokens} tokens, {chunks} chunk(s)", f"{taken * 1e3:.2f} ms")
        plan_by_measuring(decoder, kv, self.end, None if self.group is None else self.group.table)
        chosen = len(decoder.plan(self.args.tokens)) - 1
        taken = self._least(decoder, prompt)
        self.say(f"prefill, as planned: {chosen} chunk(s)", f"{taken * 1e3:.2f} ms")
        self.say("decode, one token", f"{self._least(decoder, token) * 1e3:.3f} ms")
        if self.group is not None:
            self.say("sums", self.group.detail()["sums"])

    def _least(self, decoder: CudaDecoder, batch: RaggedBatch) -> float:
        laps = Laps(self.device)
        for _ in range(6):
            decoder.forward(batch)
            laps.mark()
        return min(laps.seconds())


def span(ids: np.ndarray, start: int, stop: int) -> RaggedBatch:
    """Tokens [start, stop) of one sequence whose blocks are the first."""
    positions = np.arange(start, stop, dtype=np.int32)
    return RaggedBatch(
        tokens=ids[start:stop],
        positions=positions,
        row_start=np.array([0, stop - start], np.int32),
        kv_len=np.array([stop], np.int32),
        block_table=np.arange(-(-stop // BLOCK_TOKENS), dtype=np.int32)[None],
        write_block=positions // BLOCK_TOKENS,
        write_offset=positions % BLOCK_TOKENS,
        logit_tokens=np.array([stop - start - 1], np.int32),
    )


def run_rank(rank: int, args: argparse.Namespace, model: Path, meeting: str) -> None:
    torch.set_num_threads(2)
    check = Rank(rank, args, model, meeting)
    check.sums()
    check.logits()
    sys.exit(0 if check.right else 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default="tiny", help="a model folder, or one of " + ", ".join(SIZES)
    )
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=sorted(LIMITS))
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt that is timed")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="do not compute on the CPU too"
    )
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < args.tp:
        print(
            f"{torch.cuda.device_count()} CUDA device(s) here, --tp {args.tp} needs as many: nothing was run"
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        model = Path(args.model)
        if args.model in SIZES:
            model = write_random(Path(folder) / "model", args.model)
        spawn = multiprocessing.get_context("spawn")
        ranks = [
            spawn.Process(target=run_rank, args=(rank, args, model, f"{folder}/store"))
            for rank in range(args.tp)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(400)
        for rank in ranks:
            rank.kill()
        return int(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    sys.exit(main())
