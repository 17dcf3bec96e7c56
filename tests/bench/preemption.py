"""Preemption policies on real traces under memory pressure, in the simulator and on the real mesh.

The scheduler's own core plans for a simulated instance whose KV memory is smaller than what arrives needs.
Compared are today's common way (admit what fits, send back whoever came last), the same admission with other
victims, and this scheduler's admission with either rule, without and with a second tier. In one of the loads
a request in ten is urgent.

Mooncake's conversation trace is scaled: prompts (and the prefix blocks they share) to a 32nd, outputs to a
half, because at full length prompts are forty times the outputs, and sequences hardly grow once admitted.
Azure's conversation trace keeps its own proportions. Arrivals come faster by the factors shown.
"""

import argparse
import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

from rich.progress import track

from deploy.bench import traces
from deploy.bench.client import Target, stream_completion
from deploy.bench.plots import COLOURS, figure
from deploy.bench.records import Record
from deploy.bench.workload import Shape
from services.scheduler.admission import ExpectedOutput, Reservation, ReserveNothing
from services.scheduler.policy import ContinuousPolicy
from services.scheduler.preempt import LastCome, LeastHarm, Preemption
from tests.bench.common import DATA, PATIENT, Report, announce, mesh, options
from tests.bench.simulated import SimulatedMesh
from tests.bench.simulation import VOCAB, Request, SimulatedTier, Size, StepCost

MODULE = "tests.bench.preemption"
CONTEXT = 16_384
LIMIT = 1100
"""max_tokens of every request: above each output, and no forecast of any."""
SLOTS = 64
BLOCKS = {"mooncake": 1000, "azure": 1500}
COST = StepCost(fixed_s=0.008, per_decode_s=0.0001, per_token_s=0.00012)
"""Seconds of a device that reads a prompt token in 0.12 ms and needs 8 ms for a step."""
FETCH_FIXED_S, FETCH_BLOCK_S = 0.002, 0.0003
URGENT = -10
"""Priority of the urgent: 300 s of waiting make up for it."""
TAX, TTFT = 1 / 3, 1.1
FORMS = (("mooncake", 2.5, 0.0), ("mooncake", 4.0, 0.0), ("mooncake", 4.0, 0.1), ("azure", 2.0, 0.0))


@dataclass(frozen=True)
class Way:
    name: str
    reservation: Callable[[], Reservation]
    preemption: Callable[[], Preemption]
    tier: bool


WAYS = (
    Way("what fits, last come", ReserveNothing, LastCome, False),
    Way("what fits, least harm", ReserveNothing, LeastHarm, False),
    Way("expected, last come", ExpectedOutput, LastCome, False),
    Way("expected, least harm", ExpectedOutput, LeastHarm, False),
    Way("what fits, last come, tier", ReserveNothing, LastCome, True),
    Way("expected, least harm, tier", ExpectedOutput, LeastHarm, True),
)
TODAY, ALONE, OURS = WAYS[0], WAYS[3], WAYS[5]


@dataclass(frozen=True)
class Load:
    """Part of a trace, and how it is scaled."""

    trace: str
    speed: float
    count: int
    seed: int
    urgent: float = 0.0
    """Share of the requests that is."""

    @property
    def name(self) -> str:
        return f"{self.trace} ×{self.speed:g}" + (", urgent" if self.urgent else "")

    def requests(self) -> list[Request]:
        """The same ones for each way. The seed draws where in the trace they begin, and their ids."""
        mooncake = self.trace == "mooncake"
        file = "mooncake_conversation.jsonl" if mooncake else "azure_conv_2023.csv"
        rows = traces.parse((DATA / file).read_text().splitlines())
        rng = random.Random(self.seed)
        begin = rng.randrange(max(1, len(rows) - self.count))
        chosen = rows[begin : begin + self.count]
        scaled = traces.scale(chosen, CONTEXT, speed=self.speed, tokens=1 / 32 if mooncake else 1.0)
        made = []
        for job, row in zip(traces.jobs(scaled, Shape(id_low=2, id_high=VOCAB), str(self.seed)), chosen):
            output = max(1, row.output_tokens // 2) if mooncake else row.output_tokens
            priority = URGENT if rng.random() < self.urgent else 0
            assert isinstance(job.prompt, list)
            made.append(Request(job.prompt, min(output, LIMIT - 1), LIMIT, job.at, priority))
        return made


@dataclass(frozen=True)
class Outcome:
    load: str
    way: str
    tax: float
    """Tokens computed again, over all tokens computed."""
    preemptions: int
    tokens_s: float
    ttft_s: float
    wait_p99_s: float
    """In the queue, the time after preemptions included."""
    wait_most_s: float
    most_preempted: int
    """Times that the one preempted most was."""
    urgent_ttft: float | None
    """Time to the first token of the urgent, over what it is made of: the steps in flight when they came, and
    their own prompts; 95th percentile."""

    def row(self) -> list[Any]:
        return [
            self.load, self.way, 100 * self.tax, self.preemptions, self.most_preempted, self.tokens_s,
            self.ttft_s, self.wait_p99_s, self.wait_most_s,
            "–" if self.urgent_ttft is None else self.urgent_ttft,
        ]  # fmt: skip


COLUMNS = (
    "load",
    "admission, victims",
    "again %",
    "preempted",
    "one, most",
    "tok/s",
    "TTFT s",
    "wait p99 s",
    "most s",
    "urgent TTFT ÷ due",
)


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def simulate(load: Load, way: Way) -> Outcome:
    requests = load.requests()
    blocks = BLOCKS[load.trace]
    tier = SimulatedTier(8 * blocks, FETCH_FIXED_S, FETCH_BLOCK_S) if way.tier else None
    size = Size(slots=SLOTS, blocks=blocks, max_len=CONTEXT, max_step_tokens=4096)
    simulated = SimulatedMesh(
        ContinuousPolicy(), way.reservation(), size, load.seed, COST, way.preemption(), tier
    )
    simulated.run(requests)
    counters = simulated.core.counters
    urgent = [overdue(simulated, request) for request in requests if request.priority == URGENT]
    return Outcome(
        load.name,
        way.name,
        counters.recomputed_tokens / counters.computed_tokens,
        counters.preemptions,
        pace(requests),
        sum((request.first or 0.0) - request.at for request in requests) / len(requests),
        quantile([request.waited_s for request in requests], 0.99),
        max(request.waited_s for request in requests),
        max(request.preemptions for request in requests),
        quantile(urgent, 0.95) if urgent else None,
    )


def pace(requests: Sequence[Request]) -> float:
    """Tokens a second until nine tenths of all had come; after that a few long outputs run on alone."""
    ended = sorted(requests, key=lambda request: request.last or 0.0)
    wanted, had = 0.9 * sum(request.tokens for request in requests), 0
    for request in ended:
        had += request.tokens
        if had >= wanted:
            return had / ((request.last or 0.0) - min(other.at for other in requests))
    raise ValueError("no requests")


def overdue(simulated: SimulatedMesh, request: Request) -> float:
    """Its time to the first token over the least that it can be: until the steps in flight when it came have
    ended, its fetch, and from the beginning of the step that admitted it to its first token."""
    first = request.first or 0.0
    ahead_s = max(0.0, simulated.step_ends.get(request.ahead, 0.0) - request.at)
    began = max(simulated.step_ends.get(request.admitted - 1, 0.0), request.at)
    return (first - request.at) / max(ahead_s + request.fetch_s + first - began, 1e-9)


def mean(outcomes: Sequence[Outcome]) -> Outcome:
    """Of the same load and way with several seeds; the worst of what is a worst case."""
    count = len(outcomes)
    ratios = [o.urgent_ttft for o in outcomes if o.urgent_ttft is not None]
    return replace(
        outcomes[0],
        tax=sum(o.tax for o in outcomes) / count,
        preemptions=round(sum(o.preemptions for o in outcomes) / count),
        tokens_s=sum(o.tokens_s for o in outcomes) / count,
        ttft_s=sum(o.ttft_s for o in outcomes) / count,
        wait_p99_s=max(o.wait_p99_s for o in outcomes),
        wait_most_s=max(o.wait_most_s for o in outcomes),
        most_preempted=max(o.most_preempted for o in outcomes),
        urgent_ttft=max(ratios) if ratios else None,
    )


# The real mesh


REAL_WAYS = (("nothing", "last-come"), ("expected", "last-come"), ("expected", "least-harm"))


async def drive(target: Target, requests: list[Request]) -> list[Record]:
    """Send them at their times; every output has exactly the length wanted."""
    began = perf_counter()

    async def one(request: Request) -> Record:
        await asyncio.sleep(max(0.0, request.at - (perf_counter() - began)))
        record = Record(request.at, len(request.prompt), request.output)
        more = {"priority": request.priority}
        await stream_completion(target, request.prompt, record, began, True, 3600.0, more=more)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request)) for request in requests]
    return [task.result() for task in tasks]


def measure(load: Load, reservation: str, preemption: str, kv_memory: str) -> Outcome:
    """The trace on the real mesh. Clients ask for the output they get, so what is expected is the truth."""
    requests = [replace(request, limit=request.output) for request in load.requests()]
    flags = ("--kv-memory", kv_memory, "--max-slots", str(SLOTS), *PATIENT)
    rules = ("--set", f"scheduler.reservation={reservation}", "--set", f"scheduler.preemption={preemption}")
    with mesh(*flags, *rules) as (running, target):
        records = asyncio.run(drive(target, requests))
        counted = {
            name: running.metric("scheduler", f"hortator_scheduler_{name}_total")
            for name in ("recomputed_tokens", "computed_tokens", "preemptions")
        }
    if errors := [record.error for record in records if record.error]:
        raise SystemExit(f"{len(errors)} of {len(records)} requests failed, the first: {errors[0]}")
    waits = [record.ttft for record in records]
    return Outcome(
        f"real, {load.name}",
        f"{reservation}, {preemption}",
        counted["recomputed_tokens"] / counted["computed_tokens"],
        int(counted["preemptions"]),
        pace([replace(q, tokens=r.tokens, last=r.last) for q, r in zip(requests, records, strict=True)]),
        sum(waits) / len(waits),
        quantile(waits, 0.99),
        max(waits),
        0,
        None,
    )


def draw(outcomes: list[Outcome]) -> Any:
    made, panes = figure(6.0, 4.2, columns=3)
    loads = list(dict.fromkeys(o.load for o in outcomes))
    ways = list(dict.fromkeys(o.way for o in outcomes if not o.load.startswith("real")))
    by = {(o.load, o.way): o for o in outcomes}
    shown = [load for load in loads if not load.startswith("real")]
    for pane, (title, unit, read) in zip(
        panes,
        (
            ("tokens computed again", "%", lambda o: 100 * o.tax),
            ("throughput", "tokens/s", lambda o: o.tokens_s),
            ("time in the queue, 99th percentile", "s", lambda o: o.wait_p99_s),
        ),
        strict=True,
    ):
        width = 0.8 / len(ways)
        for index, way in enumerate(ways):
            at = [place + index * width for place in range(len(shown))]
            pane.bar(at, [read(by[load, way]) for load in shown], width, color=COLOURS[index], label=way)
        pane.set_xticks(
            [place + 0.4 - width / 2 for place in range(len(shown))], shown, fontsize=7, rotation=20
        )
        pane.set_title(title)
        pane.set_ylabel(unit)
    panes[0].legend(frameon=False, fontsize=8)
    return made


def judge(outcomes: list[Outcome]) -> dict[str, bool]:
    verdicts: dict[str, bool] = {}
    by = {(o.load, o.way): o for o in outcomes}
    for load in dict.fromkeys(o.load for o in outcomes if not o.load.startswith("real")):
        today, ours = by[load, TODAY.name], by[load, OURS.name]
        if today.tax > 0.01:
            share = ours.tax / today.tax
            without = by[load, ALONE.name].tax / today.tax
            print(f"{load}: without a second tier {without:.2f} of what is computed again there")
            verdicts[f"{load}: recomputes {share:.2f} of what {TODAY.name} does, promised {TAX:.2f}"] = (
                share <= TAX
            )
        gain = ours.tokens_s / today.tokens_s
        verdicts[f"{load}: {gain:.3f} times its throughput, promised more"] = gain > 1.0
        wait = ours.wait_p99_s / today.wait_p99_s
        verdicts[f"{load}: 99th percentile of waiting {wait:.2f} times its, promised no more"] = wait <= 1.0
        if ours.urgent_ttft is not None:
            words = f"{load}: TTFT of the urgent {ours.urgent_ttft:.2f} times steps in flight and own prompt"
            verdicts[f"{words}, promised {TTFT}"] = ours.urgent_ttft <= TTFT
    return verdicts


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--requests", type=int, default=500, help="rows of the trace")
    parser.add_argument("--loads", type=int, nargs="*", default=range(len(FORMS)), help="which of them")
    parser.add_argument("--seeds", type=int, default=3, help="parts of the trace for each load")
    parser.add_argument(
        "--real", type=int, default=0, help="so many requests on the real mesh, besides; minutes"
    )
    parser.add_argument("--kv-memory", default="48MiB", help="of the real mesh's instance")
    args: argparse.Namespace = parser.parse_args()
    command = announce(args, MODULE)
    plan = [
        [Load(trace, speed, args.requests, args.seed + n, urgent) for n in range(args.seeds)]
        for trace, speed, urgent in (FORMS[n] for n in args.loads)
    ]
    runs = [(loads, way) for loads in plan for way in WAYS]
    outcomes = [
        mean([simulate(load, way) for load in loads])
        for loads, way in track(runs, description="simulate", transient=True)
    ]
    if args.real:
        load = Load("mooncake", 0.5, args.real, args.seed)
        outcomes += [measure(load, *rules, args.kv_memory) for rules in REAL_WAYS]
    report = Report(
        "preemption",
        f"KV of {BLOCKS['mooncake']} blocks (Mooncake) and {BLOCKS['azure']} (Azure) simulated; mean of "
        f"{args.seeds} parts of the trace, of waiting and preemptions of one the worst",
        command,
        args.seed,
        COLUMNS,
        [o.row() for o in outcomes],
        {"figures": [asdict(o) for o in outcomes]},
        judge(outcomes),
    )
    return report.publish(args.out, draw(outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
