import json
from pathlib import Path

import pytest

from shared.model import ModelError, open_folder
from shared.model.folder import ModelFolder

CONFIG = {"model_type": "llama", "vocab_size": 8, "max_position_embeddings": 64, "eos_token_id": 2}


def write_safetensors(path: Path, values: bytes = bytes(16)) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, len(values)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + values)


def make(path: Path, **config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    write_safetensors(path / "model.safetensors")
    return path


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_folder(path)
    return str(caught.value)


def test_a_plain_folder_opens_with_its_facts(tmp_path):
    folder = open_folder(make(tmp_path / "tiny"))
    assert isinstance(folder, ModelFolder)
    assert (folder.name, folder.context_length, folder.vocab_size, folder.eos_ids) == ("tiny", 64, 8, (2,))
    assert [w.name for w in folder.weights] == ["model.safetensors"]
    assert not folder.has_tokenizer


def test_ends_of_sequence_come_from_both_files_without_repetition(tmp_path):
    make(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert open_folder(tmp_path).eos_ids == (5, 2)


def test_pickle_weights_are_refused_with_a_way_out(tmp_path):
    make(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    text = refused(tmp_path)
    assert "pickle" in text
    assert "safetensors" in text


def test_pickle_files_beside_safetensors_are_ignored(tmp_path):
    make(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert [w.suffix for w in open_folder(tmp_path).weights] == [".safetensors"]


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_a_folder_brings_along_is_refused(tmp_path, file):
    make(tmp_path)
    (tmp_path / file).write_text(json.dumps({**CONFIG, "auto_map": {"AutoModel": "evil.Model"}}))
    assert "auto_map" in refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 20, -1])
def test_a_cut_off_download_is_found_before_loading(tmp_path, keep):
    make(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "download it again" in refused(tmp_path)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "model.bin", "/etc/passwd"])
def test_an_index_cannot_name_files_elsewhere_or_of_another_kind(tmp_path, shard):
    make(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    assert "only .safetensors" in refused(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    make(tmp_path)
    index = {"weight_map": {"w": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors is missing" in refused(tmp_path)


@pytest.mark.parametrize("body", ["[]", "{", '{"model_type": "llama"}', "[" * 100_000])
def test_a_damaged_config_is_refused_not_raised_through(tmp_path, body):
    make(tmp_path)
    (tmp_path / "config.json").write_text(body)
    assert "config.json" in refused(tmp_path)


def test_fingerprint_follows_the_weights_and_not_the_folder_name(tmp_path):
    a, b = open_folder(make(tmp_path / "a")), open_folder(make(tmp_path / "b"))
    assert a.fingerprint == b.fingerprint
    write_safetensors(tmp_path / "b" / "model.safetensors", b"\1" + bytes(15))
    assert open_folder(tmp_path / "b").fingerprint != a.fingerprint


def test_the_chat_template_is_found_in_each_place_it_may_stand(tmp_path):
    make(tmp_path)
    assert open_folder(tmp_path).chat_template is None
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_folder(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert open_folder(tmp_path).chat_template == "J"
