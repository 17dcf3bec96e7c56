"""What the benchmark scripts share: options, a mesh of their own, what is on the wire, tables and files."""

import argparse
import asyncio
import json
import os
import platform
import shlex
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.bench.client import Target
from deploy.bench.plots import COLOURS, figure, save
from deploy.rundir import RunDir
from deploy.tap import connect
from shared.bus.port import BusDown
from shared.subjects import DONE, STEP
from tests.bench.books import Books
from tests.support.mesh import Mesh

DATA = Path(__file__).parents[1] / "data"
MODEL = "smollm2-135m-instruct"

PATIENT = ("--set", "gateway.queue_timeout_s=3600", "--set", "gateway.request_timeout_s=3600")
"""For meshes that get all their requests at once: nobody is sent away for waiting."""


def options(text: str, module: str) -> argparse.ArgumentParser:
    """A parser with what every script takes; `module` is its own, for `python -m`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="prompts, samples and order follow from it")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("docs/benchmarks"),
        help="folder of the JSON and PNG; the default holds the committed ones, which are replaced",
    )
    return parser


def announce(args: argparse.Namespace, module: str) -> str:
    """Print and return the command that repeats this run."""
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    print(f"{command}\nseed {args.seed}, {machine()}", flush=True)
    return command


def machine() -> str:
    python = platform.python_version()
    return f"{os.cpu_count()} CPUs, {platform.machine()}, {platform.system()}, Python {python}"


@dataclass
class Report:
    """One experiment's outcome: printed as a table, kept as NAME.json and NAME.png."""

    name: str
    title: str
    command: str
    seed: int
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    details: dict[str, Any]
    verdicts: dict[str, bool]
    """What was promised, in words with its figures → whether it holds."""

    def publish(self, folder: Path, figure: Any) -> int:
        """Print, write both files, and return the exit status: 1 if a promise does not hold."""
        table = Table(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in self.rows:
            table.add_row(*(_text(cell) for cell in row))
        Console(width=None if sys.stdout.isatty() else 180, markup=False).print(table)
        for words, holds in self.verdicts.items():
            print(f"{'ok  ' if holds else 'MISS'} {words}")
        body = {
            "name": self.name,
            "title": self.title,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "command": self.command,
            "seed": self.seed,
            "columns": list(self.columns),
            "rows": [list(row) for row in self.rows],
            "verdicts": self.verdicts,
            "details": self.details,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(body, indent=1) + "\n")
        save(figure, folder / f"{self.name}.png")
        print(f"written: {folder / self.name}.json and .png")
        return 0 if all(self.verdicts.values()) else 1


def _text(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return str(cell)


@contextmanager
def mesh(*flags: str) -> Iterator[tuple[Mesh, Target]]:
    """A mesh in a temporary folder, and how to reach it; nothing of it is left afterwards."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="hortator-bench-") as folder:
        print(f"hortator up {shlex.join(flags)} …", flush=True)
        with Mesh.start(Path(folder), *flags) as running:
            yield running, Target("hortator", running.base_url, MODEL)


@asynccontextmanager
async def watching(running: Mesh, books: Books) -> AsyncIterator[None]:
    """Keep `books` from the mesh's own step frames and results (of one instance) while the block runs."""
    desk = await connect(RunDir(running.run_dir))
    listening = asyncio.Event()

    async def listen() -> None:
        try:
            # One subscription for both subjects keeps their order.
            async for _, subject, payload in desk.frames("hortator.v1.*.*"):
                if subject.startswith("hortator.v1.step."):
                    books.on_step(STEP.codec.decode(payload))
                elif subject.startswith("hortator.v1.done."):
                    books.on_done(DONE.codec.decode(payload))
                else:
                    listening.set()
        except BusDown:
            return

    task = asyncio.create_task(listen())
    try:
        async with asyncio.timeout(10):
            await listening.wait()  # the beacon comes every half second
        yield
        await asyncio.sleep(0.6)  # what was sent last arrives within a beacon's time
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await desk.close()


def block_tokens(running: Mesh) -> int:
    """Tokens per KV block: what the instance announced in its beat."""

    async def ask() -> int:
        from shared.subjects import RESYNC
        from shared.wire import Beat

        desk = await connect(RunDir(running.run_dir))
        try:
            async for _, _, payload in desk.frames("hortator.v1.resync.*"):
                message = RESYNC.codec.decode(payload)
                if isinstance(message, Beat):
                    return message.info.block_tokens
        finally:
            await desk.close()
        raise BusDown("the mesh ended")

    return asyncio.run(ask())


def draw_rounds(seconds: dict[str, list[float]], rounds: str) -> Any:
    """Times to first token of each round, by what was measured; `rounds` says what differs between them."""
    made, axes = figure()
    for colour, (name, values) in zip(COLOURS, seconds.items()):
        label = f"{name}, median {median(values) * 1e3:.0f} ms"
        axes.plot(range(1, len(values) + 1), [v * 1e3 for v in values], "o-", color=colour, label=label)
    axes.set_yscale("log")
    axes.set_xticks(list(range(1, len(next(iter(seconds.values()))) + 1)))
    axes.set_xlabel(f"round, each with {rounds}")
    axes.set_ylabel("time to first token, ms")
    axes.legend(frameon=False)
    return made
