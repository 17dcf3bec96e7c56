"""`hortator bench`: measure any OpenAI-compatible server, or several against each other."""

import shlex
import sys
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NoReturn, TypeVar

import typer
import uvloop
from rich.console import Console

from deploy.bench import traces
from deploy.bench.client import RequestFailed, Target, described
from deploy.bench.records import Record
from deploy.bench.results import Result, document, tables, write_json
from deploy.bench.runner import Conditions, OnRecord, Run, closed_loop, open_loop, served_model, warm_up
from deploy.bench.workload import Job, Shape, poisson, random_jobs

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

DEFAULT_TARGET = "hortator=http://127.0.0.1:8000"


@dataclass(frozen=True)
class Setting:
    """One line of the table: how many requests at once, or when, and which jobs in a given round."""

    title: str
    jobs: Callable[[int], list[Job]]
    """Round → jobs: the same for every target, others in each round, so no prefix cache helps."""
    run: Callable[[Target, list[Job], OnRecord], Coroutine[Any, Any, Run]]


@app.command()
def bench(
    target: Annotated[
        list[str],
        typer.Option("--target", "-t", help="[NAME=]URL[,MODEL]; repeat it to compare. Rounds alternate."),
    ] = [DEFAULT_TARGET],  # noqa: B006 - typer reads it once
    concurrency: Annotated[
        str, typer.Option("--concurrency", "-c", help="Closed loop with so many clients each: 1,8,32.")
    ] = "1,8,32",
    rate: Annotated[
        str,
        typer.Option("--rate", help="Open loop instead: Poisson arrivals of so many requests/s each: 0.5,2."),
    ] = "",
    trace: Annotated[
        Path | None, typer.Option(help="Replay arrivals and lengths: Azure CSV or Mooncake JSONL.")
    ] = None,
    requests: Annotated[
        int, typer.Option(min=0, help="Requests per round; 0: twice the concurrency, or 20 s.")
    ] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; targets take turns within each (A B A B).")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of random prompts.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Leading prompt tokens that all requests share.")
    ] = 0,
    scale_tokens: Annotated[
        float, typer.Option(min=0, help="Trace lengths times this; 0: to fit the context.")
    ] = 0.0,
    speed: Annotated[float, typer.Option(min=0.001, help="Trace time runs so many times faster.")] = 1.0,
    limit: Annotated[int, typer.Option(min=0, help="First requests of the trace; 0: all.")] = 0,
    max_context: Annotated[
        int, typer.Option(min=0, help="Context length, where /v1/models does not say it.")
    ] = 0,
    text: Annotated[bool, typer.Option("--text", help="Send words instead of token ids.")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for exactly --output-tokens.")] = True,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Patience with one request.")] = 600.0,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent to every target.")] = "",
    id_low: Annotated[int, typer.Option(min=0, help="Smallest random token id.")] = 1000,
    id_high: Annotated[int, typer.Option(min=1, help="Random token ids are below this.")] = 40000,
    seed: Annotated[int, typer.Option(help="Prompts and arrivals follow from it.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Write every figure and request here.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write PNG plots into this folder.")] = None,
) -> None:
    """Closed loop by default (1, 8 and 32 clients); --rate for open loop, --trace for a trace."""
    out = Console(markup=False, highlight=False)
    command = shlex.join(["hortator", "bench", *sys.argv[2:]])
    try:
        shape = Shape(prompt_tokens, output_tokens, shared_prefix, id_low, id_high, text)
        targets = [_target(t, api_key) for t in target]
        if len({t.name for t in targets}) != len(targets):
            _fail("two targets have the same name")
        conditions = Conditions(ignore_eos, timeout_s)
        rates = _numbers("--rate", rate, float) if rate else []
        clients = _numbers("--concurrency", concurrency, int)
        rows = _trace(trace) if trace else []
        targets, context = uvloop.run(_prepare(targets, shape, conditions, max_context))
        out.print(
            f"{command}\nseed {seed}; " + "; ".join(f"{t.name}: {t.url} {t.model}" for t in targets),
            soft_wrap=True,
        )
        if trace is not None:
            scaled = _scaled(trace.name, rows, context, limit, speed, scale_tokens, out)
            settings = [_replay(trace.name, scaled, shape, seed, conditions)]
        elif rate:
            settings = [_poisson(r, requests, shape, seed, conditions) for r in rates]
        else:
            settings = [_closed(c, requests, shape, seed, conditions) for c in clients]
    except (RequestFailed, ValueError, OSError) as error:
        _fail(described(error))
    except KeyboardInterrupt:
        sys.exit(130)
    results, interrupted = _measure(targets, settings, rounds)
    # A wide table is of more use in a log than one folded to 80 columns.
    console = Console(width=None if out.is_terminal else 200)
    for table in tables(results, console) if results else ():
        console.print(table)
    for result in results:
        if result.first_error:
            out.print(f"{result.target}, {result.setting}: first error: {result.first_error}", soft_wrap=True)
        if result.summary.late_max_ms > 50 and not result.setting.startswith("concurrency"):
            late = f"requests left up to {result.summary.late_max_ms:.0f} ms late"
            out.print(f"{result.target}, {result.setting}: {late}")
    if json:
        options = {"shape": vars(shape), "rounds": rounds, "ignore_eos": ignore_eos, "context": context}
        write_json(json, document(results, command, seed, options))
    if plot:
        from deploy.bench.plots import plot_all

        out.print("plots: " + ", ".join(str(path) for path in plot_all(results, plot)), soft_wrap=True)
    if interrupted:
        out.print("interrupted: these are the requests that had ended")
        raise typer.Exit(130)
    if any(result.summary.errors for result in results):
        raise typer.Exit(1)


def _target(text: str, api_key: str) -> Target:
    """`[NAME=]URL[,MODEL]`; without a name it is the URL's host and port. Raises ValueError."""
    name, equals, rest = text.partition("=")
    if not equals or "/" in name or ":" in name:
        name, rest = "", text
    url, _, model = rest.partition(",")
    try:
        where = Target(name, url, model, api_key).at("/v1/models")
    except ValueError as error:
        raise ValueError(
            f"--target {text!r}: {error}; write [NAME=]URL[,MODEL], for example {DEFAULT_TARGET}"
        ) from None
    return Target(name or f"{where.host}:{where.port}", url, model, api_key)


N = TypeVar("N", int, float)


def _numbers(option: str, text: str, kind: type[N]) -> list[N]:
    try:
        found = [kind(part) for part in text.replace(",", " ").split()]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise ValueError(f"{option} {text!r}: write numbers above 0, for example 1,8,32")
    return found


async def _prepare(
    targets: list[Target], shape: Shape, conditions: Conditions, max_context: int
) -> tuple[list[Target], int]:
    """Fill in models, warm up, and find the smallest context; 0 where no server says it."""
    contexts = [max_context] if max_context else []
    ready = []
    for target in targets:
        try:
            model, length = await served_model(target)
            ready.append(replace(target, model=model))
            await warm_up(ready[-1], shape, conditions)
        except RequestFailed as error:
            raise RequestFailed(f"{target.name} ({target.url}): {described(error)}") from None
        contexts += [length] if length else []
    return ready, min(contexts, default=0)


def _closed(concurrency: int, requests: int, shape: Shape, seed: int, conditions: Conditions) -> Setting:
    title = f"concurrency {concurrency}"
    count = requests or 2 * concurrency
    return Setting(
        title,
        lambda number: random_jobs(count, shape, f"{seed}:{title}:{number}"),
        lambda target, jobs, on_record: closed_loop(target, jobs, concurrency, conditions, on_record),
    )


def _poisson(rate: float, requests: int, shape: Shape, seed: int, conditions: Conditions) -> Setting:
    title = f"rate {rate:g}/s"
    count = requests or max(1, round(20 * rate))

    def jobs(number: int) -> list[Job]:
        key = f"{seed}:{title}:{number}"
        return poisson(random_jobs(count, shape, key), rate, key)

    return Setting(
        title, jobs, lambda target, todo, on_record: open_loop(target, todo, conditions, on_record)
    )


def _trace(path: Path) -> list[traces.TraceRow]:
    """Raises ValueError."""
    try:
        return traces.parse(path.read_text().splitlines())
    except OSError as error:
        raise ValueError(f"--trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--trace {path}: not a text file") from None
    except traces.BadTrace as error:
        raise ValueError(f"--trace {path}, {error}") from None


def _scaled(
    name: str,
    rows: list[traces.TraceRow],
    context: int,
    limit: int,
    speed: float,
    tokens: float,
    out: Console,
) -> traces.Scaled:
    """The rows to replay, announced. Raises ValueError."""
    if not context:
        raise ValueError(
            "no server says its context length (max_model_len in /v1/models): give --max-context"
        )
    scaled = traces.scale(rows, context, limit, speed, tokens)
    out.print(
        f"{name}: {len(scaled.rows)} requests over {scaled.rows[-1].at:.1f} s, lengths × "
        f"{scaled.token_scale:.3g} for a context of {context}, {scaled.clipped} prompts cut",
        soft_wrap=True,
    )
    return scaled


def _replay(name: str, scaled: traces.Scaled, shape: Shape, seed: int, conditions: Conditions) -> Setting:
    return Setting(
        f"trace {name}",
        lambda number: traces.jobs(scaled, shape, f"{seed}:{number}"),
        lambda target, jobs, on_record: open_loop(target, jobs, conditions, on_record),
    )


def _measure(targets: list[Target], settings: list[Setting], rounds: int) -> tuple[list[Result], bool]:
    """Results, and whether Ctrl-C ended it: then of the requests that had ended by then.

    Each run has a loop of its own, so that Ctrl-C is heard at once while prompts are made.
    """
    runs: dict[tuple[str, str], list[Run]] = {}
    interrupted = False
    try:
        for setting in settings:
            for number in range(rounds):
                jobs = setting.jobs(number)
                for target in targets:
                    title = f"{target.name}, {setting.title}"
                    title += f", round {number + 1}" if rounds > 1 else ""
                    done = runs.setdefault((target.name, setting.title), [])
                    with _progress(title, len(jobs)) as on_record:
                        done.append(_run(setting, target, jobs, on_record, done))
    except KeyboardInterrupt:
        interrupted = True
    return [Result(*key, tuple(each)) for key, each in runs.items() if each], interrupted


def _run(setting: Setting, target: Target, jobs: list[Job], on_record: OnRecord, done: list[Run]) -> Run:
    """One run. On Ctrl-C what has ended goes into `done` before the interrupt goes on."""
    ended: list[Record] = []
    began = perf_counter()

    def keep(record: Record) -> None:
        ended.append(record)
        on_record(record)

    try:
        return uvloop.run(setting.run(target, jobs, keep))
    except KeyboardInterrupt:
        if ended:
            done.append(Run(ended, perf_counter() - began))
        raise


@contextmanager
def _progress(title: str, total: int) -> Any:
    """A bar on stderr while a person watches: requests done, tokens and errors so far."""
    if not sys.stderr.isatty():
        yield lambda record: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.fields[seen]}"), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(title, total=total, seen="")
        tokens = errors = 0

        def on_record(record: Record) -> None:
            nonlocal tokens, errors
            tokens += record.tokens
            errors += bool(record.error)
            bar.update(task, advance=1, seen=f"{tokens} tokens" + (f", {errors} errors" if errors else ""))

        yield on_record


def _fail(problem: object) -> NoReturn:
    sys.exit(f"hortator bench: {problem}")
