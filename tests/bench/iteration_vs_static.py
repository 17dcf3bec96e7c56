"""Iteration-level against static batching on the Azure conversation trace.

Twice: the real scheduler core on a simulated instance in virtual time (how many decode steps each policy
needs, free of noise), and a real mesh (throughput and the latency of short and long requests). All requests
wait from the start, so the policies differ in nothing but who may join a running batch.
"""

import argparse
import asyncio
import random
from dataclasses import dataclass
from typing import Any

from rich.progress import track

from deploy.bench import traces
from deploy.bench.client import Target
from deploy.bench.plots import COLOURS, figure, grouped_bars
from deploy.bench.records import Record, percentile, summarise
from deploy.bench.runner import Conditions, Run, closed_loop
from deploy.bench.traces import TraceRow
from deploy.bench.workload import Shape
from services.scheduler.admission import ExpectedOutput
from services.scheduler.policy import BatchPolicy, ContinuousPolicy, StaticBatchPolicy
from tests.bench.books import Books
from tests.bench.common import DATA, PATIENT, Report, announce, block_tokens, mesh, options, watching
from tests.bench.simulated import SimulatedMesh
from tests.bench.simulation import VOCAB, Request, Size
from tests.support.mesh import Mesh

MODULE = "tests.bench.iteration_vs_static"
TARGET = 1.8
POLICIES = ("static", "continuous")


@dataclass(frozen=True)
class Outcome:
    """One policy in one form. Latencies in seconds since the start of the run, when all requests came."""

    form: str
    policy: str
    books: Books
    wall_s: float
    short_s: list[float]
    long_s: list[float]
    extra: dict[str, Any]

    def row(self) -> list[Any]:
        figures = self.books.figures()
        return [
            self.form,
            self.policy,
            figures["decode_steps"],
            figures["mean_batch"],
            figures["interruptions"],
            self.wall_s,
            figures["decode_tokens"] / self.wall_s,
            *(percentile(self.short_s, p) for p in (0.5, 0.99)),
            *(percentile(self.long_s, p) for p in (0.5, 0.99)),
        ]


COLUMNS = (
    "form", "policy", "decode steps", "mean batch", "interrupted", "wall s", "tok/s", "short p50 s",
    "short p99 s", "long p50 s", "long p99 s",
)  # fmt: skip


def load() -> list[TraceRow]:
    return traces.parse((DATA / "azure_conv_2023.csv").read_text().splitlines())


def split(outputs: list[int], latencies: list[float]) -> tuple[list[float], list[float]]:
    """Latencies of the requests with the shorter and the longer half of the outputs."""
    middle = percentile(outputs, 0.5)
    pairs = list(zip(outputs, latencies, strict=True))
    return [s for n, s in pairs if n < middle], [s for n, s in pairs if n >= middle]


def simulate(policy: str, rows: list[TraceRow], slots: int, seed: int) -> Outcome:
    rng = random.Random(seed)
    requests = [
        Request([rng.randrange(2, VOCAB) for _ in range(r.prompt_tokens)], r.output_tokens, r.output_tokens)
        for r in rows
    ]
    chosen: BatchPolicy = StaticBatchPolicy() if policy == "static" else ContinuousPolicy()
    simulated = SimulatedMesh(chosen, ExpectedOutput(), Size(slots, blocks=1 << 15), seed)
    wall_s = simulated.run(requests)
    short, long = split([r.output for r in requests], [r.last or 0.0 for r in requests])
    return Outcome("simulated", policy, simulated.books, wall_s, short, long, {})


async def drive(
    running: Mesh, target: Target, books: Books, rows: list[TraceRow], scale: float, seed: int
) -> Run:
    scaled = traces.scale(rows, 8192, tokens=scale)
    jobs = traces.jobs(scaled, Shape(), str(seed))
    async with watching(running, books):
        # As many clients as requests: all of them wait at the scheduler, none at the generator.
        return await closed_loop(target, jobs, len(jobs), Conditions(timeout_s=3600), lambda record: None)


def measure(policy: str, rows: list[TraceRow], slots: int, scale: float, seed: int) -> Outcome:
    # Enough KV for every slot's longest sequence, so that memory decides nothing here.
    flags = ("--policy", policy, "--max-slots", str(slots), "--kv-memory", "2GiB", *PATIENT)
    with mesh(*flags) as (running, target):
        books = Books(block_tokens(running))
        run = asyncio.run(drive(running, target, books, rows, scale, seed))
    errors = [record.error for record in run.records if record.error]
    if errors:
        raise SystemExit(f"{len(errors)} of {len(run.records)} requests failed: {errors[0]}")
    records: list[Record] = run.records
    short, long = split([r.wanted_tokens for r in records], [r.e2e for r in records])
    summary = summarise(records, run.wall_s)
    extra = {
        "gap_p50_ms": summary.gap_p50_ms,
        "gap_p99_ms": summary.gap_p99_ms,
        "gap_max_ms": summary.gap_max_ms,
    }
    return Outcome("real", policy, books, run.wall_s, short, long, extra)


def draw(outcomes: list[Outcome]) -> Any:
    forms = list(dict.fromkeys(o.form for o in outcomes))
    made, panes = figure(5.5, 4.2, columns=1 + len(forms))
    steps = {
        p: [next(o.row()[2] for o in outcomes if (o.form, o.policy) == (f, p)) for f in forms]
        for p in POLICIES
    }
    grouped_bars(panes[0], forms, {p: [float(n) for n in steps[p]] for p in POLICIES}, "decode steps")
    panes[0].set_title("decode steps for the same tokens")
    for pane, form in zip(panes[1:], forms, strict=True):
        for outcome in (o for o in outcomes if o.form == form):
            for name, values, style in (("short", outcome.short_s, "-"), ("long", outcome.long_s, "--")):
                ordered = sorted(values)
                shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
                colour = COLOURS[POLICIES.index(outcome.policy)]
                pane.plot(ordered, shares, style, color=colour, label=f"{outcome.policy}, {name}")
        pane.set_title(f"{form}: share of requests done by then")
        pane.set_xlabel("s after the start")
        pane.legend(frameon=False)
    return made


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--slots", type=int, default=32, help="sequences at once")
    parser.add_argument("--requests", type=int, default=1024, help="first rows of the trace, simulated")
    parser.add_argument(
        "--real-requests", type=int, default=96, help="first rows on the real mesh; 0: leave it out"
    )
    parser.add_argument(
        "--scale", type=float, default=0.25, help="lengths on the real mesh are multiplied by this"
    )
    args: argparse.Namespace = parser.parse_args()
    command = announce(args, MODULE)
    rows = load()
    outcomes = [
        simulate(policy, rows[: args.requests], args.slots, args.seed)
        for policy in track(POLICIES, description="simulate", transient=True)
    ]
    verdicts: dict[str, bool] = {}
    if args.real_requests:
        sample = rows[: args.real_requests]
        outcomes += [measure(policy, sample, args.slots, args.scale, args.seed) for policy in POLICIES]
    for form in dict.fromkeys(o.form for o in outcomes):
        static, continuous = (next(o for o in outcomes if (o.form, o.policy) == (form, p)) for p in POLICIES)
        ratio = static.books.decode_steps / continuous.books.decode_steps
        if form == "simulated":
            verdicts[f"{form}: static needs {ratio:.2f} times the decode steps, promised {TARGET}"] = (
                ratio >= TARGET
            )
        else:
            print(f"{form}: static needs {ratio:.2f} times the decode steps of its shorter sample")
        books = continuous.books
        verdicts[
            f"{form}: {books.interruptions} interruptions and {books.stalls} stalls of running requests"
        ] = books.interruptions == books.stalls == 0
    details = {
        "trace": "azure_conv_2023.csv",
        "slots": args.slots,
        "simulated_requests": args.requests,
        "real_requests": args.real_requests,
        "real_scale": args.scale,
        "figures": [{"form": o.form, "policy": o.policy, **o.books.figures(), **o.extra} for o in outcomes],
    }
    report = Report(
        "iteration_vs_static",
        f"Azure conversation trace, {args.slots} slots, everything queued at the start",
        command,
        args.seed,
        COLUMNS,
        [o.row() for o in outcomes],
        details,
        verdicts,
    )
    return report.publish(args.out, draw(outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
