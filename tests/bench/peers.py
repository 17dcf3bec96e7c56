"""Hortator beside other servers on this machine: closed loops take turns, every server alone when measured.

A server is `NAME MODEL PORT COMMAND…` in one argument. With `--server` it is started for each of its turns
and stopped after; with `--paused` (for those that take minutes to start) it is started once and stopped by
signal (SIGSTOP) between its turns. MODEL is its name in /v1/models; {port} in COMMAND stands for PORT.
Every round has its own prompts, so that nobody finds those of the round before in a cache. The first server
named is the one the others are compared with:

    python -m tests.bench.peers --server 'hortator smollm2-135m-instruct 8101 hortator up
        --http 127.0.0.1:{port} --run-dir /tmp/peers' --paused 'vllm smol 18000 vllm serve … --port {port}'
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from deploy.bench.client import Target
from deploy.bench.plots import figure, grouped_bars
from deploy.bench.records import summarise
from deploy.bench.runner import Conditions, closed_loop, warm_up
from deploy.bench.workload import Shape, random_jobs
from tests.bench.common import Report, announce, options

MODULE = "tests.bench.peers"
FIGURES = ("tok_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms", "errors")
_START_S = 600.0
_STOP_S = 60.0


@dataclass
class Server:
    """A server's command; a process group of its own while it runs."""

    name: str
    model: str
    port: int
    command: list[str]
    paused: bool
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, text: str, paused: bool) -> "Server":
        name, model, port, *command = shlex.split(text)
        if not command:
            raise argparse.ArgumentTypeError(f"{text!r}: write NAME MODEL PORT COMMAND…")
        if not port.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r}: PORT is {port!r}; write NAME MODEL PORT COMMAND…")
        return cls(name, model, int(port), [word.replace("{port}", port) for word in command], paused)

    @property
    def target(self) -> Target:
        return Target(self.name, f"http://127.0.0.1:{self.port}", self.model)

    @contextmanager
    def turn(self, log: Path) -> Iterator[None]:
        """The server answers inside; nothing of it computes outside."""
        if self.process is None:
            self._start(log)
        else:
            self._signal(signal.SIGCONT)
        try:
            asyncio.run(self._answers(log))
            yield
        finally:
            if self.paused:
                self._signal(signal.SIGSTOP)
            else:
                self.stop()

    def stop(self) -> None:
        """Also of a server that is paused or never ran."""
        if self.process is None:
            return
        self._signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()
        self.process = None

    def _start(self, log: Path) -> None:
        with log.open("ab") as out:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=out, start_new_session=True)

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)

    async def _answers(self, log: Path) -> None:
        """Wait for a request to go through: a port that is open says little."""
        stop = time.monotonic() + _START_S
        while True:
            if self.process is not None and (status := self.process.poll()) is not None:
                raise SystemExit(
                    f"{self.name} ended with status {status}: {shlex.join(self.command)}\n{_tail(log)}"
                )
            try:
                return await warm_up(self.target, Shape(16, 2), Conditions(timeout_s=60.0))
            except Exception as error:
                if time.monotonic() > stop:
                    raise SystemExit(
                        f"{self.name} did not answer within {_START_S:.0f} s: {error}\n{_tail(log)}"
                    ) from None
            await asyncio.sleep(0.5)


def _tail(log: Path) -> str:
    """The last lines that a server printed."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def own_load(server: Server, clients: int, shape: Shape, seed: int) -> dict[str, Any]:
    """One closed loop of `hortator bench`, twice as many requests as clients."""
    jobs = random_jobs(2 * clients, shape, str(seed))
    run = asyncio.run(closed_loop(server.target, jobs, clients, Conditions(), lambda _: None))
    s = summarise(run.records, run.wall_s)
    found = s.output_tok_s, s.ttft_p50_ms, s.gap_p50_ms, s.gap_p99_ms, s.errors
    return dict(zip(FIGURES, found))


def other_load(command: str, server: Server, clients: int, shape: Shape, seed: int) -> dict[str, Any]:
    """The same by another generator, which prints one JSON object with `FIGURES`."""
    words = {
        "port": server.port,
        "model": server.model,
        "clients": clients,
        "seed": seed,
        "prompt": shape.prompt_tokens,
        "output": shape.output_tokens,
    }
    done = subprocess.run(
        [word.format(**words) for word in shlex.split(command)], capture_output=True, text=True, check=True
    )
    line = next(text for text in reversed(done.stdout.splitlines()) if text.startswith("{"))
    return {name: json.loads(line)[name] for name in FIGURES}


def measure(args: argparse.Namespace, servers: list[Server], folder: Path) -> list[dict[str, Any]]:
    """One record for each server, round and number of clients."""
    shape, found = Shape(args.prompt_tokens, args.output_tokens), []
    for number in range(args.rounds):
        for server in servers if number % 2 == 0 else servers[::-1]:
            with server.turn(folder / f"{server.name}.log"):
                for clients in args.clients:
                    seed = 1000 * args.seed + 100 * number + clients
                    load = server, clients, shape, seed
                    figures = other_load(args.load, *load) if args.load else own_load(*load)
                    found.append({"round": number, "server": server.name, "clients": clients, **figures})
                    print(json.dumps(found[-1]), flush=True)
    return found


def compare(
    args: argparse.Namespace, names: list[str], found: list[dict[str, Any]]
) -> tuple[list[tuple[Any, ...]], dict[str, bool]]:
    """Rows of the table, medians over rounds, and whether each promise holds."""

    def of(server: str, clients: int, figure: str) -> list[float]:
        return [r[figure] for r in found if r["server"] == server and r["clients"] == clients]

    rows: list[tuple[Any, ...]] = []
    for clients in args.clients:
        ours = of(names[0], clients, "tok_s")
        for name in names:
            theirs = of(name, clients, "tok_s")
            ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
            each = " ".join(f"{value:.1f}" for value in theirs)
            latencies = (median(of(name, clients, figure)) for figure in FIGURES[1:-1])
            rows.append((clients, name, median(theirs), each, ratio, *latencies))
    verdicts = {}
    for clients, wanted, *against in (text.split(":") for text in args.promise):
        reached = min(r[4] for r in rows if r[0] == int(clients) and r[1] in (against or names[1:]))
        words = f"{clients} clients: {reached:.2f} times {' and '.join(against) or 'the best other'}"
        verdicts[f"{words}, promised {wanted}"] = reached >= float(wanted)
    if args.gap_ms:
        gap = next(r[-1] for r in rows if r[0] == max(args.clients) and r[1] == names[0])
        words = f"{max(args.clients)} clients: gap p99 {gap:.0f} ms, promised {args.gap_ms:.0f}"
        verdicts[words] = gap <= args.gap_ms
    errors = sum(r["errors"] for r in found)
    return rows, verdicts | {f"{errors} errors": errors == 0}


def draw(args: argparse.Namespace, names: list[str], rows: list[tuple[Any, ...]]) -> Any:
    made, (left, right) = figure(6.0, 4.2, columns=2)
    groups = [f"{clients} clients" for clients in args.clients]
    for axes, column, unit in ((left, 2, "output tokens/s"), (right, -1, "gap between tokens, p99, ms")):
        grouped_bars(axes, groups, {n: [r[column] for r in rows if r[1] == n] for n in names}, unit)
    right.set_yscale("log")
    return made


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    server: dict[str, Any] = {"action": "append", "default": [], "metavar": "'NAME MODEL PORT COMMAND…'"}
    parser.add_argument("--server", type=lambda text: Server.parse(text, False), **server)
    parser.add_argument("--paused", type=lambda text: Server.parse(text, True), **server)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3, help="every other one in reverse order")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument(
        "--load", default="", help="another generator, with {port} {model} {clients} {seed} {prompt} {output}"
    )
    parser.add_argument(
        "--promise",
        action="append",
        default=[],
        help="CLIENTS:RATIO[:NAME]: tokens/s of the first over those of NAME, or of the best",
    )
    parser.add_argument("--gap-ms", type=float, default=0.0, help="promised 99th percentile, most clients")
    parser.add_argument("--name", default="peers", help="of the JSON and PNG")
    args = parser.parse_args()
    command = announce(args, MODULE)
    servers: list[Server] = [*args.server, *args.paused]
    if not servers:
        parser.error("name at least one --server")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="hortator-peers-") as folder:
        try:
            found = measure(args, servers, Path(folder))
        finally:
            for each in servers:
                each.stop()
    names = [each.name for each in servers]
    rows, verdicts = compare(args, names, found)
    columns = ("clients", "server", "tokens/s", "rounds", "times", "TTFT p50 ms", "gap p50 ms", "gap p99 ms")
    title = f"{args.prompt_tokens} in, {args.output_tokens} out, {args.rounds} rounds, medians"
    report = Report(args.name, title, command, args.seed, columns, rows, {"rounds": found}, verdicts)
    return report.publish(args.out, draw(args, names, rows))


if __name__ == "__main__":
    raise SystemExit(main())
