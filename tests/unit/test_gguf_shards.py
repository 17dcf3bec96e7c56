"""Models in several GGUF files, as llama-gguf-split writes them."""

import importlib

import pytest
from gguf import GGUFReader, GGUFWriter
from gguf import GGUFValueType as Value
from safetensors.torch import load_file

from shared.model import ModelError, resolve
from shared.model.cache import ModelCache
from tests.support.gguf_files import rewrite, weights, write

# `shared.model.resolve` the function hides the module of that name.
resolving = importlib.import_module("shared.model.resolve")


def split(whole, count: int):
    """`whole` cut into `count` files beside it; the first holds the metadata."""
    tensors = GGUFReader(whole).tensors
    files = [whole.with_name(f"big-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    for number, file in enumerate(files):
        writer = GGUFWriter(file, "llama")
        for tensor in tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data.copy(), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        said = {
            "split.no": (Value.UINT16, number),
            "split.count": (Value.UINT16, count),
            "split.tensors.count": (Value.INT32, len(tensors)),
        }
        if number == 0:
            said |= {
                name: (field.types[0], field.contents())
                for name, field in GGUFReader(whole).fields.items()
                if not name.startswith(("GGUF.", "general.architecture"))
            }
        file.write_bytes(rewrite(file, said))
    return files


@pytest.fixture
def files(tmp_path):
    return split(write(tmp_path / "whole.gguf", weights(5, "llama")), 3)


def test_any_file_of_a_model_stands_for_all_and_they_are_converted_once(tmp_path, files):
    cache = ModelCache(tmp_path / "cache")
    one = resolve(str(tmp_path / "whole.gguf"), cache, quiet=True)
    found = [resolve(str(file), cache, quiet=True) for file in files]
    assert {folder.name for folder in found} == {"big"}
    assert len({folder.path for folder in found}) == 1
    whole, parts = load_file(one.weights[0]), load_file(found[0].weights[0])
    assert whole.keys() == parts.keys()
    assert all((whole[name] == parts[name]).all() for name in whole)


def test_a_changed_file_among_several_is_converted_anew(tmp_path, files):
    cache = ModelCache(tmp_path / "cache")
    before = resolve(str(files[0]), cache, quiet=True)
    body = bytearray(files[2].read_bytes())
    body[-1] ^= 1
    files[2].write_bytes(body)
    assert resolve(str(files[0]), cache, quiet=True).path != before.path


def test_files_that_change_while_they_are_converted_are_not_served(tmp_path, files, monkeypatch):
    """What was read would be kept as the model that the files were before."""
    cache, convert = ModelCache(tmp_path / "cache"), resolving._convert

    def disturbed(file, folder, progress):
        convert(file, folder, progress)
        files[1].write_bytes(files[1].read_bytes())

    monkeypatch.setattr(resolving, "_convert", disturbed)
    with pytest.raises(ModelError, match="was changed while it was converted; start again"):
        resolve(str(files[0]), cache, quiet=True)
    assert cache.names() == []
    monkeypatch.setattr(resolving, "_convert", convert)
    assert resolve(str(files[0]), cache, quiet=True).weights


def test_a_missing_file_is_named(tmp_path, files):
    files[1].unlink()
    with pytest.raises(ModelError, match=r"big-00002-of-00003\.gguf"):
        resolve(str(files[0]), ModelCache(tmp_path / "cache"), quiet=True)


def test_files_under_wrong_names_are_refused(tmp_path, files):
    files[1].rename(tmp_path / "x")
    files[2].rename(files[1])
    (tmp_path / "x").rename(files[2])
    with pytest.raises(ModelError, match="file 3 of 3, but its name makes it 2 of 3"):
        resolve(str(files[0]), ModelCache(tmp_path / "cache"), quiet=True)
    alone = tmp_path / "alone.gguf"
    files[0].rename(alone)
    with pytest.raises(ModelError, match="file 1 of 3, but its name makes it 1 of 1"):
        resolve(str(alone), ModelCache(tmp_path / "cache"), quiet=True)


def test_numbers_that_cannot_be_are_refused(tmp_path):
    file = tmp_path / "m-00004-of-00003.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="rename it"):
        resolve(str(file), ModelCache(tmp_path / "cache"), quiet=True)
