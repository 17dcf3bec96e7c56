"""Placement by predicted time to first token against round-robin: prompts fit two instances, not one.

Two real instances, one thread each, and 24 system prompts: every request is one of them and a tail of its
own. Arrivals are a Poisson process at 70 % of what round-robin can serve, the same ones for each placement.
That capacity follows from measured times, of requests whose system prompt is cached and of those whose is
not, and from the share of system prompts that one instance has room for: its hit rate under random choice.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from deploy.bench.client import Target
from deploy.bench.plots import COLOURS, figure
from deploy.bench.records import Record, percentile, summarise
from deploy.bench.runner import Conditions, Run, closed_loop, open_loop
from deploy.bench.workload import Job, poisson
from services.worker.settings import parse_bytes
from tests.bench.common import PATIENT, Report, announce, block_tokens, mesh, options
from tests.support.mesh import Mesh

MODULE = "tests.bench.prefix_placement"
TARGET = 2.0
BLOCKS = "hortator_worker_tier_blocks_total"
LOAD = 0.7


@dataclass(frozen=True)
class Work:
    """Everything that is asked; each part follows from the seed alone, whatever was drawn before."""

    systems: list[list[int]]
    tail: int
    output: int
    seed: int

    @classmethod
    def draw(cls, args: argparse.Namespace) -> "Work":
        rng = random.Random(args.seed)
        systems = [_ids(rng, args.prefix) for _ in range(args.systems)]
        return cls(systems, args.tail, args.output_tokens, args.seed)

    def jobs(self, systems: Sequence[Sequence[int]], part: str) -> list[Job]:
        """One request for each of these, with tails of their own."""
        rng = random.Random(f"{self.seed}:{part}")
        prompts = [[*system, *_ids(rng, self.tail)] for system in systems]
        return [Job(prompt, len(prompt), self.output) for prompt in prompts]

    def arrivals(self, seconds: float, rate: float) -> list[Job]:
        rng = random.Random(f"{self.seed}:choices")
        asked = [rng.choice(self.systems) for _ in range(round(2 * seconds * rate) + 10)]
        timed = poisson(self.jobs(asked, "arrivals"), rate, str(self.seed))
        return [job for job in timed if job.at < seconds]


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(count)]


@dataclass(frozen=True)
class Outcome:
    placement: str
    records: list[Record]
    wall_s: float
    tokens_fit: int
    """Of each instance's KV memory."""
    fetched: float
    """Blocks that instances took from the second tier."""

    @property
    def ttft_s(self) -> list[float]:
        return [record.ttft for record in self.records]

    def row(self) -> list[Any]:
        times = [1e3 * value for value in self.ttft_s]
        hits = summarise(self.records, self.wall_s).cached_share
        middle, worst = (percentile(times, p) for p in (0.5, 0.99))
        return [self.placement, len(times), fmean(times), middle, worst, max(times), 100 * hits, self.fetched]


def checked(run: Run) -> Run:
    errors = [record.error for record in run.records if record.error]
    if errors:
        raise SystemExit(f"{len(errors)} of {len(run.records)} requests failed: {errors[0]}")
    return run


def ask(target: Target, jobs: list[Job], clients: int) -> list[Record]:
    return checked(asyncio.run(closed_loop(target, jobs, clients, Conditions(), lambda _: None))).records


def capacity(target: Target, work: Work, cold: list[Record], share: float) -> float:
    """Requests/s that two instances serve under round-robin, each holding `share` of the system prompts."""
    missed = median(record.e2e for record in cold)
    system = work.systems[:1]
    ask(target, work.jobs(system * 2, "both"), 1)  # in turn: both instances have it now
    hit = median(record.e2e for record in ask(target, work.jobs(system * 6, "hits"), 2))
    rate = 2 / (share * hit + (1 - share) * missed)
    print(
        f"a miss takes {missed:.2f} s, a hit {hit:.2f} s; at a hit rate of {100 * share:.0f} % "
        f"two instances serve {rate:.2f} requests/s",
        flush=True,
    )
    return rate


def tokens_fit(running: Mesh) -> int:
    """Of each instance's KV memory; asked once both are ready."""
    deadline = time.monotonic() + 60
    while True:
        instances = {row["id"]: row for row in running.status()["instances"]}
        if len(instances) == 2 and all(row["state"].lower() == "ready" for row in instances.values()):
            return int(instances["w0"]["blocks_total"]) * block_tokens(running)
        if time.monotonic() > deadline:
            raise SystemExit(f"two instances did not become ready: {instances}\n{running.logs()}")


def measure(placement: str, args: argparse.Namespace, rate: float) -> tuple[Outcome, float]:
    """One placement on a mesh of its own. `rate` 0: measured here, and returned."""
    work = Work.draw(args)
    flags = ("--instances", "2", "--threads", "1", "--kv-memory", args.kv_memory, *PATIENT)
    tier = ("--tier-memory", args.tier_memory if args.tier == "on" else "0")
    with mesh(*flags, *tier, "--set", f"scheduler.placement={placement}") as (running, target):
        room = tokens_fit(running)
        cold = ask(target, work.jobs(work.systems, "warm-up"), 2)
        rate = rate or LOAD * capacity(target, work, cold, min(1.0, room / (args.systems * args.prefix)))
        jobs = work.arrivals(args.seconds, rate)
        print(f"{placement}: {len(jobs)} requests at {rate:.2f} a second", flush=True)
        run = checked(asyncio.run(open_loop(target, jobs, Conditions(), lambda _: None)))
        fetched = _fetched(running)
    return Outcome(placement, run.records, run.wall_s, room, fetched), rate


def _fetched(running: Mesh) -> float:
    try:
        return sum(running.metric(name, BLOCKS, what="fetched") for name in ("w0", "w1"))
    except KeyError:
        return 0.0


def draw(outcomes: list[Outcome]) -> Any:
    made, (left, right) = figure(6.0, 4.2, columns=2)
    for outcome, colour in zip(outcomes, COLOURS, strict=False):
        ordered = sorted(outcome.ttft_s)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        label = f"{outcome.placement}, mean {1e3 * fmean(ordered):.0f} ms"
        left.plot(ordered, shares, "-", color=colour, label=label)
        right.scatter(
            [r.start for r in outcome.records], outcome.ttft_s, s=12, color=colour, label=outcome.placement
        )
    left.set_xscale("log")
    left.set_xlabel("time to first token, s")
    left.set_title("share of requests with it by then")
    right.set_yscale("log")
    right.set_xlabel("s after the start")
    right.set_title("time to first token, s")
    for pane in (left, right):
        pane.legend(frameon=False)
    return made


COLUMNS = (
    "placement", "requests", "TTFT mean ms", "p50 ms", "p99 ms", "max ms", "cached %", "blocks fetched",
)  # fmt: skip


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--placements", default="round-robin,ttft", help="the first is what others beat")
    parser.add_argument("--systems", type=int, default=24, help="system prompts, equally often asked")
    parser.add_argument("--prefix", type=int, default=1000, help="tokens of each")
    parser.add_argument("--tail", type=int, default=16, help="tokens of its own in each request")
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--kv-memory", default="320MiB", help="of each instance; about 14 system prompts")
    parser.add_argument("--tier", choices=("off", "on"), default="off", help="the second tier")
    parser.add_argument("--tier-memory", default="1GiB")
    parser.add_argument("--seconds", type=float, default=50.0, help="of arrivals, for each placement")
    parser.add_argument("--rate", type=float, default=0.0, help="requests/s; 0: measured with the first")
    args = parser.parse_args()
    parse_bytes(args.kv_memory)
    command = announce(args, MODULE)
    outcomes, rate = [], args.rate
    for placement in args.placements.split(","):
        outcome, rate = measure(placement, args, rate)
        outcomes.append(outcome)
    base = outcomes[0]
    if not base.tokens_fit < args.systems * args.prefix <= 2 * base.tokens_fit:
        print(f"{base.tokens_fit} tokens fit an instance: the prompts fit one, or not even two")
    verdicts = {}
    for other in outcomes[1:]:
        ratio = fmean(base.ttft_s) / fmean(other.ttft_s)
        words = f"{other.placement}: mean TTFT 1/{ratio:.2f} of {base.placement}'s, promised 1/{TARGET:g}"
        if other.placement == "ttft":
            verdicts[words] = ratio >= TARGET
        else:
            print(words.partition(", promised")[0])
    name = "prefix_placement" + ("_tier" if args.tier == "on" else "")
    report = Report(
        name,
        f"{args.systems} system prompts of {args.prefix} tokens, two instances with room for "
        f"{base.tokens_fit} each, {rate:.2f} requests/s, second tier {args.tier}",
        command,
        args.seed,
        COLUMNS,
        [outcome.row() for outcome in outcomes],
        {
            "rate": rate,
            "tokens_fit_an_instance": base.tokens_fit,
            "requests": {
                o.placement: [[r.start, r.ttft, r.e2e, r.cached_tokens] for r in o.records] for o in outcomes
            },
        },
        verdicts,
    )
    return report.publish(args.out, draw(outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
