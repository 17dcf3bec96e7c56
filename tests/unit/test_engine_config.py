"""Which model folders are understood, and that every other one is refused by name."""

import copy
import math

import pytest

from services.worker.engine.config import Llama3Rope, UnsupportedModel, parse_config

# As published with SmolLM2-135M-Instruct.
SMOL = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def parse(max_len=None, **changes):
    raw = copy.deepcopy(SMOL) | changes
    return parse_config({k: v for k, v in raw.items() if v != "absent"}, "m/config.json", max_len)


def test_the_default_model_is_understood():
    config = parse()
    assert (config.hidden, config.heads, config.kv_heads, config.head_dim) == (576, 9, 3, 64)
    assert (config.layers, config.intermediate, config.vocab_size) == (30, 1536, 49152)
    assert (config.rope_theta, config.norm_eps, config.tied, config.max_len) == (100000.0, 1e-5, True, 8192)
    assert not (config.qkv_bias)
    assert not (config.out_bias)
    assert not (config.qk_norm)


@pytest.mark.parametrize(
    ("architecture", "model_type", "qkv_bias", "qk_norm"),
    [
        ("MistralForCausalLM", "mistral", False, False),
        ("Qwen2ForCausalLM", "qwen2", True, False),
        ("Qwen3ForCausalLM", "qwen3", False, True),
    ],
)
def test_families_differ_in_bias_and_norm(architecture, model_type, qkv_bias, qk_norm):
    config = parse(architectures=[architecture], model_type=model_type)
    assert (config.qkv_bias, config.qk_norm, config.out_bias) == (qkv_bias, qk_norm, False)


def test_rope_is_read_from_old_and_new_keys_alike():
    old = parse(rope_scaling=LLAMA3, rope_theta=500000.0)
    new = parse(rope_parameters=LLAMA3 | {"rope_theta": 500000.0}, rope_theta="absent", rope_scaling="absent")
    assert old == new
    assert old.rope_llama3 == Llama3Rope(32.0, 1.0, 4.0, 8192)
    assert parse(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0


def test_the_served_length_is_capped_by_the_trained_one():
    assert parse(max_len=100).max_len == 100
    assert parse(max_len=10**6).max_len == 8192


def test_a_sliding_window_that_never_slides_is_served():
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert parse(**mistral, sliding_window=None).max_len == 8192
    assert parse(**mistral, sliding_window=4096, max_len=4096).max_len == 4096
    with pytest.raises(UnsupportedModel, match=r"sliding_window = 4096 .*--max-len"):
        parse(**mistral, sliding_window=4096)
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 4096}
    assert parse(**qwen, use_sliding_window=False).max_len == 8192
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        parse(**qwen, use_sliding_window=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["Gemma2ForCausalLM"]),
        ("architectures", []),
        ("auto_map", {"AutoModelForCausalLM": "modeling_x.X"}),
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("final_logit_softcapping", 30.0),
        ("quantization_config", {"quant_method": "awq"}),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("residual_multiplier", 0.22),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("layer_types", ["sliding_attention"]),
        ("num_key_value_heads", 2),
        ("num_attention_heads", "nine"),
        ("vocab_size", None),
        ("head_dim", 63),
        ("model_type", "mixtral"),
        ("architectures", 5),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [["LlamaForCausalLM"]]),
        ("layer_types", 5),
        ("sliding_window", "4096"),
        ("num_hidden_layers", 2.5),
        ("hidden_size", math.inf),
        ("rms_norm_eps", math.nan),
        ("rope_theta", math.inf),
        ("rope_theta", True),
        ("rope_scaling", [2]),
        ("tie_word_embeddings", "false"),
        ("attention_bias", "no"),
        ("max_position_embeddings", 10**12),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(key, value):
    with pytest.raises(UnsupportedModel) as caught:
        parse(**{key: value})
    assert caught.value.key == key
    assert "m/config.json" in str(caught.value)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "yarn"),
        ({"type": "linear", "factor": 2.0}, "linear"),
        ({"type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "llama3", "factor": 8.0}, "high_freq_factor"),
        (LLAMA3 | {"attention_factor": 2.0}, "attention_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        (LLAMA3 | {"factor": 0}, "rope_scaling.factor"),
        (LLAMA3 | {"factor": "8"}, "rope_scaling.factor"),
        (LLAMA3 | {"low_freq_factor": math.nan}, "low_freq_factor"),
        (LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 4.0}, "low_freq_factor must be below"),
    ],
)
def test_unknown_position_scaling_is_refused_by_name(scaling, named):
    with pytest.raises(UnsupportedModel, match=named):
        parse(rope_scaling=scaling)


def test_scaling_under_the_old_key_beside_the_new_one_is_not_overlooked():
    """transformers lets the old key win, which people add to a folder that has the new one."""
    linear = {"type": "linear", "factor": 2.0}
    for new in ({}, {"rope_type": "default", "rope_theta": 1e4}, LLAMA3):
        with pytest.raises(UnsupportedModel, match="rope_scaling"):
            parse(rope_parameters=new, rope_scaling=linear)
    assert parse(rope_parameters=LLAMA3, rope_scaling=LLAMA3) == parse(rope_scaling=LLAMA3)
