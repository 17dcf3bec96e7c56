"""`hortator down`: stop a mesh, also when parts of it or its supervisor are dead already."""

import signal
import sys
import time
from pathlib import Path
from typing import Any

from deploy.processes import ProcessId, end, with_environment
from deploy.rundir import RunDir, RunDirError

MARK = "HORTATOR_READY_FILE"
"""Every process of a mesh has this variable, which points into the run directory."""


def down(path: Path, grace_s: float) -> int:
    """Exit status 0 when nothing of the mesh runs any more (also if nothing ran), else 1."""
    run = RunDir(path)
    try:
        state = run.read_state()
    except RunDirError as error:
        print(f"hortator down: {error}; looking for processes without it", file=sys.stderr)
        state = None
    supervisor = recorded(state.get("supervisor")) if state else None
    began = time.monotonic()
    if supervisor is not None and supervisor.signal(signal.SIGTERM) and not supervisor.wait(grace_s):
        print(f"the supervisor (pid {supervisor.pid}) did not stop within {grace_s:.0f} s and is killed")
        supervisor.signal(signal.SIGKILL)
        supervisor.wait(5.0)
    left = leftovers(run, state)
    ended = supervisor is not None or bool(left)
    end(left, min(grace_s, 10.0))
    if remaining := [p.pid for p in leftovers(run, state)]:
        print(f"hortator down: still running: {remaining}", file=sys.stderr)
        return 1
    if not run.path.is_dir():
        print(f"no mesh in {run.path}")
        return 0
    try:
        run.claim()
    except RunDirError as error:
        print(f"hortator down: {error}", file=sys.stderr)
        return 1
    if state is not None and state.get("state") not in ("stopped", "failed"):
        run.write_state(stopped(state))
    run.release()
    print(f"stopped in {time.monotonic() - began:.1f} s" if ended else f"nothing runs in {run.path}")
    return 0


def recorded(entry: dict[str, Any] | None) -> ProcessId | None:
    """The process a record of `state.json` names, if it was running then and still is."""
    if not entry or not entry.get("pid") or not entry.get("start"):
        return None
    process = ProcessId(entry["pid"], entry["start"])
    return process if process.alive else None


def leftovers(run: RunDir, state: dict[str, Any] | None) -> list[ProcessId]:
    """Living processes of a run, by its records and by the mark in their environment."""
    found = {process for entry in (state or {}).get("services", []) if (process := recorded(entry))}
    return sorted(found | set(with_environment(MARK, f"{run.ready}/")), key=lambda process: process.pid)


def stopped(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a run after its end."""
    services = [
        {**entry, "pid": None, "start": None, "state": "stopped"} for entry in state.get("services", [])
    ]
    return {**state, "state": "stopped", "supervisor": None, "services": services}
