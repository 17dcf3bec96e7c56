"""What a model folder's config.json means to the engine. Pure: no torch, no I/O.

Every key is either understood, known not to change the maths of inference, or refused by name: a model that
would be computed wrongly must not start.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# Read below, for every family.
_UNDERSTOOD = frozenset(
    """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps max_position_embeddings tie_word_embeddings rope_theta
    rope_scaling rope_parameters attention_bias sliding_window use_sliding_window max_window_layers
    layer_types
    """.split()  # noqa: SIM905
)

# Training, bookkeeping, tokenizing, generation defaults: nothing that a forward pass computes with.
_HARMLESS = frozenset(
    """
    _name_or_path transformers_version dtype torch_dtype initializer_range use_cache pad_token_id bos_token_id
    eos_token_id pretraining_tp attention_dropout output_hidden_states output_attentions return_dict id2label
    label2id problem_type is_llama_config transformers.js_config unsloth_fixed unsloth_version
    _attn_implementation_autoset tokenizer_class use_return_dict torchscript model_max_length
    task_specific_params finetuning_task
    """.split()  # noqa: SIM905
)

# Harmless only with the value that leaves the maths alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False, None),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "pruned_heads": ({}, None),
    "use_bfloat16": (False,),
}

_ROPE_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_LLAMA3_KEYS = frozenset(
    {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
)


_MOST_TOKENS = 1 << 24
"""Context that no model comes near: beyond it lies damage, and tables of its size would fill the memory."""


class UnsupportedModel(ValueError):
    """A model the engine would compute wrongly, or cannot read; `key` and `value` say which setting."""

    def __init__(self, source: str, key: str, value: object, advice: str) -> None:
        super().__init__(f"{source}: {key} = {value!r} is not supported: {advice}")
        self.source = source
        self.key = key
        self.value = value


@dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model of the Llama family. Sizes are in elements, lengths in tokens."""

    family: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_len: int
    """Positions the model may be used at: the served length, at most the trained one."""
    tied: bool
    rope_theta: float
    rope_llama3: Llama3Rope | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


def parse_config(raw: Mapping[str, Any], source: str, max_len: int | None = None) -> ModelConfig:
    """Understand a config.json. `source` names the file in errors; `max_len` caps the served length.

    Raises `UnsupportedModel` naming the first key that would change the maths in a way not implemented.
    """
    if raw.get("auto_map"):
        raise UnsupportedModel(
            source,
            "auto_map",
            raw["auto_map"],
            "it needs its own Python code, which is never run here",
        )
    family = _family(raw, source)
    for key, value in raw.items():
        _check_key(key, value, source)

    def number(key: str, kind: Callable[[Any], Any] = int, default: Any = None) -> Any:
        value = raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise UnsupportedModel(source, key, None, "the key is missing; take the config.json of the model")
        _check_number(source, key, value, whole=kind is int)
        return kind(value)

    def flag(key: str) -> bool:
        value = raw.get(key)
        if value not in (True, False, None):
            raise UnsupportedModel(source, key, value, "true or false is needed")
        return bool(value)

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    kv_heads = number("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise UnsupportedModel(
            source, "num_key_value_heads", kv_heads, f"it must divide num_attention_heads = {heads}"
        )
    if raw.get("head_dim") is None and hidden % heads:
        raise UnsupportedModel(
            source, "hidden_size", hidden, f"not a multiple of {heads} heads; give head_dim"
        )
    head_dim = number("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise UnsupportedModel(source, "head_dim", head_dim, "rotary embedding needs an even head size")
    trained = number("max_position_embeddings")
    served = min(trained, max_len) if max_len is not None else trained
    if served > _MOST_TOKENS:
        raise UnsupportedModel(
            source, "max_position_embeddings", trained, f"serve at most {_MOST_TOKENS} tokens (--max-len)"
        )
    _check_window(raw, source, served)
    theta, llama3 = _rope(raw, source)
    bias = flag("attention_bias")
    return ModelConfig(
        family=family,
        vocab_size=number("vocab_size"),
        hidden=hidden,
        intermediate=number("intermediate_size"),
        layers=number("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=number("rms_norm_eps", float, 1e-6),
        max_len=served,
        tied=flag("tie_word_embeddings"),
        rope_theta=theta,
        rope_llama3=llama3,
        qkv_bias=bias or family == "qwen2",
        out_bias=bias,
        qk_norm=family == "qwen3",
    )


def _family(raw: Mapping[str, Any], source: str) -> str:
    names = _texts(raw, "architectures", source)
    known = ", ".join(ARCHITECTURES)
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise UnsupportedModel(source, "architectures", names, f"this engine computes {known}")
    family = ARCHITECTURES[names[0]]
    if raw.get("model_type", family) != family:
        raise UnsupportedModel(source, "model_type", raw["model_type"], f"architectures says {names[0]}")
    return family


def _texts(raw: Mapping[str, Any], key: str, source: str) -> list[str]:
    found = raw.get(key) or []
    if not isinstance(found, list) or any(not isinstance(text, str) for text in found):
        raise UnsupportedModel(source, key, found, "a list of names is needed")
    return found


def _check_number(source: str, key: str, value: Any, whole: bool = False) -> None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not usable or value <= 0 or (whole and value % 1):
        raise UnsupportedModel(source, key, value, f"a positive {'whole ' * whole}number is needed")


def _check_key(key: str, value: object, source: str) -> None:
    if key in _UNDERSTOOD or key in _HARMLESS or key == "auto_map":
        return
    if key not in _NEUTRAL:
        raise UnsupportedModel(
            source,
            key,
            value,
            "unknown here, so it may change the maths; remove it only if it does not",
        )
    if value not in _NEUTRAL[key]:
        neutral = " or ".join(repr(v) for v in _NEUTRAL[key])
        raise UnsupportedModel(source, key, value, f"only {neutral} is implemented")


def _check_window(raw: Mapping[str, Any], source: str, served: int) -> None:
    window = raw.get("sliding_window")
    if "use_sliding_window" in raw and not raw["use_sliding_window"]:
        window = None
    if window is not None:
        _check_number(source, "sliding_window", window, whole=True)
    if window is not None and window < served:
        raise UnsupportedModel(
            source,
            "sliding_window",
            window,
            f"serve at most {window} tokens (--max-len), not {served}",
        )
    others = sorted(set(_texts(raw, "layer_types", source)) - {"full_attention"})
    if not others:
        return
    reach = raw.get("sliding_window")
    if others != ["sliding_attention"] or reach is None or reach < served:
        raise UnsupportedModel(
            source, "layer_types", others, "only attention over the whole context is implemented"
        )


def _rope(raw: Mapping[str, Any], source: str) -> tuple[float, Llama3Rope | None]:
    """Base and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = raw.get(key) or {}
    if not isinstance(scaling, Mapping):
        raise UnsupportedModel(source, key, scaling, "an object is needed")
    if raw.get("rope_scaling") not in (None, {}, scaling):
        raise UnsupportedModel(
            source, "rope_scaling", raw["rope_scaling"], "rope_parameters says otherwise; remove one of them"
        )
    theta = scaling.get("rope_theta", raw.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UnsupportedModel(source, f"{key}.rope_type", kind, "only default and llama3 are implemented")
    allowed = _ROPE_KEYS | _LLAMA3_KEYS if kind == "llama3" else _ROPE_KEYS
    for name, value in scaling.items():
        if name not in allowed or (name == "partial_rotary_factor" and value not in (1, 1.0, None)):
            raise UnsupportedModel(source, f"{key}.{name}", value, f"unknown for rope_type {kind}")
    _check_number(source, "rope_theta", theta)
    if kind == "default":
        return float(theta), None
    missing = sorted(_LLAMA3_KEYS - scaling.keys())
    if missing:
        raise UnsupportedModel(
            source, key, dict(scaling), f"rope_type llama3 also needs {', '.join(missing)}"
        )
    for name in _LLAMA3_KEYS:
        _check_number(source, f"{key}.{name}", scaling[name], whole=name.startswith("original"))
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise UnsupportedModel(
            source, f"{key}.high_freq_factor", scaling["high_freq_factor"], "low_freq_factor must be below it"
        )
    return float(theta), Llama3Rope(
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_len=int(scaling["original_max_position_embeddings"]),
    )
