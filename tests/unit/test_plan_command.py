"""`hortator plan` as a person and a program use it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from deploy.cli import _build
from deploy.plan import app
from shared.model.manifest import write_manifest
from tests.support.gguf_files import HIDDEN, KV_HEADS, LAYERS, weights, write

ROOT = Path(__file__).parents[2]
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
CLASSES = ("runtime", "weights", "kv", "activation", "workspace", "staging", "total")


def hortator_plan(
    *args: str, cache: Path | None = None, blocked: str = ""
) -> subprocess.CompletedProcess[str]:
    code = f"import sys\nfor name in {blocked.split()}: sys.modules[name] = None\n"
    code += "sys.argv = ['hortator', 'plan', *sys.argv[1:]]\nfrom deploy.cli import main\nmain()"
    env = os.environ | {"COLUMNS": "120"} | ({"HORTATOR_CACHE": str(cache)} if cache else {})
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def here(*args: str) -> Result:
    """The same in this process, which is faster."""
    return CliRunner().invoke(app, list(args))


def planned(*args: str, **more: Any) -> dict[str, Any]:
    done = hortator_plan(*args, "--json", **more)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("params", "weights"), [("10B", 20_000_000_000), ("100B", 200_000_000_000)])
def test_weights_at_16_bit_take_two_bytes_each(params: str, weights: int) -> None:
    plan = planned("--params", params, "--dtype", "float16", "--device", "H200")
    assert plan["ledger"]["weights_bytes"] == weights
    assert plan["fits"] == (params == "10B")
    assert plan["recommendation"]["needs_devices"] == (None if params == "10B" else 2)


def test_a_number_of_parameters_alone_says_nothing_of_kv_and_does_not_claim_that_a_device_is_enough() -> None:
    done = hortator_plan("--params", "10B", "--device", "L40S")
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert (rows["KV"], rows["activations"]) == (["?"], ["?"])
    assert "whether KV fits beside them is not known" in done.stdout
    assert "fits, as far as it is known" in done.stdout


@pytest.mark.parametrize(("reserved", "kv"), [("0", 125_829_120_000), ("8192", 503_316_480_000)])
def test_kv_without_grouped_heads_is_known(reserved: str, kv: int) -> None:
    shape = ("--layers", "60", "--hidden", "8000", "--concurrency", "32", "--context", "2048")
    plan = planned(*shape, "--reserved", reserved, "--device", "H200")
    assert plan["ledger"]["kv_bytes"] == kv
    if reserved != "0":
        assert any("25%" in line for line in plan["arithmetic"])


def test_the_ledger_has_its_classes_over_all_ranks_and_the_same_of_each(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_70B))
    plan = planned("--model", str(config), "--device", "L40S", "--count", "4", "--concurrency", "16")
    names = [f"{name}_bytes" for name in CLASSES]
    assert list(plan["ledger"]) == names
    assert len(plan["ranks"]) == 4
    for name in names:
        assert plan["ledger"][name] == sum(rank[name] for rank in plan["ranks"])
    assert plan["ledger"]["total_bytes"] == sum(plan["ledger"][name] for name in names[:-1])
    assert plan["model"]["parameters"] == 70_553_706_496
    assert plan["recommendation"]["tensor_parallel"] == 4
    kinds = {
        (o["data_parallel"] > 1, o["tensor_parallel"] > 1, o["pipeline_parallel"] > 1)
        for o in plan["options"]
    }
    assert {(True, False, False), (False, True, False), (False, False, True)} <= kinds
    assert all(o["step_ms"] > 0 and o["tok_s"] > 0 and "communication_share" in o for o in plan["options"])
    assert plan["block_tokens"] in (8, 16, 32, 64, 128)


def test_a_name_of_the_catalogue_is_planned_before_it_is_fetched(tmp_path: Path) -> None:
    plan = planned("--model", "smol", cache=tmp_path)
    assert plan["model"]["parameters"] == 134_515_008
    assert plan["model"]["served"]
    assert plan["fits"]
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_models_are_found_by_the_name_they_were_imported_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORTATOR_CACHE", str(tmp_path))
    folder = tmp_path / "models" / "big-0123456789ab-v2"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    write_manifest(folder, "big", (), "gguf", "")
    done = here("--model", "big", "--device", "H200", "--json")
    assert json.loads(done.stdout)["model"]["parameters"] == 70_553_706_496


def test_a_gguf_file_is_planned_by_its_header(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write(file, weights(1, "llama"))
    done = here("--model", str(file), "--device", "L4", "--context", "256", "--json")
    assert done.exit_code == 0, done.stderr
    model = json.loads(done.stdout)["model"]
    assert (model["layers"], model["hidden"], model["kv_heads"]) == (LAYERS, HIDDEN, KV_HEADS)
    assert model["parameters"] == sum(each.size for each in weights(1, "llama").values())


def test_the_command_line_plans_where_there_is_no_torch(tmp_path: Path) -> None:
    done = hortator_plan("--model", "smol", cache=tmp_path, blocked="torch numpy")
    assert done.returncode == 0, done.stderr
    assert "assumed, as nothing was measured" in done.stdout


def test_people_read_the_sums_the_options_and_one_recommendation(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    done = hortator_plan(
        *("--model", str(tmp_path), "--device", "L40S", "--count", "4", "--dtype", "bfloat16"),
        *("--concurrency", "16", "--context", "2048"),
    )
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "2 × 80 layers × 8 KV heads × 128 × 2 bytes = 327,680 bytes" in text
    assert "16 sequences × 2,048 tokens" in text
    assert "70,553,706,496 parameters × 2 bytes = 141.1 GB" in text
    assert "Use all 4 devices: 4 ranks (--tp 4)." in text
    assert "one device alone does not fit" in text
    assert "pipeline 4" in text
    assert "not served" in text
    assert "hortator up --model" in text
    assert "--tp 4" in text
    assert "--device cuda:0,cuda:1,cuda:2,cuda:3" in text
    assert "assumed, not measured" in text


def test_the_command_that_is_recommended_is_one_that_hortator_up_takes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    done = here("--model", str(tmp_path), "--device", "H100", "--count", "8", "--concurrency", "400")
    (line,) = [line for line in done.stdout.splitlines() if line.strip().startswith("hortator up")]
    up = get_command(_build()).commands["up"]  # type: ignore[attr-defined]
    up.make_context("up", line.split()[2:])


def test_a_measured_gpu_is_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"kind": "cuda", "name": "NVIDIA X1", "memory_bytes": 96 << 30, "read_gb_s": 2000.0}
    told |= {"matmul_gf_s": 400e3, "undisturbed": 1.0}
    measured = subprocess.CompletedProcess([], 0, json.dumps(told), "")
    monkeypatch.setattr("deploy.plan_inputs.subprocess.run", lambda *args, **kwargs: measured)
    plan = json.loads(here("--model", "smol", "--device", "measured", "--json").stdout)
    assert (plan["device"]["name"], plan["device"]["memory_bytes"]) == ("NVIDIA X1", 96 << 30)
    assert "measured copy rate" in plan["device"]["reach"]


def test_a_machine_that_cannot_be_measured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nModuleNotFoundError: No module named 'torch'")
    monkeypatch.setattr("deploy.plan_inputs.subprocess.run", lambda *args, **kwargs: failed)
    done = here("--model", "smol", "--device", "measured")
    assert done.exit_code == 1
    assert "No module named 'torch'" in done.stderr
    assert "--device cpu works without" in done.stderr


def test_ranks_of_one_machine_share_it() -> None:
    alone, split = (
        json.loads(here("--model", "smol", "--concurrency", "4", *more, "--json").stdout)
        for more in ([], ["--tp", "2"])
    )
    assert split["device"]["memory_bytes"] == pytest.approx(alone["device"]["memory_bytes"] / 2, rel=0.1)
    assert len(split["ranks"]) == 2
    assert split["options"][0]["step_ms"] == pytest.approx(alone["options"][0]["step_ms"], rel=0.15)
    assert "share" in " ".join(split["assumptions"])
    assert "--tp 2" in split["recommendation"]["sentence"]


def test_a_device_of_a_file_is_planned_with(tmp_path: Path) -> None:
    device = tmp_path / "x1.json"
    device.write_text('{"name": "X1", "memory_gb": 96, "read_gb_s": 2000, "tflops": 400, "link_gb_s": 100}')
    plan = planned("--params", "10B", "--device", str(device))
    assert plan["device"]["name"] == "X1"
    assert plan["device"]["memory_bytes"] == 96_000_000_000


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_picture_is_drawn_where_it_is_wanted(kind: str, tmp_path: Path) -> None:
    picture = tmp_path / f"plan.{kind}"
    done = here("--params", "10B", "--device", "H100", "--count", "2", "--picture", str(picture))
    assert done.exit_code == 0, done.stderr
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--model", "no-such-model"], "neither a folder"),
        (["--model", "no/such.gguf"], "no/such.gguf"),
        (["--model", "there-is-no.json"], "cannot be read"),
        (["--model", "x" * 5000], "name too long"),
        (["--model", "~nobody-of-that-name/model"], "neither a folder"),
        (["--params", "ten"], "10B"),
        (["--params", "10B", "--device", "H9000"], "Known: B200"),
        (["--params", "10B", "--device", "none.json"], "cannot be read"),
        (["--params", "10B", "--model", "smol"], "leave --params"),
        (["--layers", "60"], "needed together"),
        (["--layers", "60", "--hidden", "8000", "--heads", "7"], "multiple of --heads"),
        (["--model", "smol", "--context", "10000"], "trained for 8192"),
        (["--model", "smol", "--reserved", "100"], "less than the --context"),
        (["--model", "smol", "--context", "64", "--output", "64"], "at least one is the prompt"),
        (["--model", "smol", "--tp", "10", "--count", "10"], "only 9 query heads"),
        (["--model", "smol", "--tp", "4"], "only --count 1"),
        (["--params", "10B", "--picture", "plan.gif"], ".png or .svg"),
        (["--params", "10B", "--picture", "no/such/folder/plan.png"], "there is no folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "asked",
)
def test_what_cannot_be_planned_is_answered_with_what_and_what_next(args: list[str], said: str) -> None:
    done = here(*args, *([] if "--device" in args else ["--device", "H200"]))
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("hortator plan: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--gap-ms", "--link-gb-s", "--link-us"])
@pytest.mark.parametrize("value", ["inf", "nan", "1e300"])
def test_rates_without_end_are_refused_as_no_program_could_read_their_plan(option, value):
    refused = here("--params", "7B", option, value, "--json")
    assert refused.exit_code == 2
    assert option in refused.output
