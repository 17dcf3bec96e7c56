"""One table of the CUDA path: correctness against the CPU, decode and prefill against what the device can do.

    python -m tests.gpu.measure [MODEL_FOLDER | tiny | 135m | 1b | 8b] [--dtype bfloat16] [--context 512]

A size makes a model with random weights in a temporary folder. Nothing is downloaded. `--device cpu` runs the
same code on a CPU, which checks this script and measures nothing worth knowing.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from services.worker.engine.batch import RaggedBatch
from services.worker.engine.config import ModelConfig
from services.worker.engine.cuda.decoder import CudaDecoder
from services.worker.engine.decoder import Decoder, TorchDecoder
from services.worker.engine.device import Device
from services.worker.engine.kvcache import DTYPES, plan_kv
from services.worker.engine.weights import ModelFolder, expected_shapes
from services.worker.step import Pending, SlotArrays, StepInput
from shared.wire import Sampling
from tests.gpu.random_model import SIZES, write_random
from tests.support.device_executor import device_executor, kv_with_scratch

BLOCK_TOKENS = 16
BATCHES = (1, 32, 256)
CHUNK = 2048
MAX_LEN = 8192
"""Tokens a sequence may have, if the model's do not end before."""
CPU_LIMIT = 3e9
"""Parameters up to which the CPU computes the model too."""
GOLDEN = Path(__file__).parents[1] / "data" / "golden.json"


@dataclass(frozen=True)
class Line:
    what: str
    measured: str
    bound: str = ""
    share: str = ""


@dataclass(frozen=True)
class Shape:
    """The largest batch that decodes."""

    rows: int
    context: int

    @property
    def blocks(self) -> int:
        """Of a row."""
        return -(-self.context // BLOCK_TOKENS)


class Bench:
    """An executor as the worker has it, and steps for it."""

    def __init__(self, model: Path, config: ModelConfig, device: str, dtype: str, shape: Shape) -> None:
        self.config, self.shape = config, shape
        self.on = torch.device(device)
        self.chunk = min(CHUNK, config.max_len)
        self.blocks = max(shape.rows * shape.blocks, -(-self.chunk // BLOCK_TOKENS))
        self.executor = device_executor(model, dtype, device, self.blocks, BLOCK_TOKENS, MAX_LEN)
        self.rng = np.random.default_rng(1)

    @property
    def decoder(self) -> CudaDecoder:
        assert isinstance(self.executor._decoder, CudaDecoder)
        return self.executor._decoder

    def decode_s(self, rows: int, ahead: bool, seconds: float) -> float:
        """Seconds of a greedy step of sequences of `context` tokens, in blocks that lie scattered.

        `ahead`: each is begun before the one before is waited for, whose tokens it finds on the device.
        """
        table = self.rng.permutation(self.blocks)[: rows * self.shape.blocks].reshape(rows, -1)
        return self.steps_s(table, self.shape.context - 1, 1, ahead, seconds)

    def prefill_s(self, seconds: float) -> float:
        """Seconds of a prompt of `chunk` tokens, begun before the one before is waited for."""
        return self.steps_s(np.arange(self.blocks)[None], 0, self.chunk, True, seconds)

    def steps_s(self, table: np.ndarray, start: int, count: int, ahead: bool, seconds: float) -> float:
        rows, full = len(table), lambda value: np.full(len(table), value, np.int32)
        slots = SlotArrays(
            tokens=np.zeros((rows, start + count + 1), np.int32),
            block_table=table.astype(np.int32),
            computed=full(start + count),
            # A step that only goes on has its last id from the device.
            known=full(start + count - (ahead and count == 1)),
            prompt_len=full(1),
            choice=full(0),
            sampling=[Sampling(max_tokens=9, temperature=0.0)] * rows,
            version=np.ones(rows, np.int64),
        )
        step = StepInput(np.arange(rows, dtype=np.int32), full(start), full(count), np.ones(rows, np.bool_))
        before: Pending | None = None

        def one() -> None:
            nonlocal before
            pending = self.executor.begin(step, slots)
            if not ahead:
                pending.wait()
                return
            if before is not None:
                before.wait()
            before = pending

        return timed(one, self.on, seconds)


def chunk_batch(tokens: np.ndarray) -> RaggedBatch:
    """A prompt from its beginning, in blocks 0 onwards; logits of its last token."""
    count = len(tokens)
    positions = np.arange(count, dtype=np.int32)
    return RaggedBatch(
        tokens=tokens.astype(np.int32),
        positions=positions,
        row_start=np.array([0, count], np.int32),
        kv_len=np.array([count], np.int32),
        block_table=np.arange(-(-count // BLOCK_TOKENS), dtype=np.int32)[None],
        write_block=positions // BLOCK_TOKENS,
        write_offset=positions % BLOCK_TOKENS,
        logit_tokens=np.array([count - 1], np.int32),
    )


def timed(step: Callable[[], object], on: torch.device, seconds: float) -> float:
    """Seconds of one call: the median of five stretches that fill `seconds`, after a warm-up."""

    def stretch(count: int) -> float:
        wait_for(on)
        begun = time.perf_counter()
        for _ in range(count):
            step()
        wait_for(on)
        return (time.perf_counter() - begun) / count

    stretch(2)
    count = max(1, int(seconds / 5 / stretch(2)))
    return float(np.median([stretch(count) for _ in range(5)]))


def wait_for(on: torch.device) -> None:
    if on.type == "cuda":
        torch.cuda.synchronize(on)


def copy_rate(on: torch.device) -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.zeros(1 << (30 if on.type == "cuda" else 25), dtype=torch.uint8, device=on)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source), on, 0.5)


def matmul_rate(on: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large square product."""
    n = 8192 if on.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=on).to(dtype) for _ in range(2))
    out = torch.empty(n, n, device=on, dtype=dtype)
    return 2 * n**3 / timed(lambda: torch.mm(a, b, out=out), on, 1.0)


def matrix_elements(config: ModelConfig) -> tuple[int, int]:
    """(elements of the layers' matrices, of the head)."""
    shapes = expected_shapes(config)
    layers = sum(math.prod(s) for name, s in shapes.items() if ".layers." in name and len(s) == 2)
    return layers, config.vocab_size * config.hidden


def decode_bytes(config: ModelConfig, element: int, rows: int, context: int) -> int:
    """Weights and KV that a decode step cannot avoid to read."""
    kv = rows * context * 2 * config.layers * config.kv_size
    return (sum(matrix_elements(config)) + kv) * element


def prefill_ops(config: ModelConfig, tokens: int) -> int:
    """Operations of a prompt's pass: matrices, causal attention, one row of logits."""
    layers, head = matrix_elements(config)
    attention = 2 * config.layers * config.q_size * tokens * (tokens + 1)
    return 2 * layers * tokens + attention + 2 * head


def prompts(config: ModelConfig) -> list[tuple[list[int], list[int]]]:
    """(ids, golden continuation): the goldens', or random ones without a continuation."""
    cases = json.loads(GOLDEN.read_text())
    if config.vocab_size > max(max(case["ids"]) for case in cases):
        return [(case["ids"], case["golden"]) for case in cases]
    rng = np.random.default_rng(0)
    return [(rng.integers(0, config.vocab_size, n).tolist(), []) for n in (3, 17, 40)]


@torch.inference_mode()
def greedy_run(decoder: Decoder, ids: list[int], forced: list[int]) -> tuple[list[int], list[torch.Tensor]]:
    """The best token at each step and the logits, following `forced`."""
    best, logits = [], []
    for count in range(len(forced)):
        known = np.array([*ids, *forced[:count]], np.int32)
        logits.append(
            decoder.forward(chunk_batch(known) if not count else next_batch(known)).cpu()[0].clone()
        )
        best.append(int(logits[-1].argmax()))
    return best, logits


def next_batch(known: np.ndarray) -> RaggedBatch:
    """The step that computes the last of `known` behind the others."""
    whole, last = chunk_batch(known), len(known) - 1
    one = np.array([0], np.int32)
    return replace(
        whole,
        tokens=known[last:],
        positions=whole.positions[last:],
        row_start=np.array([0, 1], np.int32),
        write_block=whole.write_block[last:],
        write_offset=whole.write_offset[last:],
        logit_tokens=one,
    )


def correctness(folder: ModelFolder, device: str, dtype: str) -> list[Line]:
    """Tokens and logits of each format on the device against the CPU in float32, which all of them follow."""
    config = folder.config
    if sum(matrix_elements(config)) > CPU_LIMIT:
        return [Line("against CPU float32", f"skipped: over {CPU_LIMIT:.0e} parameters; take 135m or 1b")]
    cases = [(ids, golden or [0] * 12) for ids, golden in prompts(config)]
    blocks = -(-max(len(i) + len(g) for i, g in cases) // BLOCK_TOKENS)
    cpu = TorchDecoder(
        folder,
        Device("cpu", "float32"),
        kv_with_scratch(config, "float32", torch.device("cpu"), blocks, BLOCK_TOKENS),
    )
    expected = [greedy_run(cpu, ids, forced) for ids, forced in cases]
    golden = all(best == forced for (best, _), (_, forced) in zip(expected, cases))
    reference = "golden tokens" if golden else "CPU float32 tokens"
    lines = []
    for name in dict.fromkeys(("float32", dtype)):
        kv = kv_with_scratch(config, name, torch.device(device), blocks, BLOCK_TOKENS)
        decoder = CudaDecoder(folder, kv, DTYPES[name])
        got = [greedy_run(decoder, ids, forced) for ids, forced in cases]
        same = sum(a == b for (g, _), (e, _) in zip(got, expected) for a, b in zip(g, e))
        total = sum(len(e) for e, _ in expected)
        worst = max(
            float((g - e).abs().max() / e.abs().max())
            for (_, gs), (_, es) in zip(got, expected)
            for g, e in zip(gs, es)
        )
        # Random weights leave the best tokens so close together that 16 bit often picks another.
        wanted = 100.0 if name == "float32" else 95.0 if golden else 0.0
        verdict = "ok" if 100 * same / total >= wanted else "WRONG"
        lines.append(Line(f"{name}: {reference}", f"{same} of {total}", f">= {wanted:.0f} %", verdict))
        lines.append(Line(f"{name}: logits, largest difference", f"{worst:.1e} of the largest"))
    return lines


def performance(bench: Bench, dtype: str, seconds: float) -> list[Line]:
    on, config, element = bench.on, bench.config, DTYPES[dtype].itemsize
    bandwidth, rate = copy_rate(on), matmul_rate(on, DTYPES[dtype])
    lines = [
        Line("memory: copy", f"{bandwidth / 1e9:,.0f} GB/s"),
        Line(f"arithmetic: {dtype} matmul", f"{rate / 1e12:,.1f} TFLOP/s"),
        *([Line(name, text) for name, text in bench.decoder.detail().items()] if on.type == "cuda" else []),
    ]
    for rows in BATCHES:
        if rows * bench.shape.blocks > bench.blocks:
            why = "KV does not fit the device's memory" if on.type == "cuda" else "too slow on a CPU"
            lines.append(Line(f"decode, {rows} rows", f"skipped: {why}"))
            continue
        bound = decode_bytes(config, element, rows, bench.shape.context) / bandwidth
        for captures in (True, False) if on.type == "cuda" else (False,):
            bench.decoder.captures = captures
            for ahead in (False, True):
                took = bench.decode_s(rows, ahead, seconds)
                how = f"graphs {'on' if captures else 'off'}, {'two in flight' if ahead else 'one by one'}"
                lines.append(against(f"decode, {rows} rows, {how}", took, bound, rows))
        bench.decoder.captures = True
    bound = prefill_ops(config, bench.chunk) / rate
    took = bench.prefill_s(seconds)
    lines.append(against(f"prefill, {bench.chunk} tokens", took, bound, bench.chunk))
    return lines


def against(what: str, took: float, bound: float, tokens: int) -> Line:
    return Line(
        what,
        f"{took * 1e3:.3f} ms, {tokens / took:,.0f} tok/s",
        f"{bound * 1e3:.3f} ms",
        f"{bound / took:.0%}",
    )


def show(lines: list[Line]) -> None:
    rows = [
        ("", "measured", "bound", "of the bound"),
        *((x.what, x.measured, x.bound, x.share) for x in lines),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip())


def rows_that_fit(config: ModelConfig, on: torch.device, dtype: str, context: int) -> int:
    """The largest batch whose KV, beside the weights, leaves a fifth of the free memory."""
    if on.type == "cpu":
        return BATCHES[1]
    row = plan_kv(config, dtype, 1 << 50, BLOCK_TOKENS).block_bytes * Shape(1, context).blocks
    weights = sum(math.prod(s) for s in expected_shapes(config).values()) * DTYPES[dtype].itemsize
    room = 0.8 * torch.cuda.mem_get_info(on)[0] - weights
    return max((rows for rows in BATCHES if rows * row <= room), default=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="1b", help="a model folder, or " + ", ".join(SIZES))
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--context", type=int, default=512, help="tokens each decoding sequence has")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=2.0, help="time each measurement may take")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        print(f"no CUDA device: torch {torch.__version__} sees none", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as made:
        path = write_random(Path(made), args.model) if args.model in SIZES else Path(args.model)
        folder = ModelFolder(path, MAX_LEN)
        on = torch.device(args.device)
        card = torch.cuda.get_device_name(on) if on.type == "cuda" else "CPU"
        print(f"{card}, torch {torch.__version__}, {args.model}, {args.dtype}, context {args.context}")
        lines = correctness(folder, args.device, args.dtype)
        context = min(args.context, folder.config.max_len - 1)
        rows = rows_that_fit(folder.config, on, args.dtype, context)
        bench = Bench(path, folder.config, args.device, args.dtype, Shape(rows, context))
        lines += performance(bench, args.dtype, args.seconds)
        show(lines)
    return 1 if any(line.share == "WRONG" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
