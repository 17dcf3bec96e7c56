"""`hortator status`: what a mesh consists of and what its instances do."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from deploy.down import recorded
from deploy.rundir import RunDir, RunDirError
from deploy.status_memory import memory_lines
from deploy.tap import connect
from shared.bus.port import BusDown

SCHEDULER_STATS = "$SRV.STATS.hortator-scheduler"
WORKER_STATS = "$SRV.STATS.hortator-worker"
KVSTORE_STATS = "$SRV.STATS.hortator-kvstore"

INSTANCE_FIELDS = (
    "id",
    "role",
    "state",
    "running",
    "waiting",
    "blocks_total",
    "blocks_free",
    "blocks_cached",
    "prefill_tok_s",
    "decode_tok_s",
)


def show(path: Path, *, as_json: bool) -> int:
    """Print the status. Exit status 0 while the mesh runs, else 1."""
    try:
        report = collect(RunDir(path))
    except RunDirError as error:
        print(f"hortator status: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        _print_tables(report)
    return 0 if report["state"] in ("ready", "starting") else 1


def collect(run: RunDir, now: float | None = None) -> dict[str, Any]:
    """Status as `--json` prints it. Raises `RunDirError` when there never was a mesh in the directory."""
    state = run.read_state()
    if state is None:
        raise RunDirError(f"no mesh in {run.path}: start one with `hortator up`, or name its --run-dir")
    now = time.time() if now is None else now
    supervised = recorded(state.get("supervisor")) is not None
    report: dict[str, Any] = {
        "run_dir": str(run.path),
        "state": state["state"] if supervised or state["state"] in ("stopped", "failed") else "dead",
        "url": state.get("url"),
        "model": state.get("model"),
        "mock": bool(state.get("mock")),
        "supervisor_pid": state["supervisor"]["pid"] if supervised else None,
        "services": [_service(entry, run, now) for entry in state.get("services", [])],
        "instances": [],
        "schedulers": [],
        "tiers": [],
    }
    if report["state"] == "failed":
        report["error"] = state.get("error", "")
    if report["url"] and report["state"] in ("ready", "starting"):
        try:
            answers, workers, kvstores = asyncio.run(_ask(run))
        except (BusDown, RunDirError) as error:
            report["error"] = str(error)
        else:
            report["schedulers"] = [{k: v for k, v in a.items() if k != "instances"} for a in answers]
            # A standby lists nothing; of two that think they lead, the higher epoch is right.
            leader = max(answers, key=lambda a: (bool(a.get("instances")), a.get("epoch", 0)), default={})
            engines = {worker.get("instance"): engine(worker.get("detail") or {}) for worker in workers}
            groups = {worker.get("instance"): worker.get("group") or {} for worker in workers}
            memory = {worker.get("instance"): worker.get("memory") or {} for worker in workers}
            report["instances"] = [
                {f: row.get(f) for f in INSTANCE_FIELDS}
                | {"engine": engines.get(row.get("id")), "group": groups.get(row.get("id"), {})}
                | {"memory": memory.get(row.get("id"), {})}
                for row in leader.get("instances", [])
            ]
            report["tiers"] = [{"id": k.get("instance")} | k["tier"] for k in kvstores if k.get("tier")]
            if not answers:
                report["error"] = "no scheduler answers on NATS"
    return report


def _service(entry: dict[str, Any], run: RunDir, now: float) -> dict[str, Any]:
    alive = recorded(entry)
    state = entry["state"]
    if alive is None and state in ("starting", "up"):
        state = "dead"
    http = None
    if alive is not None:
        try:
            http = json.loads(run.ready_file(entry["name"]).read_text()).get("http")
        except (OSError, ValueError):
            pass
    return {
        "service": entry["service"],
        "instance": entry["instance"],
        "rank": entry["rank"],
        "pid": alive.pid if alive else None,
        "state": state,
        "uptime_s": round(now - entry["since"], 1) if alive else 0.0,
        "restarts": entry["restarts"],
        "http": http,
        "log": entry["log"],
    }


async def _ask(run: RunDir) -> list[list[dict[str, Any]]]:
    """What schedulers, workers and kvstores say of themselves."""
    desk = await connect(run)
    try:
        answers = await asyncio.gather(
            *(desk.ask_all(subject) for subject in (SCHEDULER_STATS, WORKER_STATS, KVSTORE_STATS))
        )
    finally:
        await desk.close()
    return [[data for answer in each if (data := stats_data(answer)) is not None] for each in answers]


def tier_line(tier: dict[str, Any]) -> str:
    """A second tier in one line for people."""
    disk = (
        f"{_size(tier['disk_bytes'])} of {_size(tier['disk_budget'])} disk, " if tier["disk_budget"] else ""
    )
    asked = tier["hits"] + tier["misses"]
    users = f"{tier['connections']} connection(s)"
    if not tier["connections"]:
        users = "no worker connected (the log of one that is ready says why)"
    wrong = f", {tier['corrupt']} corrupt" if tier["corrupt"] else ""
    return (
        f"second tier of {tier['id']}: {sum(tier['complete'].values())} blocks, "
        f"{_size(tier['memory_bytes'])} of {_size(tier['memory_budget'])} memory, {disk}"
        f"{users}, fetches found {tier['hits']:,} of {asked:,} blocks{wrong}, "
        f"{_size(tier['received_bytes_per_s'])}/s in, {_size(tier['sent_bytes_per_s'])}/s out"
    )


def preemption_line(told: dict[str, Any]) -> str:
    """What preemptions there were and what they cost, in one line for people."""
    return (
        f"preemptions for want of KV blocks: {told['preempted']}, of these {told['for_urgent']} for urgent "
        f"requests and {told['offloaded']} with blocks kept in the second tier; recompute tax "
        f"{told['recompute_tax']:.2%} ({told['recomputed_tokens']:,} tokens computed again), "
        f"{told['saved_tokens']:,} tokens fetched instead"
    )


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 999.5:  # with three digits, more would be printed as a power of ten
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def engine(detail: dict[str, Any]) -> dict[str, Any]:
    """How an instance computes, as its worker tells: texts, and the candidates it measured as a table."""
    try:
        candidates = json.loads(detail.get("candidates", "[]"))
    except (TypeError, ValueError):
        candidates = []
    return detail | {"candidates": candidates if isinstance(candidates, list) else []}


def engine_line(instance: str, detail: dict[str, Any]) -> str:
    """The same in one line for people; empty while the instance tells nothing."""
    formats = f"{detail['dtype']} weights, {detail['kv_dtype']} KV" if "kv_dtype" in detail else ""
    bitwise = "deterministic" if detail.get("deterministic") == "yes" else ""
    best: dict[str, Any] = next((c for c in detail["candidates"] if c.get("chosen")), {})
    speed = f"decode {best['decode_ms']} ms, prefill {best['prefill_tok_s']:.0f} tok/s" if best else ""
    ranks = f"pids of its ranks {detail['ranks']}" if "ranks" in detail else ""
    told = detail.get("split", ""), detail.get("links", "")
    why = detail.get("kernels_reason", "")
    slow = f"no native kernels: {why}" if why and detail.get("device", "cpu") == "cpu" else ""
    parts = (detail.get("choice") or detail.get("executor", ""), slow, speed, formats, bitwise, ranks, *told)
    text = "; ".join(part for part in parts if part)
    return f"{instance}: {text}" if text else ""


def group_lines(instance: str, group: dict[str, Any]) -> list[str]:
    """How a group's layers spend their time, and what follows from it, in lines for people."""
    lines = []
    for kind, layer in group.get("recent", {}).items():
        if layer["steps"]:
            who = f"{instance}: {group['tp']} ranks, {kind} steps"
            lines.append(
                f"{who}: a layer computes {layer['compute_us']:.0f} µs, its messages take "
                f"{layer['communication_us']:.0f} µs ({layer['share']:.0%}); "
                f"{layer['exposed_us']:.0f} µs were waited for them and for slower ranks"
            )
    return lines + [f"{instance}: {advice}" for advice in group.get("advice", ())]


def stats_data(answer: bytes) -> dict[str, Any] | None:
    """Data of a STATS answer of the NATS micro convention: it stands with the endpoint."""
    try:
        for endpoint in json.loads(answer).get("endpoints") or []:
            if isinstance(endpoint.get("data"), dict):
                return endpoint["data"]
    except ValueError:
        pass
    return None


def _print_tables(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a pipe has no width to keep to
        console = Console(width=140)
    print_for_people(report, console)


def print_for_people(report: dict[str, Any], console: Any) -> None:
    """The report as lines and tables that fit 80 columns. `console` is rich's."""
    from rich.markup import escape

    def line(text: str) -> None:
        console.print(escape(text), highlight=False, soft_wrap=True)

    line(f"{report['state']}  {report['url'] or ''}  {report['model'] or ''}  {report['run_dir']}")
    if report["mock"] and report["state"] in ("ready", "starting"):
        line("a mesh that computes nothing (--mock): its answers are random words")
    services = _table("service", "instance", "pid", "state", "uptime", "restarts", "http")
    for row in report["services"]:
        uptime = f"{row['uptime_s']:.0f} s" if row["pid"] else ""
        services.add_row(
            row["service"],
            row["instance"],
            str(row["pid"] or ""),
            row["state"],
            uptime,
            str(row["restarts"]),
            row["http"] or "",
        )
    console.print(services)
    if report["instances"]:
        table = _table("id", "role", "state", "run", "wait", "free blocks", "cached", "prefill/s", "decode/s")
        for row in report["instances"]:
            cells = {field: _cell(row[field]) for field in INSTANCE_FIELDS}
            free = f"{cells.pop('blocks_free')}/{cells.pop('blocks_total')}"
            *first, cached, prefill, decode = cells.values()
            table.add_row(*first, free, cached, prefill, decode)
        console.print(table)
    for row in report["instances"]:
        if row["engine"] and (text := engine_line(row["id"], row["engine"])):
            line(text)
        for text in group_lines(row["id"], row.get("group") or {}):
            line(text)
        for text in memory_lines(row["id"], row.get("memory") or {}):
            line(text)
        if blocks := (row["engine"] or {}).get("blocks"):
            line(f"{row['id']}: KV blocks of {blocks}")
    for tier in report.get("tiers", ()):
        line(tier_line(tier))
    for scheduler in report.get("schedulers", ()):
        if (told := scheduler.get("preemption")) and told["preempted"]:
            line(preemption_line(told))
    if report.get("error"):
        console.print(escape(report["error"]), style="red", highlight=False, soft_wrap=True)
    if report["state"] in _OVER:
        line(_OVER[report["state"]])


_OVER = {
    "stopped": "start a mesh with `hortator up`",
    "failed": "correct that and start again with `hortator up`",
    "dead": "its supervisor was killed: `hortator down` clears what is left, `hortator up` starts again",
}
"""State of a mesh that does not run → what to do."""


def _table(*heads: str) -> Any:
    from rich import box
    from rich.table import Table

    return Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, float) else str(value)
