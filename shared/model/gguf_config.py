"""What a GGUF file's metadata and tensor names mean in Hugging Face terms. Pure."""

import math
import re
from dataclasses import dataclass
from typing import Any

from shared.model.errors import ModelError
from shared.model.gguf_metadata import Metadata, integer, number, text


@dataclass(frozen=True)
class Target:
    """Where a tensor goes. `head_dim` > 0: its rows are permuted per head and must be put back."""

    name: str
    head_dim: int = 0


@dataclass(frozen=True)
class _Architecture:
    model_type: str
    class_name: str
    permuted: bool
    """llama.cpp interleaves the rotary halves of Q and K rows for this family."""
    extra_tensors: tuple[str, ...] = ()


_ARCHITECTURES = {
    # Mistral models are written as `llama` by llama.cpp's converter; the maths is the same.
    "llama": _Architecture("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", permuted=False, extra_tensors=("q.b", "k.b", "v.b")),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", permuted=False, extra_tensors=("q_norm", "k_norm")),
}

_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_EXTRA_TENSORS = {
    "q.b": ("attn_q.bias", "self_attn.q_proj.bias"),
    "k.b": ("attn_k.bias", "self_attn.k_proj.bias"),
    "v.b": ("attn_v.bias", "self_attn.v_proj.bias"),
    "q_norm": ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    "k_norm": ("attn_k_norm.weight", "self_attn.k_norm.weight"),
}
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\Z")


# Where llama.cpp's graph of these families would compute something else than the models known here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "use_parallel_residual": (False,),
}

# Bounds that no model comes near: what lies beyond them is damage.
_MAX_SIZE = 1 << 20
_MAX_LAYERS = 1 << 12
_MAX_CONTEXT = 1 << 24


def config_of(
    meta: Metadata, shapes: dict[str, tuple[int, ...]], rope_factors: list[float] | None
) -> dict[str, Any]:
    """config.json. `shapes` are row-major, by GGUF tensor name; `rope_factors` is rope_freqs.weight.

    Raises ModelError for an architecture or rotary scaling that is not known, by name.
    """
    arch = text(meta, "general.architecture")
    family = _ARCHITECTURES.get(arch)
    if family is None:
        raise ModelError(
            f"the GGUF file holds architecture {arch!r}; known are "
            f"{', '.join(_ARCHITECTURES)} (Mistral files say llama)"
        )
    _refuse_other_maths(meta, arch)
    heads = integer(meta, f"{arch}.attention.head_count", 1, _MAX_SIZE)
    kv_heads = integer(meta, f"{arch}.attention.head_count_kv", 1, _MAX_SIZE, default=heads)
    hidden = integer(meta, f"{arch}.embedding_length", 1, _MAX_SIZE)
    head_dim = _head_dim(meta, arch, hidden, heads)
    if heads % kv_heads:
        raise ModelError(f"the GGUF file has {heads} heads for {kv_heads} KV heads; it is damaged")
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise ModelError("the GGUF file has no matrix token_embd.weight; it is not a whole model")
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": integer(meta, f"{arch}.feed_forward_length", 1, _MAX_SIZE),
        "num_hidden_layers": integer(meta, f"{arch}.block_count", 1, _MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": integer(meta, f"{arch}.context_length", 1, _MAX_CONTEXT),
        "rms_norm_eps": _shortest(number(meta, f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(number(meta, f"{arch}.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **_special_ids(meta, shapes["token_embd.weight"][0]),
    }
    if family.model_type == "qwen2":
        del config["attention_bias"], config["mlp_bias"]  # QKV biases are part of the architecture
    if family.model_type == "qwen3":
        del config["mlp_bias"]
    scaling = _rope_scaling(meta, arch, config, rope_factors)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def _refuse_other_maths(meta: Metadata, arch: str) -> None:
    if experts := meta.get(f"{arch}.expert_count", 0):
        raise ModelError(f"the GGUF file is a mixture of {experts} experts, which is not supported")
    if meta.get(f"{arch}.attention.sliding_window", 0):
        raise ModelError("the GGUF file uses sliding-window attention, which is not supported")
    for key, neutral in _NEUTRAL.items():
        value = meta.get(f"{arch}.{key}", neutral[0])
        if value not in neutral:
            raise ModelError(
                f"the GGUF file says {arch}.{key} = {value!r}: that is other maths than the "
                f"{_ARCHITECTURES[arch].class_name} known here, so the model is not served"
            )


def _head_dim(meta: Metadata, arch: str, hidden: int, heads: int) -> int:
    head_dim = integer(meta, f"{arch}.attention.key_length", 0, _MAX_SIZE, default=0) or hidden // heads
    if head_dim < 2 or head_dim % 2:
        raise ModelError(
            f"the GGUF file has heads of {head_dim} values, and rotary embedding needs an even number"
        )
    if integer(meta, f"{arch}.attention.value_length", 0, _MAX_SIZE, default=head_dim) != head_dim:
        raise ModelError("the GGUF file has values and keys of different length, which is not supported")
    if integer(meta, f"{arch}.rope.dimension_count", 0, _MAX_SIZE, default=head_dim) != head_dim:
        raise ModelError(
            "the GGUF file rotates only part of each head (rope.dimension_count), which is not supported"
        )
    return head_dim


def generation_config_of(meta: Metadata, vocab_size: int) -> dict[str, Any]:
    """generation_config.json: greedy by default, with the ids that end a turn."""
    ids = _special_ids(meta, vocab_size)
    ends = [_token_id(meta, kind, vocab_size) for kind in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(i for i in ends if i is not None))
    if unique:
        ids["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return ids


def tensor_target(name: str, config: dict[str, Any]) -> Target | None:
    """The tensor's Hugging Face name; None for one that config.json stands for; unknown ones raise."""
    family = next(a for a in _ARCHITECTURES.values() if a.model_type == config["model_type"])
    if name == "rope_freqs.weight":
        return None
    if name in _TOP_TENSORS:
        return Target(_TOP_TENSORS[name])
    known = _LAYER_TENSORS | dict(_EXTRA_TENSORS[e] for e in family.extra_tensors)
    match = _LAYER.match(name)
    if match is None or match[2] not in known:
        raise ModelError(
            f"the GGUF file has a tensor {name!r} that {config['model_type']} models do not have"
        )
    permuted = family.permuted and match[2] in ("attn_q.weight", "attn_k.weight")
    return Target(f"model.layers.{match[1]}.{known[match[2]]}", config["head_dim"] if permuted else 0)


def _token_id(meta: Metadata, kind: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    if meta.get(key) in (None, 0xFFFFFFFF):  # llama.cpp's "none", as 32 unsigned bits
        return None
    return integer(meta, key, 0, vocab_size - 1)


def _special_ids(meta: Metadata, vocab_size: int) -> dict[str, Any]:
    pairs = (("bos", "bos"), ("eos", "eos"), ("padding", "pad"))
    found = ((hf, _token_id(meta, gguf, vocab_size)) for gguf, hf in pairs)
    return {f"{hf}_token_id": value for hf, value in found if value is not None}


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 was written as 1e-05."""
    import numpy as np

    with np.errstate(over="ignore", under="ignore"):
        short = float(str(np.float32(value)))
    if not 0 < short < math.inf:
        raise ModelError(f"the GGUF file says {value!r} where a float32 above 0 belongs; it is damaged")
    return short


def _rope_scaling(
    meta: Metadata, arch: str, config: dict[str, Any], factors: list[float] | None
) -> dict[str, Any] | None:
    kind = text(meta, f"{arch}.rope.scaling.type", "none")
    if meta.get(f"{arch}.rope.scaling.type") is None and meta.get(f"{arch}.rope.scaling.factor", 0) not in (
        0,
        1,
    ):
        kind = "linear"  # what llama.cpp takes a factor of no type for
    if kind not in ("none", ""):
        raise ModelError(f"the GGUF file uses rotary scaling {kind!r}, which is not supported")
    if factors is None:
        return None
    if not factors or not all(math.isfinite(f) and f > 0 for f in factors):
        raise ModelError("the GGUF file's rope_freqs.weight is not all positive; it is damaged")
    # Llama 3 files hold the finished factors; the parameters behind them are found again and proved here.
    for original in (8192, config["max_position_embeddings"]):
        scaling = {
            "rope_type": "llama3",
            "factor": max(factors),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        made = llama3_factors(config["rope_theta"], config["head_dim"], scaling)
        if len(made) == len(factors) and all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(made, factors)):
            return scaling
    raise ModelError(
        "the GGUF file's rope_freqs.weight does not follow the Llama 3 rule, so it is not supported"
    )


def llama3_factors(theta: float, head_dim: int, scaling: dict[str, Any]) -> list[float]:
    """What Llama 3 divides each rotary frequency by (Meta's reference code, as llama.cpp stores it)."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    made = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            made.append(1.0)
        elif wavelength > original / low:
            made.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            made.append(1 / ((1 - smooth) / factor + smooth))
    return made
