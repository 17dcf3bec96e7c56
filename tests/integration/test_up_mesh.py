"""`hortator up --mock` as real processes: it serves, survives the death of its parts, and leaves nothing."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from deploy.down import leftovers
from deploy.processes import identify
from deploy.rundir import RunDir
from deploy.status import INSTANCE_FIELDS
from tests.support.mesh import HORTATOR, Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

PARTS = ("nats", "redis", "kvstore", "scheduler", "w0", "w1", "gateway")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    with Mesh.start(tmp_path_factory.mktemp("mesh"), "--mock", "--instances", "2") as running:
        yield running


def complete(mesh: Mesh, tokens: int = 8, timeout_s: float = 60.0) -> dict:
    body = {"model": "smol", "prompt": list(range(100, 140)), "max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{mesh.base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return json.load(answer)


def test_a_request_goes_through_the_whole_mesh(mesh):
    assert complete(mesh, 8)["usage"]["completion_tokens"] == 8


def test_status_lists_every_process_and_every_instance(mesh):
    status = mesh.status()
    assert status["state"] == "ready"
    assert [row["instance"] for row in status["services"]] == [
        "nats",
        "redis",
        "kvstore",
        "w0",
        "w1",
        "scheduler",
        "gateway",
    ]
    for row in status["services"]:
        assert {"service", "instance", "rank", "pid", "state", "uptime_s"} <= row.keys()
        assert row["state"] == "up"
        assert identify(row["pid"]) is not None
        assert row["uptime_s"] > 0
    assert [row["rank"] for row in status["services"] if row["service"] == "worker"] == [0, 0]
    assert sorted(row["id"] for row in status["instances"]) == ["w0", "w1"]
    for row in status["instances"]:
        assert tuple(row) == (*INSTANCE_FIELDS, "engine", "group", "memory")
        assert row["engine"]["executor"] == "mock"
        assert None not in row.values(), row
        assert row["role"] == "mixed"
        assert row["state"].lower() == "ready"
        assert 0 < row["blocks_free"] <= row["blocks_total"]


def test_status_for_people_names_the_parts(mesh):
    shown = mesh.hortator("status")
    assert shown.returncode == 0
    for part in PARTS:
        assert part in shown.stdout


def test_every_service_answers_health_and_metrics(mesh):
    for row in mesh.status()["services"]:
        if row["service"] in ("nats", "redis"):
            continue
        for path in ("/health", "/metrics"):
            with urllib.request.urlopen(f"http://{row['http']}{path}", timeout=5) as answer:
                assert answer.status == 200, (row["service"], path)


def test_no_service_was_denied_anything_it_asked_of_the_broker(mesh):
    complete(mesh)
    for row in mesh.status()["services"]:
        if row["service"] in ("nats", "redis"):
            continue
        with urllib.request.urlopen(f"http://{row['http']}/metrics", timeout=5) as answer:
            metrics = answer.read().decode()
        errors = [line for line in metrics.splitlines() if line.startswith("hortator_bus_errors_total")]
        assert [line for line in errors if 'kind="denied"' in line] == [], row["service"]


def test_tap_prints_frames_without_knowing_their_schema(mesh):
    shown = mesh.hortator("tap", "hortator.v1.scheduler.beacon", "--count", "2")
    assert shown.returncode == 0, shown.stderr
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["subject"] == "hortator.v1.scheduler.beacon"
        assert line["frame"]["kind"] == "beacon"
        assert line["size"] > 0
        assert line["time"].startswith("20")


def test_secrets_are_for_the_user_only_and_not_on_any_command_line(mesh):
    credentials = json.loads((mesh.run_dir / "credentials.json").read_text())
    secrets = [*credentials["nats"].values(), *credentials["redis"].values()]
    for path in (mesh.run_dir / "credentials.json", *(mesh.run_dir / "conf").iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path
    assert mesh.run_dir.stat().st_mode & 0o077 == 0
    for process in mesh.processes().values():
        command = Path(f"/proc/{process.pid}/cmdline").read_text()
        assert not any(secret in command for secret in secrets)
    for log in (mesh.run_dir / "log").iterdir():
        text = log.read_text()
        assert not any(secret in text for secret in secrets), log


def test_a_second_mesh_in_the_same_directory_is_refused(mesh):
    again = mesh.hortator("up", "--mock", "--http", "127.0.0.1:0")
    assert again.returncode == 1
    assert "already running" in again.stderr
    assert "hortator down --run-dir" in again.stderr
    mesh.wait_ready(10)


def test_a_port_in_use_is_named(mesh, tmp_path):
    port = mesh.base_url.rpartition(":")[2]
    clash = subprocess.run(
        [*HORTATOR, "up", "--mock", "--run-dir", str(tmp_path), "--http", f"127.0.0.1:{port}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert clash.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in clash.stderr


@pytest.mark.parametrize("part", PARTS)
def test_a_killed_part_comes_back_and_the_mesh_serves_again(mesh, part):
    before = mesh.processes()[part]
    before.signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while (row := mesh.service(part))["pid"] in (None, before.pid) or row["state"] != "up":
        assert time.monotonic() < deadline, f"{part} did not come back: {row}\n{mesh.logs()}"
        time.sleep(0.05)
    assert row["restarts"] >= 1
    mesh.wait_ready(60)
    assert complete(mesh, 8)["usage"]["completion_tokens"] == 8


def test_two_meshes_run_side_by_side(mesh, tmp_path):
    with Mesh.start(tmp_path, "--mock") as second:
        assert second.base_url != mesh.base_url
        assert not set(second.processes().values()) & set(mesh.processes().values())
        for one in (mesh, second):
            assert complete(one)["usage"]["completion_tokens"] == 8
    assert complete(mesh)["usage"]["completion_tokens"] == 8


def test_nothing_outlives_a_supervisor_that_was_killed(tmp_path):
    mesh = Mesh.launch(tmp_path, "--mock")
    processes = mesh.processes()
    assert len(processes) == 6
    mesh.process.kill()
    mesh.process.wait()
    for name, process in processes.items():
        assert process.wait(5.0), f"{name} still runs"
    assert mesh.status()["state"] == "dead"
    down = mesh.hortator("down")
    assert down.returncode == 0, down.stderr
    mesh.assert_nothing_left()


def test_down_stops_a_mesh_whose_parts_were_killed_or_frozen(tmp_path):
    mesh = Mesh.launch(tmp_path, "--mock")
    processes = mesh.processes()
    processes["w0"].signal(signal.SIGKILL)
    processes["kvstore"].signal(signal.SIGSTOP)
    down = mesh.hortator("down")
    assert down.returncode == 0, down.stderr
    assert mesh.process.wait(5) == 0
    assert not any(process.alive for process in processes.values())
    mesh.assert_nothing_left()
    again = mesh.hortator("down")
    assert again.returncode == 0
    assert "nothing runs" in again.stdout


def test_down_does_not_touch_a_process_that_got_a_recorded_pid(tmp_path):
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        real = identify(bystander.pid)
        assert real is not None
        run = RunDir(tmp_path)
        run.claim()
        stale = {"pid": real.pid, "start": real.start - 100}
        row = {"name": "w0", "service": "worker", "instance": "w0", "state": "up", **stale}
        run.write_state({"state": "ready", "supervisor": stale, "services": [row]})
        run.drop_claim()
        down = subprocess.run([*HORTATOR, "down", "--run-dir", str(tmp_path)], timeout=60, check=False)
        assert down.returncode == 0
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_detached_mesh_answers_when_the_command_returns_and_stops_with_down(tmp_path):
    run_dir = tmp_path / "run"
    up = subprocess.run(
        [*HORTATOR, "up", "--mock", "--detach", "--run-dir", str(run_dir), "--http", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert up.returncode == 0, up.stdout + up.stderr
    url = next(line.split()[1] for line in up.stdout.splitlines() if line.startswith("ready http"))
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            assert answer.status == 200
    finally:
        down = subprocess.run(
            [*HORTATOR, "down", "--run-dir", str(run_dir)],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
    assert down.returncode == 0, down.stderr
    run = RunDir(run_dir)
    assert leftovers(run, run.read_state()) == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0


def test_a_mesh_interrupted_while_it_starts_leaves_nothing(tmp_path):
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        [*HORTATOR, "up", "--mock", "--run-dir", str(run_dir), "--http", "127.0.0.1:0"],
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    run = RunDir(run_dir)
    while not any(row["pid"] for row in (run.read_state() or {}).get("services", [])):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert leftovers(run, run.read_state()) == []
    assert sorted(path.name for path in run_dir.iterdir()) == ["log", "state.json"]


def test_an_unknown_model_is_refused_before_anything_starts(tmp_path):
    up = subprocess.run(
        [
            *HORTATOR,
            "up",
            "--model",
            "no-such-model",
            "--run-dir",
            str(tmp_path / "run"),
            "--http",
            "127.0.0.1:0",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert up.returncode == 1
    assert "no-such-model" in up.stderr
    assert not (tmp_path / "run").exists()


def test_a_mesh_with_keys_becomes_ready_and_serves_those_who_have_one(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# who may use this mesh\nsesame-1234567890 red\nother-0987654321\n")
    with Mesh.start(tmp_path, "--mock", "--api-key-file", str(keys)) as mesh:
        assert "Authorization: Bearer" in mesh.output.read_text()
        assert "sesame" not in mesh.output.read_text()
        assert mesh.get("/health")[0] == 200
        assert mesh.get("/v1/models")[0] == 401
        request = urllib.request.Request(
            f"{mesh.base_url}/v1/models", headers={"Authorization": "Bearer sesame-1234567890"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert json.load(answer)["data"][0]["id"] == "smollm2-135m-instruct"


def test_a_setting_a_service_cannot_use_ends_the_start_with_its_reason_alone(tmp_path):
    up = subprocess.run(
        [
            *(*HORTATOR, "up", "--mock", "--run-dir", str(tmp_path / "run"), "--http", "127.0.0.1:0"),
            *("--set", "worker.model_dir=/nope"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert up.returncode == 1
    assert "w0 cannot start: HORTATOR_MODEL_DIR=/nope: there is no such folder" in up.stdout
    assert "{" not in up.stdout
    run = RunDir(tmp_path / "run")
    assert leftovers(run, run.read_state()) == []
