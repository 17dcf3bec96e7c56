"""`hortator tap`: frames as they pass, decoded with plain msgpack, as any client could."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgpack

from deploy.rundir import RunDir, RunDirError
from shared.bus.desk import Denied, Desk
from shared.bus.port import BusDown


def tap(path: Path, subject: str, count: int) -> int:
    """Print one JSON object per frame: subject, time (UTC), size in bytes, frame. 0 frames: until Ctrl-C."""
    if (wrong := wrong_subject(subject)) is not None:
        print(f"hortator tap: {subject!r}: {wrong}", file=sys.stderr)
        return 1
    try:
        return asyncio.run(_tap(RunDir(path), subject, count))
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # `hortator tap | head`
        sys.stderr.close()
        return 0
    except (BusDown, Denied, RunDirError) as error:
        print(f"hortator tap: {error}", file=sys.stderr)
        return 1


async def _tap(run: RunDir, subject: str, count: int) -> int:
    desk = await connect(run)
    seen = 0
    print(f"listening on {subject} ({'Ctrl-C ends' if not count else f'{count} frames'})", file=sys.stderr)
    try:
        async for time, where, payload in desk.frames(subject):
            line = {
                "subject": where,
                "time": time.isoformat(),
                "size": len(payload),
                "frame": decode(payload),
            }
            print(json.dumps(line, ensure_ascii=False), flush=True)
            seen += 1
            if seen == count:
                return 0
    finally:
        await desk.close()
    raise BusDown("the connection to NATS has ended")


def wrong_subject(subject: str) -> str | None:
    """Why NATS would not take a subscription to it; None if it would."""
    if any(c.isspace() for c in subject):
        return "a subject has no spaces; quote it so that the shell leaves `*` and `>` alone"
    tokens = subject.split(".")
    if "" in tokens:
        return "no part between two dots, at the beginning or at the end may be empty"
    if ">" in tokens[:-1]:
        return "`>` stands for all that follows, so it can only come last; `*` stands for one part"
    return None


async def connect(run: RunDir) -> Desk:
    """A connection with the operator's credentials of a run. Raises `RunDirError` when no mesh runs there."""
    state, credentials = run.read_state(), run.read_credentials()
    if not state or not credentials or "nats_url" not in state:
        raise RunDirError(f"no mesh runs in {run.path}: start one with `hortator up`, or name its --run-dir")
    return await Desk.connect(state["nats_url"], "operator", credentials["nats"]["operator"])


def decode(payload: bytes) -> Any:
    """A frame as JSON can show it: MessagePack if it is that, else JSON or text; bytes become hex."""
    try:
        return _plain(msgpack.unpackb(payload, strict_map_key=False))
    except (ValueError, msgpack.UnpackException, RecursionError):
        text = payload.decode(errors="replace")
        try:
            return json.loads(text)
        except ValueError:
            return text


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):  # what people paste into reports must not let anybody in
        return {
            str(_plain(key)): "(not shown)" if key == "secret" else _plain(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
