"""A worker that is given a GGUF file's path instead of a folder."""

import pytest

import services.worker.__main__ as program
from shared.model import open_folder
from shared.runtime.settings import CannotStart
from tests.support.gguf_files import weights, write


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What the program would have run with."""
    found = []
    monkeypatch.setattr(program, "run", lambda settings, *_: found.append(settings))
    monkeypatch.setenv("HORTATOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HORTATOR_INSTANCE", "w0")
    return found


def test_a_gguf_file_is_converted_and_its_folder_served(started, monkeypatch, tmp_path):
    monkeypatch.setenv("HORTATOR_MODEL_DIR", str(write(tmp_path / "Mine.gguf", weights(1, "llama"))))
    program.main()
    (settings,) = started
    assert open_folder(tmp_path / settings.model_dir).name == "mine"


def test_a_damaged_file_ends_the_worker_with_the_reason(started, monkeypatch, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HORTATOR_MODEL_DIR", str(tmp_path / "m.gguf"))
    with pytest.raises(CannotStart, match="not a whole GGUF"):
        program.main()
    assert not started
