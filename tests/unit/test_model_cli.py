"""`hortator model` as a person uses it, on a cache of its own."""

import json

import pytest
from typer.testing import CliRunner

from deploy.model_cli import app
from shared.model.cache import ModelCache
from shared.model.conversion import CONVERTER
from shared.model.manifest import MANIFEST, write_manifest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HORTATOR_CACHE", str(tmp_path))

    def build(folder):
        (folder / "config.json").write_text('{"vocab_size": 8, "max_position_embeddings": 64}')
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        write_manifest(folder, "mine", (), "gguf sha256:0", "", CONVERTER)

    cache = ModelCache(tmp_path)
    cache.ensure("mine-000", build)
    return cache


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output + str(result.exception or "")


def older(cache, name):
    """A conversion by the first version, which did not write its number."""

    def build(folder):
        (folder / "config.json").write_text('{"vocab_size": 8, "max_position_embeddings": 64}')
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        write_manifest(folder, name, (), "gguf sha256:1", "")
        manifest = json.loads((folder / MANIFEST).read_text())
        del manifest["converter"]
        (folder / MANIFEST).write_text(json.dumps(manifest))

    cache.ensure(f"{name}-111", build)


def test_pull_of_what_is_there_prints_its_folder_and_that_it_cannot_chat(cache):
    status, text = run("pull", "mine")
    assert status == 0
    assert f"mine: {cache.folder('mine-000')}\n" in text
    assert "no chat template" in text


def test_list_shows_known_and_imported_models(cache):
    status, text = run("list")
    assert status == 0
    for word in ("smollm2", "mine-000", str(cache.models)):
        assert word in text.replace("\n", "")


def test_in_a_narrow_terminal_a_name_stays_whole(cache, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name = f"{'a-long-name-' * 4}q8_0"
    older(cache, name)
    assert f"{name}-111 " in run("list")[1]


def test_verify_tells_whole_from_damaged_folders(cache):
    assert run("verify") == (0, "mine-000: 2 files are intact\n")
    (cache.folder("mine-000") / "config.json").write_text("{}")
    status, text = run("verify", "mine-000")
    assert status == 1
    assert "config.json has" in text
    assert "hortator model rm mine-000" in text


def test_what_an_older_converter_made_is_never_served_but_listed_and_removed(cache):
    older(cache, "old")
    older(cache, "mine")
    assert run("pull", "mine")[0] == 0  # the current one of that name
    status, text = run("pull", "old")
    assert status == 1
    assert "converted by another version" in text
    assert "import" in text
    text = run("list")[1]
    assert "stale: gguf sha256:1" in text
    assert "2 stale" in text
    killed = cache.models / ".old-222.build-x"
    killed.mkdir()
    (killed / "half").write_text("x")
    status, text = run("rm", "--stale")
    assert status == 0
    assert "old-111" in text
    assert "mine-111" in text
    assert cache.names() == ["mine-000"]
    assert not killed.exists()
    assert run("rm", "--stale") == (0, "nothing is stale\n")


def test_rm_takes_folders_and_unique_model_names(cache):
    older(cache, "mine")
    status, text = run("rm", "mine")
    assert status == 1
    assert "mine-000 or mine-111" in text
    assert run("rm", "mine-111")[0] == 0
    assert run("rm", "mine")[0] == 0
    assert cache.names() == []
    assert run("rm", "mine")[0] == 1


def test_a_folder_with_a_damaged_manifest_hides_no_other_and_can_be_removed(cache):
    older(cache, "bad")
    (cache.folder("bad-111") / MANIFEST).write_text("{")
    assert run("pull", "mine")[0] == 0
    assert "damaged manifest" in run("list")[1]
    assert run("rm", "bad-111")[0] == 0
    assert cache.names() == ["mine-000"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pull", "gpt-17"], "Known: smollm2"),
        (["verify", "gpt-17"], "not in the cache"),
        (["rm"], "--stale"),
        (["rm", "../x"], "not one folder"),
        (["import", "nothing.gguf"], "not a file"),
        (["import", __file__], "not a whole GGUF"),
        (["import", __file__, "--name", "../x"], "--name"),
    ],
)
def test_what_cannot_be_done_is_said_in_words(cache, arguments, words):
    status, text = run(*arguments)
    assert status == 1
    assert words in text
