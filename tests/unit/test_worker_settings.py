"""Settings of a worker, and the executor that follows from them."""

from pathlib import Path

import pytest

from services.worker.executors import make_runner, mock_executor
from services.worker.mock import MockCosts
from services.worker.runner import InlineRunner, ThreadRunner
from services.worker.settings import WorkerSettings, parse_bytes, parse_cores
from shared.runtime.settings import SettingsError, load


@pytest.mark.parametrize(
    ("text", "size"), [("1024", 1024), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("64kib", 64 << 10)]
)
def test_memory_is_read_in_bytes_or_binary_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1", "12 parsecs", "1MiB2", "9" * 400])
def test_memory_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="kv_memory"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "cores"), [("", ()), ("3", (3,)), ("0-3,6", (0, 1, 2, 3, 6)), (" 2 , 1-1,2", (1, 2))]
)
def test_cores_are_read_as_numbers_and_ranges(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1,,2", "1 2", "9999999"])
def test_cores_that_are_no_numbers_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="cores"):
        parse_cores(text)


def test_kv_is_kept_in_the_weights_dtype_on_a_cuda_device_unless_told_otherwise() -> None:
    assert WorkerSettings().kv_format == "float16"
    assert WorkerSettings(dtype="int8").kv_format == "float16"
    assert WorkerSettings(dtype="float32").kv_format == "float32"
    assert WorkerSettings(kv_dtype="float32").kv_format == "float32"
    assert WorkerSettings(device="cuda:1", dtype="bfloat16").kv_format == "bfloat16"
    assert WorkerSettings(device="cuda", kv_dtype="float32").kv_format == "float32"


def test_a_mock_without_costs_runs_on_the_loop_and_one_with_costs_in_a_thread() -> None:
    assert isinstance(make_runner(WorkerSettings(mock=True)), InlineRunner)
    assert isinstance(make_runner(WorkerSettings(mock=True, mock_step_s=0.001)), ThreadRunner)
    assert isinstance(make_runner(WorkerSettings(model_dir="/model")), ThreadRunner)


def test_without_a_model_folder_the_error_says_what_to_set() -> None:
    with pytest.raises(SettingsError, match="HORTATOR_MODEL_DIR"):
        make_runner(WorkerSettings())


def test_settings_come_from_the_environment() -> None:
    settings = load(
        WorkerSettings, {"HORTATOR_MOCK": "1", "HORTATOR_KV_MEMORY": "1GiB", "HORTATOR_INSTANCE": "w3"}
    )
    assert (settings.mock, settings.kv_memory, settings.instance, settings.slots) == (True, "1GiB", "w3", 512)
    assert load(WorkerSettings, {}).slots == 64


def test_a_mock_is_no_longer_than_the_model_it_stands_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 500, "max_position_embeddings": 128}')
    info = mock_executor(WorkerSettings(mock=True, model_dir=str(tmp_path), max_len=999), MockCosts()).info
    assert (info.vocab_size, info.max_len) == (500, 128)
    assert mock_executor(WorkerSettings(mock=True, max_len=999), MockCosts()).info.max_len == 999


@pytest.mark.parametrize("content", [None, "", "[]", '{"vocab_size": 5}', '{"vocab_size": "x"}'])
def test_a_folder_without_a_usable_config_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(SettingsError, match=r"config\.json does not say"):
        mock_executor(WorkerSettings(mock=True, model_dir=str(tmp_path)), MockCosts())
