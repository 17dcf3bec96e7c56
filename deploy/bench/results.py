"""Results of a bench run by target and setting, as a table and as JSON."""

import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from deploy.bench.records import Record, Summary, summarise
from deploy.bench.records import __doc__ as definitions
from deploy.bench.runner import Run


@dataclass(frozen=True)
class Result:
    """All rounds of one target under one setting."""

    target: str
    setting: str
    """Such as `concurrency 8`, `rate 2/s` or `trace azure_conv.csv`."""
    runs: tuple[Run, ...]

    @property
    def records(self) -> list[Record]:
        return [record for run in self.runs for record in run.records]

    @property
    def summary(self) -> Summary:
        return summarise(self.records, sum(run.wall_s for run in self.runs))

    @property
    def rounds_tok_s(self) -> list[float]:
        """Output tokens/s of each round, to show how much it varies."""
        return [summarise(run.records, run.wall_s).output_tok_s for run in self.runs]

    @property
    def first_error(self) -> str:
        return next((record.error for record in self.records if record.error), "")


Cell = Callable[[Result, Summary], str]

_COLUMNS: tuple[tuple[str, str, Cell], ...] = (
    ("tok/s", "tokens/s", lambda r, s: _number(s.output_tok_s)),
    (
        "rounds",
        "of each round",
        lambda r, s: " ".join(map(_number, r.rounds_tok_s)) if len(r.runs) > 1 else "",
    ),
    ("req/s", "requests/s", lambda r, s: f"{s.request_s:.2f}"),
    ("TTFT p50", "first token p50", lambda r, s: _number(s.ttft_p50_ms)),
    ("p90", "first token p90", lambda r, s: _number(s.ttft_p90_ms)),
    ("p99", "first token p99", lambda r, s: _number(s.ttft_p99_ms)),
    ("gap p50", "gap p50", lambda r, s: _number(s.gap_p50_ms)),
    ("p99", "gap p99", lambda r, s: _number(s.gap_p99_ms)),
    ("max", "gap max", lambda r, s: _number(s.gap_max_ms)),
    ("e2e p50", "end to end p50", lambda r, s: _number(s.e2e_p50_ms)),
    ("p99", "end to end p99", lambda r, s: _number(s.e2e_p99_ms)),
    ("cached", "cached", lambda r, s: f"{100 * s.cached_share:.0f} %" if s.cached_share else ""),
    ("errors", "errors", lambda r, s: f"{s.errors}/{s.requests}"),
)
"""Head of a column, the same in full for the head of a row, and the figure."""

_TITLE = "times in ms"


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def tables(results: Sequence[Result], console: Console) -> list[Table]:
    """Figures of the results, a row each; in a console too narrow for that a column each, in several tables
    if need be. What has no figure anywhere is left out."""
    wide = _wide(results)
    if _width(wide, console) <= console.width:
        return [wide]
    made: list[Table] = []
    rest = list(results)
    while rest:
        count = len(rest)
        while count > 1 and _width(_tall(rest[:count]), console) > console.width:
            count -= 1
        made.append(_tall(rest[:count]))
        rest = rest[count:]
    return made


def _width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _figures(results: Sequence[Result]) -> list[tuple[str, str, list[str]]]:
    """(short head, long head, figure of each result) of the columns that have any."""
    summaries = [result.summary for result in results]
    columns = [(a, b, [cell(r, s) for r, s in zip(results, summaries)]) for a, b, cell in _COLUMNS]
    return [(short, long, cells) for short, long, cells in columns if any(cells)]


def _wide(results: Sequence[Result]) -> Table:
    made = Table(title=_TITLE, title_justify="left")
    several = len({result.target for result in results}) > 1
    for name in ["target", "setting"] if several else ["setting"]:
        made.add_column(name, no_wrap=True)
    figures = _figures(results)
    for short, _, _ in figures:
        made.add_column(short, justify="right", no_wrap=True)
    for i, result in enumerate(results):
        made.add_row(
            *([result.target] if several else []),
            _short(result.setting),
            *(cells[i] for _, _, cells in figures),
        )
    return made


def _tall(results: Sequence[Result]) -> Table:
    made = Table(title=_TITLE, title_justify="left")
    made.add_column("", no_wrap=True)
    several = len({result.target for result in results}) > 1
    for result in results:
        head = f"{result.target}\n{_short(result.setting)}" if several else _short(result.setting)
        made.add_column(head, justify="right")
    for _, long, cells in _figures(results):
        made.add_row(long, *cells)
    return made


def _short(setting: str) -> str:
    return setting.replace("concurrency ", "c=")


def document(results: list[Result], command: str, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """For `--json`: command, seed, machine, the definitions, and per result all figures and requests."""
    return {
        "command": command,
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
        },
        "options": options,
        "definitions": (definitions or "").strip(),
        "results": [
            {
                "target": result.target,
                "setting": result.setting,
                **{
                    k: None if isinstance(v, float) and math.isnan(v) else v
                    for k, v in asdict(result.summary).items()
                },
                "rounds_tok_s": result.rounds_tok_s,
                "first_error": result.first_error,
                "requests_columns": ["start_s", "ttft_s", "e2e_s", "prompt_tokens", "tokens", "error"],
                "requests_rows": [
                    [
                        round(r.start, 4),
                        _maybe(r.first, r),
                        _maybe(r.last, r),
                        r.prompt_tokens,
                        r.tokens,
                        r.error,
                    ]
                    for r in result.records
                ],
            }
            for result in results
        ],
    }


def _maybe(at: float | None, record: Record) -> float | None:
    return None if at is None else round(at - record.start, 5)


def write_json(path: Path, body: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n")
