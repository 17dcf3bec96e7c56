"""Drives jobs against a target: so many at once, or each at its time."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from deploy.bench.client import RequestFailed, Target, get_json, stream_completion
from deploy.bench.records import Record
from deploy.bench.workload import Job, Shape, random_jobs

OnRecord = Callable[[Record], None]


@dataclass(frozen=True)
class Conditions:
    """What is the same for every request of a run."""

    ignore_eos: bool = True
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Run:
    records: list[Record]
    wall_s: float
    """From the first start to the last end."""


async def closed_loop(
    target: Target, jobs: Sequence[Job], concurrency: int, conditions: Conditions, on_record: OnRecord
) -> Run:
    """`concurrency` clients, each sending its next request when the last has ended."""
    todo = list(reversed(jobs))
    records: list[Record] = []
    began = perf_counter()

    async def client() -> None:
        while todo:
            job = todo.pop()
            record = Record(perf_counter() - began, job.prompt_tokens, job.output_tokens)
            await _one(target, job, record, began, conditions)
            records.append(record)
            on_record(record)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(jobs))):
            group.create_task(client())
    return Run(records, perf_counter() - began)


async def open_loop(target: Target, jobs: Sequence[Job], conditions: Conditions, on_record: OnRecord) -> Run:
    """Each request at its time, whether or not earlier ones have ended; times count from when it was due."""
    records: list[Record] = []
    began = perf_counter()

    async def request(job: Job) -> None:
        record = Record(job.at, job.prompt_tokens, job.output_tokens)
        await _one(target, job, record, began, conditions)
        records.append(record)
        on_record(record)

    async with asyncio.TaskGroup() as group:
        for job in sorted(jobs, key=lambda j: j.at):
            if (wait := job.at - (perf_counter() - began)) > 0:
                await asyncio.sleep(wait)
            group.create_task(request(job))
    return Run(records, perf_counter() - began)


async def _one(target: Target, job: Job, record: Record, began: float, conditions: Conditions) -> None:
    await stream_completion(target, job.prompt, record, began, conditions.ignore_eos, conditions.timeout_s)


async def warm_up(target: Target, shape: Shape, conditions: Conditions) -> None:
    """One short request, so that no measurement pays for a first one. Raises RequestFailed."""
    short = Shape(min(32, shape.prompt_tokens), 2, 0, shape.id_low, shape.id_high, shape.text)
    (job,) = random_jobs(1, short, "warm-up")
    record = Record(0.0, job.prompt_tokens, job.output_tokens)
    await _one(target, job, record, perf_counter(), conditions)
    if record.error:
        raise RequestFailed(record.error)


async def served_model(target: Target) -> tuple[str, int | None]:
    """The model to ask for (the target's, else the first it lists) and its context length if it says so.

    Raises RequestFailed.
    """
    answer = await get_json(target, "/v1/models")
    rows = (
        [row for row in answer.get("data", []) if isinstance(row, dict)] if isinstance(answer, dict) else []
    )
    if not rows:
        raise RequestFailed("/v1/models lists no model")
    row = next((r for r in rows if r.get("id") == target.model), rows[0])
    length = row.get("max_model_len") or row.get("context_length")
    return target.model or str(row["id"]), length if isinstance(length, int) else None
