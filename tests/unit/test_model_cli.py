"""`hortator model` as a person uses it, on a cache of its own."""

import pytest
from typer.testing import CliRunner

from deploy.model_cli import app
from shared.model.cache import ModelCache
from shared.model.manifest import write_manifest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HORTATOR_CACHE", str(tmp_path))

    def build(folder):
        (folder / "config.json").write_text('{"vocab_size": 8, "max_position_embeddings": 64}')
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        write_manifest(folder, "mine", (), "gguf sha256:0", "")

    cache = ModelCache(tmp_path)
    cache.ensure("mine-000", build)
    return cache


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output + str(result.exception or "")


def test_pull_of_what_is_there_prints_its_folder(cache):
    assert run("pull", "mine") == (0, f"mine: {cache.folder('mine-000')}\n")


def test_list_shows_known_and_imported_models(cache):
    status, text = run("list")
    assert status == 0
    for word in ("smollm2", "mine-000", str(cache.models)):
        assert word in text.replace("\n", "")


def test_verify_tells_whole_from_damaged_folders(cache):
    assert run("verify") == (0, "mine-000: 2 files are intact\n")
    (cache.folder("mine-000") / "config.json").write_text("{}")
    status, text = run("verify", "mine-000")
    assert status == 1
    assert "config.json has" in text
    assert "pull" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pull", "gpt-17"], "Known: smollm2"),
        (["verify", "gpt-17"], "not in the cache"),
        (["import", "nothing.gguf"], "not a file"),
        (["import", __file__], "not a whole GGUF"),
        (["import", __file__, "--name", "../x"], "--name"),
    ],
)
def test_what_cannot_be_done_is_said_in_words(cache, arguments, words):
    status, text = run(*arguments)
    assert status == 1
    assert words in text
