"""How many streamed events a second the mesh carries: mock workers, events counted in raw bytes."""

import asyncio
import json
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

import uvloop

from deploy.bench.client import Target
from deploy.bench.plots import figure, grouped_bars
from deploy.bench.workload import Shape, random_jobs
from tests.bench.common import MODEL, Report, announce, mesh, options

MODULE = "tests.bench.flood"
TARGET = 65_000
EVENT, DONE = b"data: {", b"data: [DONE]"


@dataclass(frozen=True)
class Flood:
    """One run. Every request must answer 200, send one event per token and end with [DONE]."""

    streams: int
    requests: int
    bad: int
    events: int
    wall_s: float

    @property
    def events_s(self) -> float:
        return self.events / self.wall_s


class _Counter(asyncio.Protocol):
    """Counts events in raw bytes; one that is cut between two reads is counted once."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.events = 0
        self.whole = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        seen = self._tail + data
        # The tail is one byte shorter than the mark, so nothing in it was counted before.
        self.events += seen.count(EVENT)
        self._tail = seen[-(len(EVENT) - 1) :]
        if not self.whole:
            self.whole = DONE in data[-64:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def flood(target: Target, streams: int, requests: int, prompt: int, output: int, seed: int) -> Flood:
    where = target.at("/v1/completions")
    (job,) = random_jobs(1, Shape(prompt, output), str(seed))
    body = {"model": MODEL, "prompt": job.prompt, "max_tokens": output, "stream": True, "ignore_eos": True}
    payload = json.dumps(body).encode()
    head = f"POST {where.path} HTTP/1.1\r\nHost: {where.host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    request = head.encode() + payload
    loop = asyncio.get_running_loop()
    left, events, bad = requests, 0, 0

    async def client() -> None:
        nonlocal left, events, bad
        while left > 0:
            left -= 1
            transport, counter = await loop.create_connection(
                lambda: _Counter(request), where.host, where.port
            )
            await counter.closed
            transport.close()
            events += counter.events
            bad += not counter.whole or counter.events < output

    began = perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(client())
    return Flood(streams, requests, bad, events, perf_counter() - began)


def draw(results: dict[int, list[Flood]]) -> Any:
    made, axes = figure(6.0)
    groups = [f"{streams} streams" for streams in results]
    grouped_bars(
        axes, groups, {"best run": [max(f.events_s for f in runs) for runs in results.values()]}, "events/s"
    )
    for index, runs in enumerate(results.values()):
        axes.plot([index] * len(runs), [f.events_s for f in runs], "k_", markersize=14)
    axes.axhline(TARGET, color="black", linestyle=":", linewidth=1)
    return made


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--requests", type=int, default=2000, help="per run")
    parser.add_argument("--runs", type=int, default=3, help="per number of streams; they take turns")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=128)
    args = parser.parse_args()
    command = announce(args, MODULE)
    results: dict[int, list[Flood]] = {streams: [] for streams in args.streams}
    shape = (args.prompt_tokens, args.output_tokens, args.seed)
    with mesh("--mock") as (_, target):
        uvloop.run(flood(target, 8, 64, *shape))
        for _ in range(args.runs):
            for streams, runs in results.items():
                runs.append(uvloop.run(flood(target, streams, args.requests, *shape)))
    rows = [
        (
            f"{f.streams} streams, run {n + 1}",
            f.events_s,
            f.requests / f.wall_s,
            f.events / f.requests,
            f.bad,
            f.wall_s,
        )
        for runs in results.values()
        for n, f in enumerate(runs)
    ]
    verdicts = {
        f"{streams} streams: {max(f.events_s for f in runs):.0f} events/s (runs "
        f"{', '.join(f'{f.events_s:.0f}' for f in runs)}), promised {TARGET}": max(f.events_s for f in runs)
        >= TARGET
        for streams, runs in results.items()
    }
    bad = sum(f.bad for runs in results.values() for f in runs)
    verdicts[f"{bad} requests were not whole"] = bad == 0
    report = Report(
        "flood",
        f"mock mesh, {args.prompt_tokens} ids in, {args.output_tokens} tokens out, generator included",
        command,
        args.seed,
        ("run", "events/s", "requests/s", "events a request", "bad", "wall s"),
        rows,
        {},
        verdicts,
    )
    return report.publish(args.out, draw(results))


if __name__ == "__main__":
    raise SystemExit(main())
