"""`hortator profile`: where the time of engine steps and of a group's messages goes on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from deploy import plan_machine, profile_comm
from shared.model import ModelError, resolve

app = typer.Typer(help="Measure where the time goes.", no_args_is_help=True, add_completion=False)

MODULE = "services.worker.engine.profile"

_BUSY = 1.15
"""Work that outdoes the best rate by more was measured at another speed of the machine."""


@app.callback()
def _several() -> None:
    """Measure where the time goes."""


@app.command()
def engine(
    model: Annotated[
        str, typer.Option(help="A name (smol), a Hugging Face folder, or a .gguf file.")
    ] = "smollm2-135m-instruct",
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "int8", "int8-dynamic"],
        typer.Option(help="Weights in memory, as `hortator up --dtype`."),
    ] = "float16",
    kv_dtype: Annotated[
        Literal["auto", "float32", "float16"], typer.Option(help="KV cache, as `hortator up --kv-dtype`.")
    ] = "auto",
    kv_memory: Annotated[str, typer.Option(help="Memory for KV.")] = "1GiB",
    threads: Annotated[int, typer.Option(min=0, help="Compute threads; 0: as the engine chooses.")] = 0,
    kernels: Annotated[
        Literal["auto", "native", "torch"], typer.Option(help="Which kernels; auto: as the engine chooses.")
    ] = "auto",
    deterministic: Annotated[bool, typer.Option("--deterministic", help="As `hortator up` has it.")] = False,
    temperature: Annotated[float, typer.Option(min=0, help="Of the rows that are sampled; 0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Of the rows that are sampled.")] = 1.0,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time for each kind of step.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the shares into this PNG file.")] = None,
) -> None:
    """Run steady steps of the engine, as a worker runs them, and print what each kind of work takes.

    Measure on an idle machine: the figures are those of this moment.
    """
    if plot is not None and not plot.parent.is_dir():
        _fail(f"--plot {plot}: there is no folder {plot.parent}")
    try:
        folder = resolve(model).path
    except ModelError as error:
        _fail(str(error))
    given = {
        "dtype": dtype,
        "kv-dtype": "" if kv_dtype == "auto" else kv_dtype,
        "kv-memory": kv_memory,
        "threads": threads,
        "kernels": kernels,
        "temperature": temperature,
        "top-p": top_p,
        "seconds": seconds,
    }
    options = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    options += ["--deterministic"] if deterministic else []
    # The engine lives in the worker, and only there is torch: it runs in a process of its own.
    done = subprocess.run(
        [sys.executable, "-P", "-m", MODULE, str(folder), *options],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        _fail(f"the engine could not be measured (exit status {done.returncode}); the reason stands above")
    report = json.loads(done.stdout)
    if int(report["detail"]["threads"]) == len(os.sched_getaffinity(0)):
        plan_machine.remember(report["peaks"])
    report["detail"]["candidates"] = json.loads(report["detail"].get("candidates", "[]"))
    if plot is not None:
        draw(report, plot)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        _print_tables(report)


@app.command()
def comm(
    model: Annotated[
        str, typer.Option(help="A name (smol), a Hugging Face folder, or a .gguf file.")
    ] = "smollm2-135m-instruct",
    tp: Annotated[int, typer.Option(min=2, max=64, help="Ranks of the group.")] = 2,
    dtype: Annotated[
        Literal["float32", "float16", "int8", "int8-dynamic"],
        typer.Option(help="Weights in memory, as `hortator up --dtype`."),
    ] = "float16",
    threads: Annotated[int, typer.Option(min=0, help="Compute threads of a rank; 0: its share.")] = 0,
    cores: Annotated[str, typer.Option(help="Cores of the group, e.g. 0-3: ranks are pinned to them.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw times, fits and crossovers into this PNG.")] = None,
) -> None:
    """Form a group of ranks on this machine and print what sums over them cost: each algorithm at each size,
    which one messages of which size go by, and how steps of the model are cut into chunks.

    Measure on an idle machine: the figures are those of this moment.
    """
    if plot is not None and not plot.parent.is_dir():
        _fail(f"--plot {plot}: there is no folder {plot.parent}")
    try:
        folder = resolve(model).path
    except ModelError as error:
        _fail(str(error))
    options = ["--tp", str(tp), "--dtype", dtype, "--threads", str(threads), "--cores", cores]
    try:
        report = profile_comm.measure(folder, options)
    except profile_comm.CannotMeasure as error:
        _fail(f"{error}; the reason stands above")
    if plot is not None:
        profile_comm.draw(report, plot)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        profile_comm.print_tables(report)


def _fail(reason: str) -> NoReturn:
    print(f"hortator profile: {reason}", file=sys.stderr)
    raise typer.Exit(1)


def _print_tables(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    peaks, detail = report["peaks"], report["detail"]
    console.print(
        f"{report['model']}  {detail['dtype']}, KV {detail['kv_dtype']}, {detail['kernels']} kernels, "
        f"{detail['threads']} thread(s)",
        highlight=False,
    )
    console.print(
        f"this process at best: {peaks['matmul_gf_s']:.1f} GF/s in a float32 product, "
        f"{peaks['read_gb_s']:.1f} GB/s read from memory",
        highlight=False,
    )
    for profile in report["profiles"]:
        table = Table(
            title=f"{profile['workload']}, context {profile['context']}: "
            f"{profile['step_s'] * 1e3:.2f} ms a step (mean of {profile['steps']})",
            title_justify="left",
        )
        table.add_column("work")
        for heading in ("ms", "share", "GF/s", "of best", "GB/s", "of best"):
            table.add_column(heading, justify="right")
        for op in profile["ops"]:
            rates = [
                text
                for field, peak in (("gf_s", peaks["matmul_gf_s"]), ("gb_s", peaks["read_gb_s"]))
                for text in _rate(op[field], peak)
            ]
            table.add_row(op["name"], f"{op['seconds'] * 1e3:.3f}", f"{op['share']:.1%}", *rates)
        console.print(table)
    console.print(
        "share: of the step. of best: of the two rates above; int8-dynamic multiplies integers, but is held "
        "against the float32 product all the same. unaccounted: what no clock inside the step saw.",
        highlight=False,
    )
    beyond = max(
        (op["gf_s"] / peaks["matmul_gf_s"] for p in report["profiles"] for op in p["ops"] if op["gf_s"]),
        default=0.0,
    )
    if beyond > _BUSY and detail["dtype"] != "int8-dynamic":
        console.print("Rates beyond the best: the machine was busy with something else; measure again.")


def _rate(value: float | None, peak: float) -> tuple[str, str]:
    return ("", "") if value is None else (f"{value:.1f}", f"{value / peak:.0%}")


def draw(report: dict[str, Any], path: Path) -> None:
    """Shares of each kind of work, one bar per workload, into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    profiles = report["profiles"]
    names = [op["name"] for op in profiles[0]["ops"]]
    colours = pyplot.get_cmap("tab20")
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.7 * len(profiles)), layout="constrained")
    labels = [f"{p['workload']}\n{p['step_s'] * 1e3:.1f} ms" for p in profiles]
    left = [0.0] * len(profiles)
    for number, name in enumerate(names):
        widths = [100 * p["ops"][number]["share"] for p in profiles]
        axes.barh(labels, widths, left=left, label=name, color=colours(number % 20))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("% of the step")
    axes.legend(ncols=5, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
