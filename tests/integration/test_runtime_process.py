"""The life of a service process as its supervisor sees it: exit codes, order, and a second signal."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import RunningServer, nats_server

pytestmark = pytest.mark.servers

PROGRAM = """
import asyncio, sys
from shared.runtime.service import run
from shared.runtime.settings import ServiceSettings, load

async def good(context):
    await context.stopping.wait()
    context.log.info("finished", health=context.health.ok)

async def failing(context):
    await context.stopping.wait()
    raise RuntimeError("broken while finishing")

async def hanging(context):
    await asyncio.Event().wait()

run(load(ServiceSettings), "probe", {"good": good, "failing": failing, "hanging": hanging}[sys.argv[1]])
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningServer]:
    with nats_server(tmp_path) as server:
        yield server


def start(folder: Path, broker: RunningServer, what: str, **env: str) -> subprocess.Popen[str]:
    ready = folder / "ready.json"
    settings = {
        "HORTATOR_NATS_URL": f"nats://127.0.0.1:{broker.port}",
        "HORTATOR_REDIS_URL": "",
        "HORTATOR_READY_FILE": str(ready),
        "HORTATOR_INSTANCE": "p0",
        **env,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, what],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 20
    while not ready.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def end(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]]]:
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    return process.returncode, [json.loads(line) for line in output.splitlines()]


def test_a_service_told_to_stop_finishes_and_ends_with_0(tmp_path: Path, broker: RunningServer) -> None:
    code, lines = end(start(tmp_path, broker, "good"))
    assert [line["event"] for line in lines] == ["started", "stopping", "finished", "stopped"]
    # It had said that it is going before its work ended.
    assert lines[2]["health"] is False
    assert code == 0


def test_a_service_that_fails_ends_with_1_and_the_reason(tmp_path: Path, broker: RunningServer) -> None:
    code, lines = end(start(tmp_path, broker, "failing"))
    assert code == 1
    assert any("broken while finishing" in line.get("exception", "") for line in lines)


def test_a_service_that_does_not_finish_is_cancelled_after_the_grace_time(
    tmp_path: Path, broker: RunningServer
) -> None:
    code, lines = end(start(tmp_path, broker, "hanging", HORTATOR_STOP_GRACE_S="0.3"))
    assert code == 1
    assert "stop_grace_s" in " ".join(line["event"] for line in lines)


def test_a_second_signal_ends_a_hanging_service_at_once(tmp_path: Path, broker: RunningServer) -> None:
    process = start(tmp_path, broker, "hanging", HORTATOR_STOP_GRACE_S="60")
    assert process.stdout is not None
    process.send_signal(signal.SIGTERM)
    while "stopping" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 130


def test_a_service_stops_cleanly_while_the_broker_is_away(tmp_path: Path, broker: RunningServer) -> None:
    process = start(tmp_path, broker, "good")
    broker.stop()
    started = time.monotonic()
    code, _ = end(process)
    assert code == 0
    assert time.monotonic() - started < 10


def test_an_unknown_setting_ends_the_start_naming_it(tmp_path: Path, broker: RunningServer) -> None:
    env = {**os.environ, "HORTATOR_NATS_URI": "x"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "good"], env=env, capture_output=True, text=True, timeout=30
    )
    assert done.returncode != 0
    assert "HORTATOR_NATS_URI" in done.stderr
    assert "HORTATOR_NATS_URL" in done.stderr
