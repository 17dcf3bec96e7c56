"""What small and large KV blocks cost: tables, waste, unshared prefixes, the engine, bookkeeping, moves.

One thread computes some of the model's layers with the same memory cut into blocks of 8 to 128 tokens, in
turns; the processor time of the fastest round of each counts, so that others on the machine matter little.
Waste is that of the requests of `tests/data` (Azure, 2023). Moves are measured by `tests.bench.tier_rates`
with the smallest and the largest block and lie on a line between. Everything is put together as the requests
that a full KV memory finishes in a second: the sequences it holds, over what one takes. Takes about twenty
seconds.
"""

import argparse
import csv
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from deploy.bench.plots import COLOURS, figure
from services.scheduler.blocks import BlockPool
from services.worker.engine.batch import RaggedBatch
from services.worker.engine.device import Device
from services.worker.engine.kvcache import KvCache, KvPlan
from services.worker.engine.native.decoder import Kernels, NativeDecoder, one_chunk
from services.worker.engine.shards import shard_of
from services.worker.engine.weights import ModelFolder
from services.worker.hashes import BlockHashes
from services.worker.memory.block_size import CANDIDATES, choose_for
from services.worker.parallel.split import plan_shards
from services.worker.prefixes import Prefixes
from services.worker.shape import BatchShape
from shared.model import resolve
from shared.wire import Admit, Sampling
from tests.bench.common import DATA, MODEL, Report, announce, options

MODULE = "tests.bench.block_size"
WITHIN = 0.03
ROWS, HISTORY = 16, 1024
"""Of a decode step."""
PROMPT = 256
"""Tokens of the prompt that is computed behind a history."""
LAYERS = 6
"""Of the model, which stand for all: a layer costs what every other does."""
MOVED = 0.25
"""Share of a sequence's blocks that go to the second tier and come back."""


@dataclass(frozen=True)
class Costs:
    """Of one block size."""

    tokens: int
    entries: int
    """Of the table of the longest sequence."""
    wasted: float
    """Of the KV of the traces' requests: what their last blocks hold nothing in."""
    unshared: float
    """The same of a prefix as long as a request: what stands behind its last whole block."""
    decode_s: float
    prefill_s: float
    books_s: float
    """Hashes, tables and free lists of a request."""
    moves_s: float

    @property
    def request_s(self) -> float:
        return self.decode_s + self.prefill_s + self.books_s + self.moves_s

    @property
    def per_memory(self) -> float:
        """Requests a second that a KV memory finishes, in any unit."""
        return 1 / (self.request_s * (1 + self.wasted + self.unshared))


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    command = announce(args, MODULE)
    folder = ModelFolder(resolve(args.model).path)
    lengths = request_lengths()
    mean = [sum(each) / len(lengths) for each in zip(*lengths, strict=True)]
    speeds = engine_speeds(folder, args)
    kv = 2 * folder.config.layers * folder.config.kv_size * 2
    fixed_s, byte_s = moving(kv)
    found = []
    for tokens in CANDIDATES:
        decode_s, prefill_s = speeds[tokens]
        blocks = sum(mean) / tokens
        held = sum(math.ceil(sum(each) / tokens) * tokens for each in lengths)
        found.append(
            Costs(
                tokens=tokens,
                entries=-(-folder.config.max_len // tokens),
                wasted=held / sum(map(sum, lengths)) - 1,
                unshared=(tokens - 1) / 2 / sum(mean),
                decode_s=mean[1] * decode_s / ROWS,
                prefill_s=mean[0] * prefill_s / PROMPT,
                books_s=blocks * bookkeeping(tokens),
                moves_s=MOVED * blocks * (fixed_s + byte_s * kv * tokens),
            )
        )
    choice = choose_for(folder.config, plan_shards(folder.config, 1), "float16")
    moves = {"fixed_us": fixed_s * 1e6, "mb_s": 1e-6 / byte_s}
    return report(found, choice.chosen.block_tokens, choice.describe(), moves, args, command).publish(
        args.out, draw(found, choice.chosen.block_tokens)
    )


def request_lengths() -> list[tuple[int, int]]:
    """(prompt, output) tokens."""
    found = []
    for name in ("azure_conv_2023.csv", "azure_code_2023.csv"):
        with (DATA / name).open() as lines:
            found += [
                (int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(lines)
            ]
    return found


def engine_speeds(folder: ModelFolder, args: argparse.Namespace) -> dict[int, tuple[float, float]]:
    """(a decode step, a prompt) in seconds by block size."""
    most = ROWS * (HISTORY + max(CANDIDATES))
    c = folder.config
    kv = KvCache(c, KvPlan(min(CANDIDATES), 0, most // min(CANDIDATES)), "float16", torch.device("cpu"))
    kv.populate()
    decoder = NativeDecoder(Kernels(1), shard_of(folder), Device("cpu", "float16").form, kv)
    rng = np.random.default_rng(args.seed)
    work: dict[int, tuple[RaggedBatch, RaggedBatch]] = {}
    for tokens in CANDIDATES:
        blocks = rng.permutation(most // tokens).astype(np.int32)
        tables = blocks[: ROWS * (HISTORY // tokens)].reshape(ROWS, -1)
        work[tokens] = (
            batch_of([HISTORY - 1] * ROWS, 1, tables, tokens),
            batch_of([HISTORY - PROMPT], PROMPT, tables[:1], tokens),
        )
    best = {tokens: [math.inf, math.inf] for tokens in CANDIDATES}
    with torch.inference_mode():
        for _ in range(args.rounds):
            for tokens in rng.permutation(CANDIDATES).tolist():
                # The same memory, cut otherwise: the kernels take the size from here.
                decoder._model.block_tokens = tokens
                for kind, batch in enumerate(work[tokens]):
                    some = partial(
                        decoder.forward_layers, batch, 0, LAYERS, one_chunk(batch.size), embed=True
                    )
                    best[tokens][kind] = min(best[tokens][kind], seconds(some) * c.layers / LAYERS)
    return {tokens: (decode, prefill) for tokens, (decode, prefill) in best.items()}


def batch_of(starts: list[int], count: int, tables: Any, tokens: int) -> RaggedBatch:
    """`count` tokens of each sequence behind `starts` others."""
    rows = len(starts)
    positions = np.concatenate([np.arange(start, start + count, dtype=np.int32) for start in starts])
    row = np.repeat(np.arange(rows), count)
    return RaggedBatch(
        tokens=np.arange(len(positions), dtype=np.int32),
        positions=positions,
        row_start=np.arange(0, rows * count + 1, count, dtype=np.int32),
        kv_len=np.array(starts, np.int32) + count,
        block_table=np.ascontiguousarray(tables),
        write_block=tables[row, positions // tokens].astype(np.int32),
        write_offset=positions % tokens,
        logit_tokens=np.arange(count - 1, rows * count, count, dtype=np.int32),
    )


def bookkeeping(tokens: int, length: int = 4096) -> float:
    """Seconds per block: handed out, hashed, confirmed on both sides and given back."""
    blocks = length // tokens
    shape = BatchShape(1, length, tokens, blocks, 1 << 16)
    ids = np.arange(length, dtype=np.int32)
    table = np.arange(blocks, dtype=np.int32)[None]
    admit = Admit(
        slot=0, choice=0, ids=[], prompt_len=1, computed=0, blocks=[], sampling=Sampling(max_tokens=1)
    )
    ends = np.array([length], np.int32)

    def once() -> None:
        hashes, pool = BlockHashes(blocks), BlockPool(blocks)
        prefixes = Prefixes(shape, "bench", hashes)
        taken = pool.take(blocks) or []
        prefixes.begin(0, 0, prefixes.check(admit, ids, 0))
        for stored in prefixes.confirm(np.array([0]), ends, ids[None], table):
            pool.confirm(stored.block, stored.hash)
        hashes.take_changes()
        pool.release(taken)

    return min(seconds(once) for _ in range(5)) / blocks


def moving(token_bytes: int) -> tuple[float, float]:
    """(seconds for each block, for each byte) of a block stored in the tier and fetched again."""
    small, large = (each * token_bytes for each in (min(CANDIDATES), max(CANDIDATES)))
    took = [tier_rates(size) for size in (small, large)]
    byte_s = (took[1] - took[0]) / (large - small)
    return max(0.0, took[0] - byte_s * small), byte_s


def tier_rates(block_bytes: int) -> float:
    """Processor seconds of both sides for a block stored and fetched."""
    blocks = max(16, (64 << 20) // block_bytes)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.bench.tier_rates",
            "--bytes",
            str(block_bytes),
            "--blocks",
            str(blocks),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    sides = ("client_cpu_ms_a_block", "server_cpu_ms_a_block")
    return 1e-3 * sum(each[side] for each in told if each["operation"] in ("put", "get") for side in sides)


def seconds(work: Callable[[], object]) -> float:
    """Of the processor."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def report(
    found: list[Costs],
    chosen: int,
    described: str,
    moves: dict[str, float],
    args: argparse.Namespace,
    command: str,
) -> Report:
    best = max(each.per_memory for each in found)
    own = next(each for each in found if each.tokens == chosen)
    off = 1 - own.per_memory / best
    return Report(
        name="block_size",
        title=f"KV blocks of {args.model}, float16: {described}",
        command=command,
        seed=args.seed,
        columns=(
            "block tokens",
            "longest table",
            "KV wasted",
            "prefix unshared",
            f"decode of {ROWS} at {HISTORY}, of the automatic",
            f"{PROMPT} prompt tokens at {HISTORY}, of the automatic",
            "books of a request, ms",
            "moves of a request, ms",
            "requests/s per memory, of the best",
        ),
        rows=[
            (
                f"{each.tokens}{' (automatic)' * (each.tokens == chosen)}",
                each.entries,
                f"{each.wasted:.2%}",
                f"{each.unshared:.2%}",
                f"{each.decode_s / own.decode_s:.3f}",
                f"{each.prefill_s / own.prefill_s:.3f}",
                each.books_s * 1e3,
                each.moves_s * 1e3,
                f"{each.per_memory / best:.1%}",
            )
            for each in found
        ],
        details={"moves": moves, "costs": [vars(each) for each in found]},
        verdicts={
            f"{chosen} tokens, chosen automatically, are {off:.1%} below the best, at most {WITHIN:.0%}": off
            <= WITHIN
        },
    )


def draw(found: list[Costs], chosen: int) -> Any:
    plot, axes = figure()
    names = [str(each.tokens) for each in found]
    best = max(each.per_memory for each in found)
    axes.plot(names, [each.per_memory / best for each in found], "o-", color=COLOURS[0], label="in all")
    for number, (label, value) in enumerate(
        (
            ("memory", [1 / (1 + each.wasted + each.unshared) for each in found]),
            ("time", [min(e.request_s for e in found) / each.request_s for each in found]),
        ),
        1,
    ):
        axes.plot(names, value, "--", color=COLOURS[number], label=label)
    axes.axvline(str(chosen), color=COLOURS[3], alpha=0.4, label="automatic")
    axes.set_xlabel("tokens of a block")
    axes.set_ylabel("share of the best")
    axes.legend(frameon=False)
    return plot


if __name__ == "__main__":
    raise SystemExit(main())
