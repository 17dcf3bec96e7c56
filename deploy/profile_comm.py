"""`hortator profile comm`: what the messages of a tensor-parallel group cost here, and which way they go."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from deploy.processes import die_with_parent

MODULE = "services.worker.group.profile"


class CannotMeasure(RuntimeError):
    """The group could not be measured; the reason was printed."""


def measure(folder: Path, options: list[str]) -> dict[str, Any]:
    """The report of `services.worker.group.profile`, which runs in processes of its own."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", MODULE, str(folder), *options],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=die_with_parent(os.getpid()),
    )
    if done.returncode:
        raise CannotMeasure(f"the group could not be measured (exit status {done.returncode})")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def print_tables(report: dict[str, Any]) -> None:
    """Times by size, what goes by which algorithm, and how steps are cut."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    detail, communication = report["detail"], report["communication"]
    console.print(
        f"{detail['tp']} ranks ({detail['ranks']}), {detail['choice']}; {detail['split']}", highlight=False
    )
    times = by_algorithm(communication)
    table = Table(title="One sum over all ranks, µs (median); * what messages of this size go by")
    table.add_column("bytes", justify="right")
    for name in times:
        table.add_column(name, justify="right")
    for size in sorted({size for points in times.values() for size, _ in points}):
        cells = []
        for name, points in times.items():
            found = dict(points).get(size)
            mark = " *" if chosen(communication, size) == name else "  "
            cells.append("" if found is None else f"{found * 1e6:.1f}{mark}")
        table.add_row(f"{size:,}", *cells)
    console.print(table)
    for name, fit in communication.get("fits", {}).items():
        console.print(f"{name}: {describe_fit(fit)}", highlight=False)
    steps = Table(title="Steps: how tokens are cut, what a layer's two sums go by, what is expected")
    for heading in ("step", "chunks", "bytes", "by"):
        steps.add_column(heading, justify="left" if heading in ("step", "by") else "right")
    for heading in ("compute", "messages alone", "exposed"):
        steps.add_column(f"{heading}, µs a layer", justify="right")
    for row in report["steps"]:
        steps.add_row(
            row["step"],
            str(row["chunks"]),
            f"{row['message_bytes']:,}",
            ", ".join(row["algorithms"]),
            *(f"{row[f'layer_{what}_s'] * 1e6:.0f}" for what in ("compute", "communication", "exposed")),
        )
    console.print(steps)


def by_algorithm(communication: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Algorithm → (bytes, seconds) measured, ascending."""
    times: dict[str, list[tuple[int, float]]] = {}
    for timing in communication.get("timings", ()):
        times.setdefault(timing["algorithm"], []).append((timing["bytes"], timing["seconds"]))
    return {name: sorted(points) for name, points in times.items()}


def chosen(communication: dict[str, Any], size: int) -> str:
    """What messages of `size` bytes go by."""
    entries = communication["entries"]
    return next(entry["algorithm"] for entry in entries if size <= entry["up_to_bytes"])


def describe_fit(fit: dict[str, Any]) -> str:
    """Latency and bandwidth in words."""
    parts = [_line(fit["small"])]
    if fit["knee"] is not None:
        parts.append(f"beyond {fit['knee']:,} bytes {_line(fit['large'])}")
    return f"{'; '.join(parts)} (off by {fit['error']:.0%} on average)"


def _line(line: dict[str, Any]) -> str:
    rate = f"{1e-9 / line['s_per_byte']:.2f} GB/s" if line["s_per_byte"] else "any size alike"
    return f"{line['latency_s'] * 1e6:.1f} µs + {rate}"


def draw(report: dict[str, Any], path: Path) -> None:
    """Measured times, fitted lines and crossovers, into a PNG file."""
    from deploy.bench.plots import COLOURS, figure, save

    communication = report["communication"]
    made, axes = figure(9, 5)
    for number, (name, points) in enumerate(by_algorithm(communication).items()):
        colour = COLOURS[number % len(COLOURS)]
        sizes = [size for size, _ in points]
        axes.plot(sizes, [seconds * 1e6 for _, seconds in points], "o", color=colour, label=name, ms=4)
        fit = communication["fits"][name]
        axes.plot(sizes, [fitted(fit, size) * 1e6 for size in sizes], "-", color=colour, lw=1)
    for entry, behind in zip(communication["entries"], communication["entries"][1:]):
        axes.axvline(entry["up_to_bytes"], color="k", ls=":", lw=1)
        axes.annotate(
            f"{entry['algorithm']} | {behind['algorithm']}",
            (entry["up_to_bytes"], axes.get_ylim()[0]),
            rotation=90,
            va="bottom",
            ha="right",
            fontsize=7,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("µs a sum")
    axes.set_title(f"{report['detail']['tp']} ranks: measured (dots), fitted (lines), crossovers (dotted)")
    axes.legend(frameon=False)
    save(made, path)


def fitted(fit: dict[str, Any], size: int) -> float:
    """Seconds by the fit."""

    def line(of: dict[str, Any], at: int) -> float:
        return float(of["latency_s"] + of["s_per_byte"] * at)

    if fit["knee"] is None or size <= fit["knee"]:
        return line(fit["small"], size)
    return max(line(fit["large"], size), line(fit["small"], fit["knee"]))
