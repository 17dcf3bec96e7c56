"""What it costs to keep every block in the second tier too, under a load of nothing but prompts.

Two meshes that differ in the second tier alone take turns on the same machine, the same prompts in each turn;
the other one idles. Every prompt is new and one token is asked of it, so every block that is computed is also
written behind, and nothing is ever fetched. A turn begins when nothing of the last one waits to be sent any
more; its rate is told until the last answer, and until the last block is sent.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from deploy.bench.client import Target
from deploy.bench.plots import figure, grouped_bars
from deploy.bench.records import summarise
from deploy.bench.runner import Conditions, closed_loop
from deploy.bench.workload import Job, Shape, random_jobs
from tests.bench.common import Report, announce, mesh, options
from tests.support.mesh import Mesh

MODULE = "tests.bench.tier_cost"
TARGET = 0.97
SIDES = ("without", "with")


@dataclass(frozen=True)
class Turn:
    prompt_tok_s: float
    """Until the last answer."""
    drained_tok_s: float
    """Until the last block was sent as well."""
    ttft_p50_ms: float


def turn(running: Mesh, target: Target, jobs: Sequence[Job], clients: int) -> Turn:
    began = time.perf_counter()
    run = asyncio.run(closed_loop(target, jobs, clients, Conditions(), lambda _: None))
    tokens = sum(job.prompt_tokens for job in jobs)
    summary = summarise(run.records, run.wall_s)
    if summary.errors:
        raise SystemExit(f"a request failed: {next(r.error for r in run.records if r.error)}")
    drain(running)
    return Turn(tokens / run.wall_s, tokens / (time.perf_counter() - began), summary.ttft_p50_ms)


def drain(running: Mesh) -> None:
    """Until no block waits to be sent."""
    deadline = time.monotonic() + 60
    while (waiting := running.metric("w0", "hortator_worker_tier_waiting")) > 0:
        if time.monotonic() > deadline:
            raise SystemExit(f"{waiting:.0f} blocks still wait to be sent\n{running.logs()}")
        time.sleep(0.05)


def draw(names: list[str], turns: dict[str, list[Turn]]) -> Any:
    made, axes = figure(6.0)
    rates = {f"{side} a second tier": [t.prompt_tok_s for t in turns[side]] for side in SIDES}
    grouped_bars(axes, names, rates, "prompt tokens/s")
    return made


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--requests", type=int, default=8, help="in each turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tier-memory", default="2GiB", help="so large that nothing has to leave it")
    args = parser.parse_args()
    command = announce(args, MODULE)
    shape = Shape(args.prompt_tokens, 1)
    turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
    flags = ("--threads", str(args.threads))
    with (
        mesh(*flags, "--tier-memory", "0") as plain,
        mesh(*flags, "--tier-memory", args.tier_memory) as tiered,
    ):
        sides = dict(zip(SIDES, (plain, tiered), strict=True))
        for number in range(-1, args.rounds):  # round -1 warms both sides up
            jobs = random_jobs(args.requests if number >= 0 else 2, shape, f"{args.seed}:{number}")
            for side in SIDES if number % 2 else reversed(SIDES):
                done = turn(*sides[side], jobs, args.clients)
                if number >= 0:
                    turns[side].append(done)
        blocks = "hortator_worker_tier_blocks_total"
        sent, dropped = (tiered[0].metric("w0", blocks, what=what) for what in ("sent", "dropped"))
    names = [f"round {n + 1}" for n in range(args.rounds)]
    pairs = list(zip(turns["with"], turns["without"], strict=True))
    shares = [one.prompt_tok_s / other.prompt_tok_s for one, other in pairs]
    rows = [(f"{side} a second tier, tokens/s", *(t.prompt_tok_s for t in turns[side])) for side in SIDES]
    rows.append(("with / without", *shares))
    rows.append(("with, until all blocks are sent", *(t.drained_tok_s for t in turns["with"])))
    share = median(shares)
    report = Report(
        "tier_cost",
        f"prompt tokens/s, {args.clients} clients, {args.prompt_tokens} tokens each, {args.threads} threads; "
        f"{sent:.0f} blocks sent, {dropped:.0f} dropped",
        command,
        args.seed,
        ("side", *names),
        rows,
        {
            "blocks_sent": sent,
            "blocks_dropped": dropped,
            "ttft_p50_ms": {side: [t.ttft_p50_ms for t in turns[side]] for side in SIDES},
        },
        {
            f"{100 * share:.1f} % of the rate without (median round), aim {100 * TARGET:.0f} %": share
            >= TARGET
        },
    )
    return report.publish(args.out, draw(names, turns))


if __name__ == "__main__":
    raise SystemExit(main())
