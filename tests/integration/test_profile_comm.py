"""`hortator profile comm` on a small model: really forms groups, measures and draws."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.test_group_mock import until_gone

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from engine_support import save_tiny

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", "profile", "comm", *args],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny("llama", path, num_attention_heads=6, num_key_value_heads=2)
    return path


def test_times_choices_and_plans_are_told_for_programs_and_drawn(model: Path, tmp_path: Path) -> None:
    plot = tmp_path / "comm.png"
    done = run("--model", str(model), "--tp", "2", "--json", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    communication = report["communication"]
    algorithms = {timing["algorithm"] for timing in communication["timings"]}
    assert {"one-shot", "two-shot", "ring", "tree"} <= algorithms
    assert set(communication["fits"]) == algorithms
    assert communication["entries"][-1]["algorithm"] in algorithms
    assert all(timing["seconds"] > 0 for timing in communication["timings"])
    decode = report["steps"][0]
    assert (decode["tokens"], decode["chunks"]) == (1, 1)
    assert decode["algorithms"][0] in algorithms
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_tables_are_printed_for_people(model: Path) -> None:
    done = run("--model", str(model), "--tp", "3")
    assert done.returncode == 0, done.stderr
    assert "3 ranks" in done.stdout
    assert "one-shot" in done.stdout
    assert "GB/s" in done.stdout


def test_a_split_that_cannot_be_is_refused_in_words(model: Path) -> None:
    done = run("--model", str(model), "--tp", "7")
    assert done.returncode == 1
    assert "lower --tp" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_goes_on_measuring_for_a_command_that_was_killed(model: Path) -> None:
    argv = [sys.executable, "-m", "deploy.cli", "profile", "comm", "--model", str(model), "--tp", "2"]
    command = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (ranks := [pid for lead in children(command.pid) for pid in children(lead)]):
            assert command.poll() is None
            time.sleep(0.01)
        (lead,) = children(command.pid)
    finally:
        command.kill()
        command.wait()
    # A rank that still imports notices when it is done with that.
    until_gone([lead, *ranks], 20.0)


def children(of: int) -> list[int]:
    """Pids of the processes that one of its threads has started."""
    try:
        threads = [(thread / "children").read_text() for thread in Path(f"/proc/{of}/task").iterdir()]
    except FileNotFoundError:
        return []
    return [int(pid) for started in threads for pid in started.split()]
