"""The four services started one by one from environment settings, as containers start them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from deploy.processes import die_with_parent
from deploy.servers import find_nats, find_redis, free_port, nats_probe
from shared.model import resolve

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(180)]

ORDER = ("gateway", "worker", "kvstore", "scheduler")


class Terminals:
    """Processes in the order they were typed; each has a log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, name: str, *command: str, **env: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env={**{k: v for k, v in os.environ.items() if not k.startswith("HORTATOR_")}, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent(os.getpid()),
            )

    def end(self, name: str) -> int:
        """SIGTERM; the exit status."""
        process = self.processes[name]
        process.send_signal(signal.SIGTERM)
        return process.wait(40)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()


@pytest.fixture
def terminals(tmp_path):
    opened = Terminals(tmp_path)
    yield opened
    for process in opened.processes.values():
        process.kill()
        process.wait()


def start_all(terminals: Terminals) -> str:
    """Servers without passwords and the four services, the gateway first. Returns its URL once ready."""
    nats_port, redis_port, http_port = free_port(), free_port(), free_port()
    terminals.run("nats", find_nats(), "-a", "127.0.0.1", "-p", str(nats_port))
    terminals.run("redis", find_redis(), "--port", str(redis_port), "--bind", "127.0.0.1", "--save", "")
    deadline = time.monotonic() + 90
    while not nats_probe(nats_port)():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    folder = str(resolve("smollm2-135m-instruct").path)
    common = {
        "HORTATOR_NATS_URL": f"nats://127.0.0.1:{nats_port}",
        "HORTATOR_REDIS_URL": f"redis://127.0.0.1:{redis_port}/0",
    }
    own = {
        "gateway": {"HORTATOR_HTTP": f"127.0.0.1:{http_port}", "HORTATOR_MODEL_DIR": folder},
        "worker": {"HORTATOR_INSTANCE": "w0", "HORTATOR_MODEL_DIR": folder, "HORTATOR_MOCK": "1"},
    }
    for service in ORDER:
        terminals.run(service, sys.executable, "-m", "deploy.cli", service, **common, **own.get(service, {}))
    url = f"http://127.0.0.1:{http_port}"
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5):
            return url
        assert time.monotonic() < deadline, {s: terminals.log(s)[-2000:] for s in ORDER}
        time.sleep(0.1)


def test_services_started_in_any_order_find_each_other_and_end_cleanly(terminals):
    url = start_all(terminals)
    body = {"model": "smol", "prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 8
    for service in ORDER:
        assert terminals.end(service) == 0, terminals.log(service)


def test_services_end_cleanly_also_when_their_servers_are_gone(terminals):
    start_all(terminals)
    terminals.end("nats")
    terminals.end("redis")
    for service in ORDER:
        assert terminals.end(service) == 0, terminals.log(service)
        assert "Traceback" not in terminals.log(service), terminals.log(service)
