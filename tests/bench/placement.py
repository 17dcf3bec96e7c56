"""Placement by predicted time to first token against round-robin and least-load, on simulated instances.

Three loads: the Mooncake conversation trace, lengths divided by 32 so that one of its 512-token prefix blocks
is one block of 16, where the ideal is what a single cache without end would find; Poisson arrivals of
requests with one of 24 system prompts of 1,000 tokens, whose blocks do not all fit one instance, at 70 % of
what round-robin can serve; and a burst of requests with one new prefix.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from typing import Any

from rich.progress import track

from deploy.bench import traces
from deploy.bench.plots import COLOURS, figure
from services.scheduler.placement import FirstTokenSoonest, LeastLoad, Placement, RoundRobin
from tests.bench.common import DATA, Report, announce, options
from tests.bench.simulated_fleet import FleetOutcome, SimulatedFleet
from tests.bench.simulation import VOCAB, Request, Size

MODULE = "tests.bench.placement"
POLICIES: dict[str, Callable[[], Placement]] = {
    "ttft": FirstTokenSoonest,
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
}
BLOCK = 16
SCALE = BLOCK / traces.MOONCAKE_BLOCK
POINTS, FASTER, BALANCE = 0.02, 2.0, 1.2
SYSTEM_PROMPTS, SYSTEM_TOKENS, OWN_TOKENS, ANSWER = 24, 1000, 50, 32
LOAD = 0.7

COLUMNS = (
    "load",
    "placement",
    "hit rate %",
    "mean TTFT s",
    "p50",
    "p99",
    "max / mean busy",
    "busy %",
)


def mooncake(count: int, slower: float) -> list[Request]:
    """The first rows of the trace. Equal hash ids are equal blocks of token ids."""
    rows = traces.parse((DATA / "mooncake_conversation.jsonl").read_text().splitlines())
    requests = []
    for row in traces.scale(rows, 10**6, limit=count, speed=1 / slower, tokens=SCALE).rows:
        ids: list[int] = []
        for block in row.blocks:
            drawn = random.Random(block)
            ids += [drawn.randrange(2, VOCAB) for _ in range(BLOCK)]
        requests.append(Request(ids[: row.prompt_tokens], row.output_tokens, row.output_tokens + 8, row.at))
    return requests


def offline(requests: Sequence[Request], caches: int) -> float:
    """Hit rate of so many caches without end that get the requests in turn; each request finds all that the
    ones before it have left."""
    seen: list[set[int]] = [set() for _ in range(caches)]
    found = 0
    for number, request in enumerate(requests):
        cache, name, length, hit = seen[number % caches], 0, 0, True
        for start in range(0, len(request.prompt) - BLOCK + 1, BLOCK):
            name = hash((name, *request.prompt[start : start + BLOCK]))
            hit = hit and name in cache
            length += BLOCK * hit
            cache.add(name)
        found += min(length, len(request.prompt) - 1)
    return found / sum(len(request.prompt) for request in requests)


def system_prompts(count: int, rate: float, seed: int) -> list[Request]:
    """Poisson arrivals, each with one of the system prompts and ids of its own."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(2, VOCAB) for _ in range(SYSTEM_TOKENS)] for _ in range(SYSTEM_PROMPTS)]
    at, requests = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        own = [rng.randrange(2, VOCAB) for _ in range(OWN_TOKENS)]
        requests.append(Request(rng.choice(prompts) + own, ANSWER, ANSWER, at))
    return requests


def burst(count: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    shared = [rng.randrange(2, VOCAB) for _ in range(SYSTEM_TOKENS)]
    return [
        Request(shared + [rng.randrange(2, VOCAB) for _ in range(OWN_TOKENS)], ANSWER, ANSWER)
        for _ in range(count)
    ]


def serve(policy: str, requests: Sequence[Request], instances: int, blocks: int, seed: int) -> FleetOutcome:
    """The requests on instances of so many blocks each."""
    size = Size(slots=64, blocks=blocks)
    fresh = [Request(r.prompt, r.output, r.limit, r.at) for r in requests]
    return SimulatedFleet(instances, POLICIES[policy](), size, seed).run(fresh)


def row(load: str, policy: str, o: FleetOutcome) -> list[Any]:
    busy = sum(each.busy_s for each in o.loads) / len(o.loads) / o.wall_s
    return [
        load, policy, 100 * o.hit_rate, o.mean_ttft, o.percentile(0.5), o.percentile(0.99), o.imbalance,
        100 * busy,
    ]  # fmt: skip


def draw(results: dict[str, dict[str, FleetOutcome]]) -> Any:
    made, panes = figure(5.0, 4.0, columns=len(results))
    for pane, (load, outcomes) in zip(panes, results.items(), strict=False):
        for index, (policy, outcome) in enumerate(outcomes.items()):
            ttft = outcome.ttft
            pane.plot(
                ttft,
                [100 * n / len(ttft) for n in range(1, len(ttft) + 1)],
                color=COLOURS[index],
                label=policy,
            )
        pane.set_title(load)
        pane.set_xlabel("time to first token, s")
        pane.set_ylabel("% of requests")
        pane.legend(frameon=False)
    return made


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--requests", type=int, default=1500, help="first rows of the trace")
    parser.add_argument("--slower", type=float, default=1.5, help="factor on the trace's arrival times")
    parser.add_argument("--poisson", type=int, default=600, help="requests with system prompts")
    parser.add_argument("--burst", type=int, default=24, help="requests of the burst")
    parser.add_argument("--instances", type=int, default=2)
    args: argparse.Namespace = parser.parse_args()
    command = announce(args, MODULE)
    instances, seed = args.instances, args.seed
    trace = mooncake(args.requests, args.slower)
    ideal, in_turn = offline(trace, 1), offline(trace, instances)
    # All but a few system prompts fit, running sequences included.
    blocks = SYSTEM_PROMPTS * SYSTEM_TOKENS // BLOCK // instances + 250
    # What round-robin serves of them when they are all there from the beginning.
    full = serve("round-robin", system_prompts(args.poisson, 1e6, seed), instances, blocks, seed)
    capacity = args.poisson / full.wall_s
    poisson = system_prompts(args.poisson, LOAD * capacity, seed)
    loads: dict[str, tuple[Sequence[Request], int]] = {
        "trace": (trace, 80_000),
        "system prompts": (poisson, blocks),
        "burst": (burst(args.burst, seed), 80_000),
    }
    results: dict[str, dict[str, FleetOutcome]] = {load: {} for load in loads}
    for load, policy in track([(a, b) for a in loads for b in POLICIES], "simulate", transient=True):
        results[load][policy] = serve(policy, *loads[load][:1], instances, loads[load][1], seed)
    of_trace, of_prompts, of_burst = (results[load] for load in loads)
    hit, other = of_trace["ttft"].hit_rate, of_trace["round-robin"].hit_rate
    faster = of_prompts["round-robin"].mean_ttft / of_prompts["ttft"].mean_ttft
    least = min(outcome.mean_ttft for outcome in of_burst.values())
    verdicts = {
        f"trace: {100 * hit:.1f} % found cached, ideal {100 * ideal:.1f} %, promised within "
        f"{100 * POINTS:.0f} points": hit >= ideal - POINTS,
        f"trace: round-robin finds {100 * other:.1f} %, offline {100 * in_turn:.1f} %": abs(other - in_turn)
        < 0.01,
        f"trace: busiest instance {of_trace['ttft'].imbalance:.2f} times the mean, at most {BALANCE}": (
            of_trace["ttft"].imbalance <= BALANCE
        ),
        f"system prompts: mean TTFT {faster:.1f} times better than round-robin, promised {FASTER:.0f}": (
            faster >= FASTER
        ),
        f"burst: mean TTFT {of_burst['ttft'].mean_ttft:.2f} s, best {least:.2f} s": (
            of_burst["ttft"].mean_ttft <= 1.1 * least
        ),
    }
    report = Report(
        "placement",
        f"{instances} simulated instances; {args.requests} requests of the trace; {SYSTEM_PROMPTS} prompts",
        command,
        seed,
        COLUMNS,
        [row(load, policy, o) for load, outcomes in results.items() for policy, o in outcomes.items()],
        {
            "ideal_hit_rate": ideal,
            "round_robin_offline": in_turn,
            "blocks": blocks,
            "round_robin_serves_a_second": capacity,
            "requests_by_instance": {
                f"{load} {policy}": [each.requests for each in o.loads]
                for load, outcomes in results.items()
                for policy, o in outcomes.items()
            },
        },
        verdicts,
    )
    return report.publish(args.out, draw(results))


if __name__ == "__main__":
    raise SystemExit(main())
