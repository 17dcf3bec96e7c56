"""Streams through a mesh whose parts are killed under them: every token once, in order, the right ones.

Mock workers draw tokens from a hash, so a stream without faults tells what one with faults must bring.
"""

import json
import signal
import threading
import time
import urllib.request
from collections.abc import Callable

import pytest

from tests.support.mesh import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240)]

STREAMS = 12
TOKENS = 300
# About 3 s for a stream, so that it is certainly under way when the fault strikes.
STEP_S = 0.01


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    with Mesh.start(folder, "--mock", "--instances", "2", "--set", f"worker.mock_step_s={STEP_S}") as running:
        yield running


class Stream(threading.Thread):
    """One streamed completion, read as it comes. `ids` are its tokens, `finish` its reason."""

    def __init__(self, mesh: Mesh, number: int) -> None:
        super().__init__(daemon=True)
        self._url = f"{mesh.base_url}/v1/completions"
        self._number = number
        self.ids: list[int] = []
        self.finish: list[str] = []
        self.error = ""
        self.start()

    def run(self) -> None:
        body = {
            "model": "smol",
            "prompt": [1000 + self._number] * 40,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "seed": self._number,
            "stream": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        self._take(json.loads(line[6:]))
        except Exception as error:
            self.error = repr(error)

    def _take(self, chunk: dict) -> None:
        if "error" in chunk:
            self.error = json.dumps(chunk["error"])
            return
        for choice in chunk["choices"]:
            self.ids += choice.get("token_ids") or []
            if choice["finish_reason"]:
                self.finish.append(choice["finish_reason"])


def streams_during(mesh: Mesh, fault: Callable[[], None]) -> list[Stream]:
    """Start streams, let the fault strike once all have brought tokens, and wait for their ends."""
    streams = [Stream(mesh, number) for number in range(STREAMS)]
    deadline = time.monotonic() + 60
    while not all(len(stream.ids) >= 5 for stream in streams):
        assert time.monotonic() < deadline, [(s.error, len(s.ids)) for s in streams]
        time.sleep(0.01)
    fault()
    for stream in streams:
        stream.join(120)
    return streams


@pytest.fixture(scope="module")
def reference(mesh):
    streams = streams_during(mesh, lambda: None)
    for stream in streams:
        assert stream.error == ""
        assert len(stream.ids) == TOKENS
    return [stream.ids for stream in streams]


def assert_as_if_nothing_had_happened(mesh: Mesh, streams: list[Stream], reference: list[list[int]]) -> None:
    for stream, expected in zip(streams, reference, strict=True):
        assert stream.error == "", f"{stream.error}\n{mesh.logs()}"
        assert stream.ids == expected
        assert stream.finish == ["length"]


def back_up(mesh: Mesh, part: str, old_pid: int) -> None:
    deadline = time.monotonic() + 60
    while (row := mesh.service(part))["state"] != "up" or row["pid"] == old_pid:
        assert time.monotonic() < deadline, f"{part} did not come back\n{mesh.logs()}"
        time.sleep(0.1)
    mesh.wait_ready(60)
    while len([i for i in mesh.status()["instances"] if str(i["state"]).lower() == "ready"]) < 2:
        assert time.monotonic() < deadline, f"not both instances are ready again\n{mesh.logs()}"
        time.sleep(0.1)


@pytest.mark.parametrize("part", ["w0", "scheduler", "nats", "redis", "kvstore"])
def test_streams_lose_and_repeat_nothing_when_a_part_is_killed(mesh, reference, part):
    process = mesh.processes()[part]
    streams = streams_during(mesh, lambda: process.signal(signal.SIGKILL))
    assert_as_if_nothing_had_happened(mesh, streams, reference)
    back_up(mesh, part, process.pid)


@pytest.mark.parametrize("part", ["scheduler", "w1", "nats"])
def test_streams_lose_and_repeat_nothing_when_a_part_stands_still_and_wakes_up(mesh, reference, part):
    process = mesh.processes()[part]

    def freeze() -> None:
        process.signal(signal.SIGSTOP)
        time.sleep(4)
        process.signal(signal.SIGCONT)

    streams = streams_during(mesh, freeze)
    assert_as_if_nothing_had_happened(mesh, streams, reference)
    back_up(mesh, part, 0)


def test_everything_is_served_while_redis_is_down_for_good(mesh, reference):
    redis = mesh.processes()["redis"]
    redis.signal(signal.SIGSTOP)
    try:
        streams = streams_during(mesh, lambda: None)
        assert_as_if_nothing_had_happened(mesh, streams, reference)
    finally:
        redis.signal(signal.SIGCONT)


def test_blocks_and_slots_are_all_free_again_after_the_faults(mesh):
    deadline = time.monotonic() + 20
    while True:
        instances = mesh.status()["instances"]
        if all(
            i["running"] == i["waiting"] == 0 and i["blocks_free"] == i["blocks_total"] for i in instances
        ):
            break
        assert time.monotonic() < deadline, instances
        time.sleep(0.1)
