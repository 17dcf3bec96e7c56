"""Results of a bench run by target and setting, as a table and as JSON."""

import json
import math
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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


_COLUMNS = (
    ("target", lambda r, s: r.target),
    ("setting", lambda r, s: r.setting),
    ("tok/s", lambda r, s: _number(s.output_tok_s)),
    ("rounds", lambda r, s: " ".join(_number(x) for x in r.rounds_tok_s) if len(r.runs) > 1 else ""),
    ("req/s", lambda r, s: f"{s.request_s:.2f}"),
    ("TTFT p50", lambda r, s: _number(s.ttft_p50_ms)),
    ("p90", lambda r, s: _number(s.ttft_p90_ms)),
    ("p99", lambda r, s: _number(s.ttft_p99_ms)),
    ("gap p50", lambda r, s: _number(s.gap_p50_ms)),
    ("p99", lambda r, s: _number(s.gap_p99_ms)),
    ("max", lambda r, s: _number(s.gap_max_ms)),
    ("e2e p50", lambda r, s: _number(s.e2e_p50_ms)),
    ("p99", lambda r, s: _number(s.e2e_p99_ms)),
    ("cached", lambda r, s: f"{100 * s.cached_share:.0f} %" if s.cached_share else ""),
    ("errors", lambda r, s: f"{s.errors}/{s.requests}"),
)


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def table(results: list[Result]) -> Table:
    """Times are in milliseconds."""
    made = Table(title="times in ms", title_justify="left")
    for name, _ in _COLUMNS:
        made.add_column(name, justify="left" if name in ("target", "setting") else "right", no_wrap=True)
    for result in results:
        summary = result.summary
        made.add_row(*(cell(result, summary) for _, cell in _COLUMNS))
    return made


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
