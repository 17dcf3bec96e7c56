"""Production traces: Azure's CSV and Mooncake's JSONL, scaled to the machine, turned into jobs. Pure."""

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from random import Random

from deploy.bench.workload import Job, Shape, random_ids

MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's `hash_ids` stands for."""


class BadTrace(ValueError):
    """The trace cannot be read; the text names the line."""


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace: seconds after the first, lengths in tokens, the prefix blocks it is made of."""

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Mooncake's hash_ids: equal ids at the start of two requests are one prefix. Empty: shares nothing."""


@dataclass(frozen=True)
class Scaled:
    rows: tuple[TraceRow, ...]
    token_scale: float
    block_tokens: int
    """Tokens of one prefix block after scaling."""
    clipped: int
    """Rows whose prompt was cut because prompt and output would not fit the context."""


def parse_azure(lines: Iterable[str]) -> list[TraceRow]:
    """Columns TIMESTAMP, ContextTokens, GeneratedTokens. Raises BadTrace."""
    reader = csv.DictReader(lines)
    if not {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(reader.fieldnames or ()):
        raise BadTrace("line 1: wanted the columns TIMESTAMP, ContextTokens, GeneratedTokens")
    rows, begin = [], None
    for number, row in enumerate(reader, 2):
        try:
            # Seven decimals of a second; datetime takes six.
            day, _, fraction = row["TIMESTAMP"].partition(".")
            at = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp() + float(f"0.{fraction or 0}")
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (ValueError, TypeError, AttributeError) as error:
            raise BadTrace(f"line {number}: {error}") from None
        begin = at if begin is None else begin
        rows.append(TraceRow(at - begin, prompt, output))
    return rows


def parse_mooncake(lines: Iterable[str]) -> list[TraceRow]:
    """Objects with timestamp (ms), input_length, output_length, hash_ids. Raises BadTrace."""
    rows, begin = [], None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            at = float(row["timestamp"]) / 1e3
            blocks = tuple(int(b) for b in row.get("hash_ids", ()))
            prompt, output = int(row["input_length"]), int(row["output_length"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadTrace(f"line {number}: {type(error).__name__} {error}") from None
        begin = at if begin is None else begin
        rows.append(TraceRow(at - begin, prompt, output, blocks))
    return rows


def parse(lines: Sequence[str]) -> list[TraceRow]:
    """Either format, told apart by the first line. Rows come in order of arrival. Raises BadTrace."""
    if not lines:
        raise BadTrace("the trace is empty")
    rows = parse_mooncake(lines) if lines[0].lstrip().startswith("{") else parse_azure(lines)
    if not rows:
        raise BadTrace("the trace has no requests")
    return sorted(rows, key=lambda r: r.at)


def fitting_scale(rows: Sequence[TraceRow], context: int) -> float:
    """The largest factor up to 1 at which 99 % of the rows fit `context` tokens."""
    totals = sorted(r.prompt_tokens + r.output_tokens for r in rows)
    return min(1.0, context / max(1, totals[int(len(totals) * 0.99) if len(totals) > 1 else 0]))


def scale(
    rows: Sequence[TraceRow], context: int, limit: int = 0, speed: float = 1.0, tokens: float = 0.0
) -> Scaled:
    """The first `limit` rows (0: all), `speed` times faster, lengths times `tokens` (0: as fits the context).

    A prompt that does not fit beside its output is cut at its end, an output that leaves no room for one
    prompt token to the context less one.
    """
    if speed <= 0 or tokens < 0 or context < 2:
        raise ValueError(
            "speed must be above 0, the token scale not below, and the context at least 2 tokens"
        )
    chosen = list(rows[:limit] if limit else rows)
    factor = tokens or fitting_scale(chosen, context)
    begin = chosen[0].at if chosen else 0.0
    made, clipped = [], 0
    for row in chosen:
        output = min(max(1, round(row.output_tokens * factor)), context - 1)
        wanted = max(1, round(row.prompt_tokens * factor))
        prompt = min(wanted, context - output)
        clipped += prompt < wanted
        made.append(replace(row, at=(row.at - begin) / speed, prompt_tokens=prompt, output_tokens=output))
    return Scaled(tuple(made), factor, max(1, round(MOONCAKE_BLOCK * factor)), clipped)


def jobs(scaled: Scaled, shape: Shape, seed: str) -> list[Job]:
    """Jobs whose prompts share exactly the prefixes that the trace's block ids say.

    A block's ids follow from (seed, block id) alone; ids beyond the named blocks are the request's own.
    """
    made = []
    cache: dict[int, list[int]] = {}
    for number, row in enumerate(scaled.rows):
        prompt: list[int] = []
        for block in row.blocks:
            if len(prompt) >= row.prompt_tokens:
                break
            if block not in cache:
                cache[block] = random_ids(Random(f"{seed}:block:{block}"), scaled.block_tokens, shape)
            prompt += cache[block]
        rest = row.prompt_tokens - len(prompt)
        if rest > 0:
            prompt += random_ids(Random(f"{seed}:row:{number}"), rest, shape)
        made.append(Job(prompt[: row.prompt_tokens], row.prompt_tokens, row.output_tokens, row.at))
    return made
