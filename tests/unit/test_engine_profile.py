"""`hortator profile engine`: what a step's time goes to, measured on a tiny model."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from engine_support import save_tiny

from deploy.profile import draw
from services.worker.engine import profile
from services.worker.engine.executor import EngineOptions
from services.worker.engine.profile import UNACCOUNTED, Workload, profile_engine

WORKLOADS = (Workload("decode", 3, 40, 1), Workload("prefill", 1, 0, 64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiled") / "model"
    save_tiny("llama", path, hidden_size=192, intermediate_size=512)
    return path


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_parts_of_a_step_add_up_to_the_step(folder, kernels):
    options = EngineOptions(kv_bytes=16 << 20, measure_s=0.0, kernels=kernels)
    report = profile_engine(folder, options, WORKLOADS, seconds=0.2)
    assert [p.workload for p in report.profiles] == ["decode", "prefill"]
    for found in report.profiles:
        parts = {op.name: op for op in found.ops}
        assert {"batch building", "attention", "head", "sampling", "bookkeeping"} < parts.keys()
        assert sum(op.seconds for op in found.ops) == pytest.approx(found.step_s)
        assert sum(op.share for op in found.ops) == pytest.approx(1.0)
        # How much lies between the clocks is for a real model to show: `hortator profile engine`.
        assert -0.01 < parts[UNACCOUNTED].share < 1.0
        assert all(op.seconds >= 0 for op in found.ops if op.name != UNACCOUNTED)
        assert parts["down"].gf_s > 0
        assert parts["attention"].gb_s > 0
        assert parts["norm"].gf_s is None
    assert report.peaks.read_gb_s > 0.1
    assert report.peaks.matmul_gf_s > 0.1


def test_a_workload_that_does_not_fit_is_refused_with_what_would_help(folder):
    options = EngineOptions(kv_bytes=1 << 20, measure_s=0.0)
    with pytest.raises(ValueError, match="raise --kv-memory"):
        profile_engine(folder, options, (Workload("decode, batch 32", 32, 250, 1),), seconds=0.01)


def test_a_model_of_short_sequences_is_refused_by_its_length_not_for_want_of_memory(folder):
    options = EngineOptions(kv_bytes=16 << 20, measure_s=0.0)
    with pytest.raises(ValueError, match="this model's have up to 256"):
        profile_engine(folder, options, (Workload("decode", 1, 300, 1),), seconds=0.01)


def test_the_command_prints_one_json_object_and_the_plot_is_drawn(folder, tmp_path, capsys):
    options = ["--kv-memory", "16MiB", "--seconds", "0.05", "--dtype", "float32"]
    assert profile.main([str(folder), *options], WORKLOADS) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["detail"]["dtype"] == "float32"
    draw(report, tmp_path / "shares.png")
    assert (tmp_path / "shares.png").stat().st_size > 5000


def test_a_folder_that_is_no_model_ends_the_command_with_the_reason(tmp_path):
    command = [sys.executable, "-m", "deploy.cli", "profile", "engine", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "config.json" in done.stderr


def test_a_plot_that_cannot_be_put_down_is_refused_before_anything_is_measured(tmp_path):
    command = [
        sys.executable,
        "-m",
        "deploy.cli",
        "profile",
        "engine",
        "--plot",
        str(tmp_path / "no" / "x.png"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"there is no folder {tmp_path / 'no'}" in done.stderr
