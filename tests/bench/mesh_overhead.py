"""What the mesh costs: tokens/s through HTTP against the same engine driven directly, in one process.

Both do the same work with the same weights and threads: `concurrency` random prompts at a time, every answer
of full length. The direct side is the best case without a mesh: a fixed batch, prompts computed back to back,
then one decode step after the other, no scheduler, no sockets. They take turns on the same machine.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from deploy.bench.client import Target
from deploy.bench.plots import figure, grouped_bars
from deploy.bench.records import summarise
from deploy.bench.runner import Conditions, closed_loop
from deploy.bench.workload import Job, Shape, random_jobs
from services.worker.compute import BrokenSession, Compute
from services.worker.engine.executor import EngineOptions, TorchExecutor
from services.worker.settings import default_kv
from services.worker.slots import Batch, BatchShape
from services.worker.step import Executor
from shared.model import resolve
from shared.wire import Admit, Done, Sampling, Step, Work
from tests.bench.common import MODEL, Report, announce, mesh, options

MODULE = "tests.bench.mesh_overhead"
TARGET = 0.92


class Direct:
    """Step frames made by hand for a fixed batch, computed at once."""

    def __init__(self, executor: Executor, slots: int) -> None:
        info = executor.info
        shape = BatchShape(slots, info.max_len, info.block_tokens, info.blocks_total, info.vocab_size)
        self._blocks = info.block_tokens
        self._compute = Compute(executor, Batch(shape, info.fingerprint))
        self._compute.session = 1
        self._seq = 0

    def _step(self, **content: Any) -> Done:
        self._seq += 1
        step = Step(instance="direct", epoch=1, owner="bench", incarnation=1, seq=self._seq, **content)
        outcome = self._compute.step(step, perf_counter())
        if outcome is None or isinstance(outcome, BrokenSession):
            raise RuntimeError(f"the engine refused a frame: {outcome}")
        return outcome.done

    def run(self, jobs: Sequence[Job]) -> int:
        """Generate every job's tokens, all jobs in one batch. Returns the tokens drawn."""
        admits, first = [], 0
        for slot, job in enumerate(jobs):
            count = -(-(job.prompt_tokens + job.output_tokens) // self._blocks)
            sampling = Sampling(max_tokens=job.output_tokens, temperature=0.0)
            blocks = list(range(first, first + count))
            admits.append(Admit(slot, 0, job.prompt_tokens, list(job.prompt), 0, blocks, sampling))  # type: ignore[arg-type]
            first += count
        tokens = 0
        for slot, job in enumerate(jobs):
            # One prompt a step, as the time budget of the mesh would cut it; others in the batch stand still.
            work = [Work(slot, job.prompt_tokens)] + [Work(other, 0) for other in range(slot)]
            done = self._step(admit=[admits[slot]], work=work)
            tokens += len(done.tokens)
        while tokens < sum(job.output_tokens for job in jobs):
            tokens += len(self._step().tokens)
        self._step(release=list(range(len(jobs))))
        return tokens


def direct_round(direct: Direct, jobs: Sequence[Job], concurrency: int) -> float:
    """Tokens/s of all jobs, `concurrency` at a time."""
    began = perf_counter()
    tokens = sum(direct.run(jobs[at : at + concurrency]) for at in range(0, len(jobs), concurrency))
    return tokens / (perf_counter() - began)


def mesh_round(target: Target, jobs: Sequence[Job], concurrency: int) -> float:
    run = asyncio.run(closed_loop(target, jobs, concurrency, Conditions(), lambda record: None))
    summary = summarise(run.records, run.wall_s)
    if summary.errors:
        raise SystemExit(f"a request failed: {next(r.error for r in run.records if r.error)}")
    return summary.output_tok_s


def draw(names: list[str], rates: dict[str, list[float]]) -> Any:
    made, axes = figure(6.0)
    grouped_bars(axes, names, rates, "output tokens/s")
    return made


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument(
        "--batches", type=int, default=2, help="requests a round, in multiples of the concurrency"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each side, taking turns")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each side's engine")
    args = parser.parse_args()
    command = announce(args, MODULE)
    shape = Shape(args.prompt_tokens, args.output_tokens)
    folder: Path = resolve(MODEL).path
    executor = TorchExecutor(
        folder, EngineOptions(dtype=args.dtype, kv_dtype=default_kv(args.dtype, "cpu"), threads=args.threads)
    )
    direct = Direct(executor, args.concurrency)
    rates: dict[str, list[float]] = {"direct": [], "mesh": []}
    count = args.concurrency * args.batches
    with mesh("--dtype", args.dtype, "--threads", str(args.threads)) as (_, target):
        for number in range(-1, args.rounds):  # round -1 warms both sides up
            todo = count if number >= 0 else args.concurrency
            jobs = random_jobs(todo, shape, f"{args.seed}:{number}")
            once = {
                "direct": direct_round(direct, jobs, args.concurrency),
                "mesh": mesh_round(target, jobs, args.concurrency),
            }
            if number >= 0:
                for name, rate in once.items():
                    rates[name].append(rate)
    executor.close()
    shares = sorted(m / d for m, d in zip(rates["mesh"], rates["direct"], strict=True))
    share = shares[len(shares) // 2]
    rows = [(name, *found) for name, found in rates.items()]
    rows.append(("mesh / direct", *(m / d for m, d in zip(rates["mesh"], rates["direct"], strict=True))))
    names = [f"round {n + 1}" for n in range(args.rounds)]
    report = Report(
        "mesh_overhead",
        f"output tokens/s, concurrency {args.concurrency}, {args.prompt_tokens} in, {args.output_tokens} "
        "out, "
        f"{args.dtype}, {args.threads} threads",
        command,
        args.seed,
        ("side", *names),
        rows,
        {"detail": dict(executor.info.detail)},
        {f"{100 * share:.1f} % of direct (median round), promised {100 * TARGET:.0f} %": share >= TARGET},
    )
    return report.publish(args.out, draw(names, rates))


if __name__ == "__main__":
    raise SystemExit(main())
