"""What a long context costs the engine: decode steps at 300 and 6,000 tokens against the memory's bandwidth,
with KV at 32 and 16 bit, and the speed of prefill behind prefixes of up to 7,680 tokens."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from deploy.bench.plots import COLOURS, figure
from services.worker.engine.executor import EngineOptions, TorchExecutor
from services.worker.engine.formats import FORMATS
from services.worker.engine.memory import Arena
from services.worker.step import SlotArrays, StepInput
from shared.model import resolve
from shared.wire import Sampling
from tests.bench.common import MODEL, Report, announce, options

MODULE = "tests.bench.long_context"
SHORT, LONG = 300, 6000
SHARE = 0.6
"""Of the measured bandwidth: what reading the added KV must reach."""
PREFIXES = (0, 2048, 4096, 7680)
KV = ("float32", "float16")
_READ = 256 << 20


class Rig:
    """An engine with one sequence, whose KV of `length` tokens is random."""

    def __init__(self, model_dir: Path, kv_dtype: str, dtype: str, threads: int | None, length: int) -> None:
        self.kv_dtype = kv_dtype
        chosen = EngineOptions(dtype=dtype, kv_dtype=kv_dtype, kv_bytes=600 << 20, threads=threads)
        self.executor = TorchExecutor(model_dir, chosen)
        info = self.executor.info
        self.detail = dict(info.detail)
        self.threads = int(self.detail["threads"])
        self.token_bytes = int(self.detail["block_bytes"]) / info.block_tokens
        self.executor.kv.data.normal_()
        blocks = length // info.block_tokens
        table = np.random.default_rng(0).permutation(info.blocks_total)[None, :blocks]
        self._slots = SlotArrays(
            tokens=np.random.default_rng(1).integers(0, info.vocab_size, (1, length), np.int32),
            block_table=table.astype(np.int32),
            computed=np.zeros(1, np.int32),
            known=np.full(1, length, np.int32),
            prompt_len=np.full(1, length, np.int32),
            choice=np.zeros(1, np.int32),
            sampling=[Sampling(max_tokens=1, temperature=0.0)],
            version=np.zeros(1, np.int64),
        )

    def step(self, start: int, count: int) -> tuple[float, float]:
        """(seconds of a step that computes `count` tokens from position `start`, those of its attention)."""
        work = StepInput(
            slots=np.zeros(1, np.int32),
            starts=np.full(1, start, np.int32),
            counts=np.full(1, count, np.int32),
            samples=np.full(1, count == 1),
        )
        before = self.executor.spent().get("attention", 0.0)
        began = perf_counter()
        self.executor.run(work, self._slots)
        return perf_counter() - began, self.executor.spent().get("attention", 0.0) - before

    def attention_operations(self, start: int, count: int) -> float:
        """Multiplications and additions in the attention of such a step."""
        c = self.executor.config
        return 4.0 * c.q_size * c.layers * sum(range(start + 1, start + count + 1))


@dataclass
class Measured:
    """Of one KV format, a figure per round: the fastest of the round's steps."""

    decode: dict[int, list[float]] = field(default_factory=dict)
    prefill: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def added_s(self) -> float:
        return median(a - b for a, b in zip(self.decode[LONG], self.decode[SHORT], strict=True))


def read_gb_s(memory: torch.Tensor, threads: int) -> float:
    """Read bandwidth of `threads` threads, best of some."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    best = float("inf")
    for _ in range(5):
        began = perf_counter()
        memory.sum()
        best = min(best, perf_counter() - began)
    torch.set_num_threads(before)
    return memory.nbytes / best / 1e9


def measure(rigs: list[Rig], rounds: int, steps: int, chunk: int) -> tuple[dict[str, Measured], list[float]]:
    """Formats and lengths take turns within each round, the bandwidth in each anew."""
    memory = Arena(_READ).take(_READ // 4, torch.float32).fill_(1.0)
    found, bandwidths = {rig.kv_dtype: Measured() for rig in rigs}, []
    for _ in range(rounds):
        bandwidths.append(read_gb_s(memory, rigs[0].threads))
        best = {(rig.kv_dtype, at): float("inf") for rig in rigs for at in (SHORT, LONG)}
        for _ in range(steps):
            for rig in rigs:
                for at in (SHORT, LONG):
                    best[rig.kv_dtype, at] = min(best[rig.kv_dtype, at], rig.step(at - 1, 1)[0])
        for (name, at), seconds in best.items():
            found[name].decode.setdefault(at, []).append(seconds)
        for rig in rigs:
            for prefix in PREFIXES:
                found[rig.kv_dtype].prefill.setdefault(prefix, []).append(rig.step(prefix, chunk))
    return found, bandwidths


def draw(found: dict[str, Measured], chunk: int, bound_s: dict[str, float]) -> Any:
    made, (left, right) = figure(6.0, 4.2, columns=2)
    for index, (name, measured) in enumerate(found.items()):
        times = [median(measured.decode[at]) * 1e3 for at in (SHORT, LONG)]
        left.plot((SHORT, LONG), times, "o-", color=COLOURS[index], label=f"KV {name}")
        bound = [times[0], times[0] + bound_s[name] * 1e3]
        left.plot(
            (SHORT, LONG), bound, "--", color=COLOURS[index], label=f"KV {name} at {SHARE} of bandwidth"
        )
        speeds = [chunk / min(seconds for seconds, _ in measured.prefill[at]) for at in PREFIXES]
        right.plot(PREFIXES, speeds, "o-", color=COLOURS[index], label=f"KV {name}")
    left.set_ylabel("decode step, ms")
    right.set_ylabel(f"prefill in chunks of {chunk}, tokens/s")
    for axes in (left, right):
        axes.set_xlabel("tokens of context")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    return made


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype", choices=sorted(FORMATS), default="float16", help="weights")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="decode steps of each kind per round")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a prefill step")
    args = parser.parse_args()
    command = announce(args, MODULE)
    torch.manual_seed(args.seed)
    length = PREFIXES[-1] + args.chunk
    folder = resolve(args.model).path
    rigs = [Rig(folder, kv, args.dtype, args.threads, length) for kv in KV]
    found, bandwidths = measure(rigs, args.rounds, args.steps, args.chunk)
    bandwidth = median(bandwidths)
    rows, verdicts, bound_s, figures = [], {}, {}, {}
    for rig in rigs:
        measured = found[rig.kv_dtype]
        added, added_bytes = measured.added_s(), (LONG - SHORT) * rig.token_bytes
        bound = bound_s[rig.kv_dtype] = added_bytes / (SHARE * bandwidth * 1e9)
        for at in (SHORT, LONG):
            rows.append((f"KV {rig.kv_dtype}: decode step at {at}, ms", median(measured.decode[at]) * 1e3))
        rows.append((f"KV {rig.kv_dtype}: added by {LONG - SHORT} tokens, ms", added * 1e3))
        rows.append((f"KV {rig.kv_dtype}: share of the bandwidth", added_bytes / added / bandwidth / 1e9))
        for prefix in PREFIXES:
            seconds, attention = min(measured.prefill[prefix])
            speed = rig.attention_operations(prefix, args.chunk) / attention / 1e9 if attention else 0.0
            share = f"attention {attention / seconds:.0%} at {speed:.0f} GF/s"
            rows.append((f"KV {rig.kv_dtype}: prefill at {prefix} ({share}), tokens/s", args.chunk / seconds))
        figures[rig.kv_dtype] = {"decode_s": measured.decode, "prefill_s": measured.prefill}
        words = (
            f"KV {rig.kv_dtype}: {LONG - SHORT} tokens add {added * 1e3:.1f} ms, promised {bound * 1e3:.1f}"
        )
        verdicts[words] = added <= bound
    halved = found["float16"].added_s() / found["float32"].added_s()
    rows += [("added by float16 KV / by float32 KV", halved), ("read bandwidth, GB/s", bandwidth)]
    report = Report(
        "long_context",
        f"one sequence, weights {args.dtype}, {rigs[0].threads} threads, {args.rounds} rounds",
        command,
        args.seed,
        ("what", "figure"),
        rows,
        {"rounds": figures, "bandwidth_gb_s": bandwidths, "engine": rigs[0].detail},
        verdicts,
    )
    return report.publish(args.out, draw(found, args.chunk, bound_s))


if __name__ == "__main__":
    raise SystemExit(main())
