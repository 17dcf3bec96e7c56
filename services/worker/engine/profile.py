"""Where a step's time goes: `hortator profile engine`, or `python -m services.worker.engine.profile FOLDER`.

Steps run as the worker runs them (`Compute`, `Batch`, frames), with sequences whose KV is filled with random
numbers and declared cached, so that no prompt has to be computed first.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.worker.compute import Compute, Outcome
from services.worker.engine.config import UnsupportedModel
from services.worker.engine.executor import EngineOptions, TorchExecutor
from services.worker.engine.native.build import KernelsUnavailable
from services.worker.engine.peaks import Peaks, measure_peaks
from services.worker.engine.weights import BadWeights
from services.worker.settings import default_kv, parse_bytes
from services.worker.shape import BatchShape
from services.worker.slots import Batch
from services.worker.step import ExecutorInfo, SlotArrays, StepInput, StepOutput
from shared.blocks import extend_packed, root_hash
from shared.runtime.settings import SettingsError
from shared.wire import Admit, Sampling, Step, Work

UNACCOUNTED = "unaccounted"
_WEIGHT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Of an element; 1 where it is not named here."""
_WARM_UP = 2


@dataclass(frozen=True)
class Workload:
    """Steady steps of one kind: `rows` sequences of `context` tokens, each computing `count` more."""

    name: str
    rows: int
    context: int
    count: int


GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0)

WORKLOADS = (
    Workload("decode, batch 1", 1, 300, 1),
    Workload("decode, batch 8", 8, 300, 1),
    Workload("decode, batch 32", 32, 300, 1),
    Workload("prefill, chunk of 256", 1, 0, 256),
)


@dataclass(frozen=True)
class OpTime:
    """One class of work in a step, mean over the steps measured."""

    name: str
    seconds: float
    share: float
    """Of the step as measured from outside."""
    gf_s: float | None = None
    """Billions of multiplications and additions a second; None where that says nothing."""
    gb_s: float | None = None
    """Weights and KV read a second, as if each were read once."""


@dataclass(frozen=True)
class StepProfile:
    workload: str
    rows: int
    context: int
    """Tokens each row has before the first step."""
    count: int
    """Tokens each row computes in a step."""
    steps: int
    step_s: float
    """Mean time of a step, measured around it."""
    ops: tuple[OpTime, ...]
    """In the order of a step; the last is what no class accounts for."""


@dataclass(frozen=True)
class Report:
    model: str
    detail: dict[str, str]
    peaks: Peaks
    profiles: tuple[StepProfile, ...]


class _Watched:
    """`Executor` that adds up the time spent inside another one."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor
        self.inside_s = 0.0

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def run(self, step: StepInput, slots: SlotArrays) -> StepOutput:
        begun = time.perf_counter()
        output = self._executor.run(step, slots)
        self.inside_s += time.perf_counter() - begun
        return output

    def close(self) -> None:
        self._executor.close()


def profile_engine(
    model_dir: Path,
    options: EngineOptions,
    workloads: Sequence[Workload] = WORKLOADS,
    seconds: float = 2.0,
    sampling: Sampling = GREEDY,
) -> Report:
    """Load the model as the worker does and measure each workload for about `seconds`.

    Raises what `TorchExecutor` raises, and ValueError when the KV memory does not hold a workload.
    """
    executor = TorchExecutor(model_dir, options)
    try:
        threads = int(dict(executor.info.detail)["threads"])
        rig = _Rig(executor, max(w.rows for w in workloads), sampling)
        profiles = tuple(rig.measure(workload, seconds) for workload in workloads)
        return Report(model_dir.name, dict(executor.info.detail), measure_peaks(threads), profiles)
    finally:
        executor.close()


class _Rig:
    """A worker's computing side without the worker."""

    def __init__(self, executor: TorchExecutor, max_slots: int, sampling: Sampling) -> None:
        info = executor.info
        self._executor, self._sampling, self._info = executor, sampling, info
        self._watched = _Watched(executor)
        shape = BatchShape(max_slots, info.max_len, info.block_tokens, info.blocks_total, info.vocab_size)
        self._batch = Batch(shape, info.fingerprint)
        self._compute = Compute(self._watched, self._batch)
        self._compute.session = 1
        self._seq = 0
        self._rng = np.random.default_rng(0)

    def measure(self, w: Workload, seconds: float) -> StepProfile:
        """Steps of `w` until `seconds` have passed or its sequences are full. Raises ValueError: no room."""
        size, decode = self._info.block_tokens, w.count == 1
        blocks = min(self._info.blocks_total // w.rows, self._info.max_len // size)
        most = blocks * size - w.context - 1
        if most < w.count + _WARM_UP:
            needed = w.context + w.count + _WARM_UP + 1
            if self._info.max_len // size <= blocks:
                raise ValueError(
                    f"{w.name} needs sequences of {needed} tokens, and this model's have up to "
                    f"{self._info.max_len}; measure one with a longer context"
                )
            raise ValueError(
                f"{w.name} needs {w.rows} × {needed} tokens of KV, but there is "
                f"room for {w.rows} × {blocks * size}; raise --kv-memory"
            )
        self._compute.begin()
        if decode:
            self._compute.step(self._admitting(w, blocks), time.perf_counter())
        before, inside_s, wall_s, steps = self._executor.spent(), 0.0, 0.0, -_WARM_UP
        while steps < 1 or (wall_s < seconds and steps + _WARM_UP < most - 1):
            if steps == 0:
                before, inside_s, wall_s = self._executor.spent(), self._watched.inside_s, 0.0
            frame = self._frame() if decode else self._admitting(w, blocks)
            begun = time.perf_counter()
            outcome = self._compute.step(frame, begun)
            wall_s += time.perf_counter() - begun
            if not isinstance(outcome, Outcome):
                raise RuntimeError(f"{w.name}: {outcome}")
            steps += 1
        spent = {name: s - before[name] for name, s in self._executor.spent().items()}
        spent["bookkeeping"] = wall_s - (self._watched.inside_s - inside_s)
        spent[UNACCOUNTED] = wall_s - sum(spent.values())
        cost = step_cost(self._executor, w, w.context + 1 + _WARM_UP + steps // 2 if decode else w.count)
        return StepProfile(
            w.name,
            w.rows,
            w.context,
            w.count,
            steps,
            wall_s / steps,
            tuple(_op(name, s / steps, s / wall_s, cost) for name, s in spent.items()),
        )

    def _admitting(self, w: Workload, blocks: int) -> Step:
        """A frame that admits every sequence of `w`, in place of the former ones, and computes it once."""
        size = self._info.block_tokens
        cached = w.context // size
        admitted = []
        for slot in range(w.rows):
            ids = self._rng.integers(0, self._info.vocab_size, w.context + w.count).tolist()
            table = list(range(slot * blocks, (slot + 1) * blocks))
            parent = root_hash(self._info.fingerprint, size, "")
            for index, block in enumerate(table[:cached]):
                packed = np.array(ids[index * size : (index + 1) * size], np.int32).tobytes()
                parent = extend_packed(parent, packed)
                self._batch.hashes.store(block, parent)
                self._executor.kv.data[block].normal_()
            admitted.append(Admit(slot, 0, len(ids), ids, cached * size, table, self._sampling))
        live = range(self._batch.live)
        work = [Work(a.slot, len(a.ids) - a.computed) for a in admitted]
        return self._frame(admit=admitted, release=list(live), work=work)

    def _frame(self, **changes: Any) -> Step:
        self._seq += 1
        return Step(instance="", epoch=1, owner="", incarnation=1, seq=self._seq, **changes)


def step_cost(executor: TorchExecutor, w: Workload, length: int) -> dict[str, tuple[float, float]]:
    """Class of work → (operations, bytes of weights and KV) of one step whose rows end at `length` tokens."""
    c, detail = executor.config, dict(executor.info.detail)
    weight = _WEIGHT_BYTES.get(detail["dtype"], 1)
    tokens = w.rows * w.count
    # Behind its attention, the last layer has only rows whose logits are wanted.
    fewer = tokens - (tokens - w.rows) / c.layers
    matrices = {
        "qkv": (tokens, c.layers * c.hidden * (c.q_size + 2 * c.kv_size)),
        "out": (fewer, c.layers * c.hidden * c.q_size),
        "gate and up": (fewer, c.layers * c.hidden * 2 * c.intermediate),
        "down": (fewer, c.layers * c.hidden * c.intermediate),
        "head": (w.rows, c.hidden * c.vocab_size),
    }
    seen = w.rows * sum(range(length - w.count + 1, length + 1))
    kv_bytes = w.rows * length * 2 * c.kv_size * c.layers * executor.kv.data.element_size()
    return {name: (2.0 * rows * size, float(size * weight)) for name, (rows, size) in matrices.items()} | {
        "attention": (4.0 * seen * c.q_size * c.layers, float(kv_bytes))
    }


def _op(name: str, seconds: float, share: float, cost: dict[str, tuple[float, float]]) -> OpTime:
    if name not in cost or not seconds:
        return OpTime(name, seconds, share)
    operations, read = cost[name]
    return OpTime(name, seconds, share, operations / seconds / 1e9, read / seconds / 1e9)


def main(argv: Sequence[str] | None = None, workloads: Sequence[Workload] = WORKLOADS) -> int:
    """Measure and print one JSON object. Exit status 2, with the reason, where it cannot be done."""
    parser = argparse.ArgumentParser(prog="services.worker.engine.profile")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--kv-dtype", default="")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args(argv)
    try:
        options = EngineOptions(
            dtype=args.dtype,
            kv_dtype=args.kv_dtype or default_kv(args.dtype, args.device),
            kv_bytes=parse_bytes(args.kv_memory),
            threads=args.threads or None,
            kernels=args.kernels,
            device=args.device,
            deterministic=args.deterministic,
        )
        sampling = Sampling(max_tokens=1 << 20, temperature=args.temperature, top_p=args.top_p, seed=1)
        report = profile_engine(args.model_dir, options, workloads, args.seconds, sampling)
    except (BadWeights, UnsupportedModel, KernelsUnavailable, SettingsError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(asdict(report)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
