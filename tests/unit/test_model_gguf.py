"""Import of GGUF files written here with the reference writer, against the values that went in."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from shared.model import ModelError, resolve
from shared.model.cache import ModelCache
from shared.model.gguf_config import llama3_factors
from shared.model.gguf_import import import_gguf
from shared.model.progress import silent
from shared.model.resolve import import_file
from tests.support.gguf_files import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, interleave, weights, write


def convert(file: Path, out: Path):
    out.mkdir(exist_ok=True)
    import_gguf(file, out, silent)
    tensors = load_file(out / "model.safetensors")
    return tensors, json.loads((out / "config.json").read_text())


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        (Kind.F32, "float32"),
        (Kind.F16, "float16"),
        (Kind.BF16, "bfloat16"),
        (Kind.Q8_0, "float32"),
        (Kind.Q5_0, "float32"),
        (Kind.Q5_1, "float32"),
        (Kind.Q4_0, "float32"),
        (Kind.Q4_1, "float32"),
    ],
)
def test_every_tensor_comes_out_as_its_dequantised_values(tmp_path, kind, kept):
    source = weights(1, "qwen2")
    made, config = convert(
        write(tmp_path / "m.gguf", source, kind, arch="qwen2", pre="qwen2"), tmp_path / "out"
    )
    q = source["blk.1.ffn_down.weight"]
    wanted = q if kind == Kind.F32 else dequantize(quantize(q, kind), kind)
    assert str(made["model.layers.1.mlp.down_proj.weight"].dtype) == f"torch.{kept}"
    assert str(made["model.norm.weight"].dtype) == "torch.float32"
    np.testing.assert_array_equal(made["model.layers.1.mlp.down_proj.weight"].float(), wanted)
    np.testing.assert_array_equal(made["model.layers.1.self_attn.q_proj.bias"], source["blk.1.attn_q.bias"])
    assert config["model_type"] == "qwen2"
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-5


def test_query_and_key_rows_of_llama_files_are_put_back_in_order(tmp_path):
    wanted = weights(2, "llama")
    stored = dict(wanted)
    for i in range(LAYERS):
        stored[f"blk.{i}.attn_q.weight"] = interleave(wanted[f"blk.{i}.attn_q.weight"], HEADS)
        stored[f"blk.{i}.attn_k.weight"] = interleave(wanted[f"blk.{i}.attn_k.weight"], KV_HEADS)
    made, _ = convert(write(tmp_path / "m.gguf", stored), tmp_path / "out")
    for i in range(LAYERS):
        for letter in "qkv":
            np.testing.assert_array_equal(
                made[f"model.layers.{i}.self_attn.{letter}_proj.weight"],
                wanted[f"blk.{i}.attn_{letter}.weight"],
            )


def test_cutting_tensors_into_slices_changes_nothing(tmp_path, monkeypatch):
    file = write(tmp_path / "m.gguf", weights(3, "llama"), Kind.Q8_0)
    whole, _ = convert(file, tmp_path / "whole")
    monkeypatch.setattr("shared.model.gguf_import._SLICE_VALUES", 7 * HIDDEN)
    sliced, _ = convert(file, tmp_path / "sliced")
    for name, values in whole.items():
        np.testing.assert_array_equal(sliced[name], values)


def test_query_and_key_norms_of_qwen3_are_kept(tmp_path):
    source = weights(4, "qwen3")
    made, config = convert(write(tmp_path / "m.gguf", source, arch="qwen3", pre="qwen2"), tmp_path / "out")
    np.testing.assert_array_equal(
        made["model.layers.0.self_attn.k_norm.weight"], source["blk.0.attn_k_norm.weight"]
    )
    assert config["head_dim"] == HEAD_DIM


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_parameters_are_found_again_from_the_stored_factors(tmp_path, factor):
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    factors = llama3_factors(10000.0, HEAD_DIM, {**scaling, "original_max_position_embeddings": 512})
    source = {**weights(5, "llama"), "rope_freqs.weight": np.array(factors, dtype=np.float32)}
    _, config = convert(write(tmp_path / "m.gguf", source, pre="llama-bpe"), tmp_path / "out")
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["rope_scaling"]["factor"] == factor
    assert config["rope_scaling"]["original_max_position_embeddings"] == 512


def test_factors_that_follow_no_known_rule_are_refused(tmp_path):
    source = {**weights(5, "llama"), "rope_freqs.weight": np.linspace(1, 3, HEAD_DIM // 2, dtype=np.float32)}
    with pytest.raises(ModelError, match="rope_freqs"):
        convert(write(tmp_path / "m.gguf", source), tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"arch": "gemma2"}, "gemma2"),
        ({"model": "bert"}, "'bert'"),
        ({"pre": "deepseek-llm"}, "deepseek-llm"),
        ({"extra": lambda w: w.add_expert_count(8)}, "experts"),
        ({"extra": lambda w: w.add_sliding_window(128)}, "sliding-window"),
        ({"extra": lambda w: w.add_rope_dimension_count(8)}, "rope.dimension_count"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, options, word):
    file = write(tmp_path / "m.gguf", weights(6, "llama"), **options)
    with pytest.raises(ModelError, match=word):
        convert(file, tmp_path / "out")


def test_missing_and_unknown_tensors_are_named(tmp_path):
    source = weights(7, "llama")
    lacking = {n: v for n, v in source.items() if n != "blk.1.ffn_up.weight"}
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj"):
        convert(write(tmp_path / "a.gguf", lacking), tmp_path / "out")
    with pytest.raises(ModelError, match=r"attn_q\.bias"):
        convert(
            write(tmp_path / "b.gguf", {**source, "blk.0.attn_q.bias": source["output_norm.weight"]}),
            tmp_path / "o",
        )


@pytest.mark.parametrize("keep", [0, 3, 40, 5000])
def test_a_cut_off_file_is_refused_cleanly(tmp_path, keep):
    file = write(tmp_path / "m.gguf", weights(8, "llama"))
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match="not a whole GGUF"):
        convert(file, tmp_path / "out")


def test_a_disk_too_small_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    file = write(tmp_path / "m.gguf", weights(8, "llama"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ModelError, match="HORTATOR_CACHE"):
        convert(file, tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_local_file_is_converted_once_and_found_by_content(tmp_path):
    file = write(tmp_path / "My Model.gguf", weights(9, "llama"))
    cache = ModelCache(tmp_path / "cache")
    first = resolve(str(file), cache, quiet=True)
    stamp = first.weights[0].stat().st_mtime_ns
    again = resolve(str(file), cache, quiet=True)
    assert again.path == first.path
    assert again.weights[0].stat().st_mtime_ns == stamp
    assert again.name == "my model"
    assert first.eos_ids == (0,)


def test_an_imported_model_is_found_again_by_the_name_it_was_given(tmp_path):
    cache = ModelCache(tmp_path / "cache")
    one = write(tmp_path / "one.gguf", weights(1, "llama"))
    two = write(tmp_path / "two.gguf", weights(2, "llama"))
    made = import_file(one, cache, silent, "mine")
    assert resolve("mine", cache, quiet=True).path == made.path
    import_file(two, cache, silent, "mine")
    with pytest.raises(ModelError, match="several"):
        resolve("mine", cache, quiet=True)
    assert resolve(made.path.name, cache, quiet=True).path == made.path
