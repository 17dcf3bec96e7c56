"""A config.json as sizes to plan with, also of models that the engine cannot compute. Pure.

Nothing in it is believed: whatever is no size that a model could have is refused by its key. Architectures
that are not known by name are counted like Llama's, and that is said.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from services.worker.engine.config import ModelConfig, UnsupportedModel, parse_config
from services.worker.memory.sizes import BadModel, ModelSizes, Parameters

_BOUNDS = {
    "layers": 10_000,
    "heads": 1 << 16,
    "experts": 1 << 16,
    "width": 1 << 20,
    "vocabulary": 1 << 28,
    "tokens": 1 << 28,
}
"""What no model comes near; beyond lies damage."""
_SHOWN = 60

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_TOKENS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")

_PLAIN = {"gpt2", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "starcoder2", "mpt"}
"""Families whose feed-forward part is two matrices, not three; where nothing is said four times as wide."""
_GATED = {
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "phi3", "granite", "olmo2"),
    *("gemma", "gemma2", "gemma3_text", "deepseek_v2", "deepseek_v3"),
}
_BIASED = {"gpt2", "gpt_neox", "opt", "bloom", "phi", "starcoder2"}
"""Every matrix of a layer has a bias, and every norm too."""
_TIED = {
    "gpt2",
    "opt",
    "bloom",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_bigcode",
    "mpt",
    "starcoder2",
}
"""Where config.json does not say whether the head is the embedding."""
_NORMS = {"phi": 1, "gptj": 1, "falcon": 1, "gemma2": 4, "gemma3_text": 4}
"""Norms of a layer as wide as the hidden size; 2 elsewhere."""


def read_sizes(raw: object, source: str, context: int | None = None, name: str = "") -> ModelSizes:
    """The sizes that a config.json's content says. `source` names it in errors; it is to be served with
    `context` tokens. Raises `BadModel`."""
    if not isinstance(raw, Mapping):
        raise BadModel(
            f"{source} holds a {type(raw).__name__}, not an object: take the config.json of the model"
        )
    config, reason = _served(raw, source, context)
    inner = raw.get("text_config")
    name = (name or source).encode("utf-8", "replace").decode()
    return _Reader(inner if isinstance(inner, Mapping) else raw, source).sizes(name, config, reason)


def parse_sizes(text: bytes, source: str, context: int | None = None, name: str = "") -> ModelSizes:
    """`read_sizes` of a file's content."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:120]
        raise BadModel(f"{source} is no JSON ({said}): take the config.json of the model") from None
    return read_sizes(raw, source, context, name)


def _served(raw: Mapping[str, Any], source: str, context: int | None) -> tuple[ModelConfig | None, str]:
    """What the engine makes of it, or why it cannot compute it."""
    try:
        parse_config(raw, source, context)
        return parse_config(raw, source), ""
    except UnsupportedModel as error:
        return None, f"{error.key} = {_brief(error.value)}"
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
        return None, "its config.json is damaged"


def _brief(value: object) -> str:
    text = repr(value)
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return text.encode("utf-8", "backslashreplace").decode()


class _Reader:
    """One config.json."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self._raw, self._source = raw, source
        kind = raw.get("model_type")
        self._kind = kind if isinstance(kind, str) else ""

    def sizes(self, name: str, config: ModelConfig | None, reason: str) -> ModelSizes:
        kind, notes = self._kind, []
        layers = self._need(_LAYERS, "layers")
        hidden = self._need(_HIDDEN, "width")
        heads = self._need(_HEADS, "heads")
        kv_heads = self._kv_heads(heads)
        head_dim = self._get(("head_dim", "kv_channels"), "width")
        if head_dim is None and hidden % heads:
            raise self._bad(_HIDDEN[0], hidden, f"it is no multiple of {heads} heads; give head_dim")
        head_dim = head_dim or hidden // heads
        if heads % kv_heads:
            raise self._bad(_KV_HEADS[0], kv_heads, f"it must divide the {heads} heads")
        vocab = self._need(("vocab_size",), "vocabulary")
        inner = self._get(_INNER, "width")
        if inner is None and kind in _PLAIN:
            inner = 4 * hidden
        if inner is None:
            raise self._bad(_INNER[0], None, "it is missing")
        gated = kind not in _PLAIN
        if kind not in _PLAIN | _GATED:
            notes.append(
                f"counted as if it were built like Llama: model_type {_brief(kind)} is not known here"
            )
        if self._raw.get("sliding_window") is not None and self._raw.get("use_sliding_window") is not False:
            notes.append("sliding windows are not counted: KV is planned for the whole context in all layers")
        if self._raw.get("quantization_config") is not None:
            notes.append("quantization_config is not counted: weights are planned in the format of --dtype")

        latent, attention, vectors = self._attention(hidden, heads, kv_heads, head_dim)
        feed, each, experts, used, dense, routers = self._feed_forward(hidden, inner, gated, layers)
        norm = hidden * (2 if kind in _BIASED or kind == "falcon" else 1)
        vectors += _NORMS.get(kind, 2) * norm
        if kind in _BIASED:
            vectors += inner + hidden
        if self._flag("mlp_bias") and gated:
            vectors += 2 * inner + hidden
        tied = self._flag("tie_word_embeddings", kind in _TIED)
        alone = norm + self._positions(hidden)
        alone += vocab if kind == "phi" else 0
        alone += norm if kind == "bloom" else 0
        return ModelSizes(
            name=name,
            parameters=Parameters(
                embedding=vocab * hidden,
                head=0 if tied else vocab * hidden,
                attention=layers * attention,
                feed_forward=dense * (3 if gated else 2) * hidden * inner + (layers - dense) * feed,
                experts=(layers - dense) * experts * each,
                vectors=layers * vectors + alone + (layers - dense) * routers,
            ),
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=each // (3 * hidden) if each else inner,
            vocab_size=vocab,
            max_len=self._get(_TOKENS, "tokens"),
            tied=tied,
            experts=experts,
            experts_used=used,
            latent=latent,
            config=config,
            reason=reason,
            notes=tuple(notes),
        )

    def _kv_heads(self, heads: int) -> int:
        if (
            self._kind == "falcon"
            and self._raw.get("multi_query")
            and not self._raw.get("new_decoder_architecture")
        ):
            return 1
        return self._get(_KV_HEADS, "heads") or heads

    def _attention(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        """(elements kept in place of keys and values, parameters of matrices, of vectors) of a layer."""
        rank = self._get(("kv_lora_rank",), "width")
        if rank is not None:  # multi-head latent attention, as DeepSeek's
            nope, rope = (self._need((f"qk_{n}_head_dim",), "width") for n in ("nope", "rope"))
            value = self._need(("v_head_dim",), "width")
            q_rank = self._get(("q_lora_rank",), "width")
            q = heads * (nope + rope)
            matrices = hidden * q if q_rank is None else q_rank * (hidden + q)
            matrices += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
            return rank + rope, matrices, rank + (q_rank or 0)
        q, kv = heads * head_dim, kv_heads * head_dim
        vectors = 0
        if self._kind in _BIASED or self._flag("attention_bias"):
            vectors = q + 2 * kv + hidden
        elif self._kind in ("qwen2", "qwen2_moe"):
            vectors = q + 2 * kv
        if self._kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            vectors += 2 * head_dim
        return 0, 2 * hidden * (q + kv), vectors

    def _feed_forward(
        self, hidden: int, inner: int, gated: bool, layers: int
    ) -> tuple[int, int, int, int, int, int]:
        """Of a layer with experts: parameters of its part that every token passes, of one expert, how many
        experts there are and how many a token passes; how many layers have none; routers' parameters."""
        count = self._get(("num_local_experts", "num_experts", "n_routed_experts"), "experts")
        matrices = 3 if gated else 2
        if count is None:
            return matrices * hidden * inner, 0, 0, 0, 0, 0
        used = self._get(("num_experts_per_tok", "num_experts_per_token"), "experts") or 1
        if used > count:
            raise self._bad("num_experts_per_tok", used, f"there are only {count} experts")
        width = self._get(("moe_intermediate_size",), "width") or inner
        shared = self._get(("shared_expert_intermediate_size",), "width") or 0
        routers = count * hidden + (hidden if shared else 0)
        shared += (self._get(("n_shared_experts",), "experts", zero=True) or 0) * width
        first = self._get(("first_k_dense_replace",), "layers", zero=True) or 0
        only = self._raw.get("mlp_only_layers")
        dense = min(layers, first + (len(only) if isinstance(only, list) else 0))
        if self._raw.get("topk_method") == "noaux_tc":
            routers += count
        return matrices * hidden * shared, matrices * hidden * width, count, used, dense, routers

    def _positions(self, hidden: int) -> int:
        tokens = self._get(_TOKENS, "tokens") or 0
        return {"gpt2": tokens, "gpt_bigcode": tokens, "opt": tokens + 2}.get(self._kind, 0) * hidden

    def _need(self, names: tuple[str, ...], kind: str) -> int:
        value = self._get(names, kind)
        if value is None:
            raise self._bad(names[0], None, "it is missing")
        return value

    def _get(self, names: tuple[str, ...], kind: str, zero: bool = False) -> int | None:
        """The first of these keys that is there."""
        key = next((key for key in names if self._raw.get(key) is not None), None)
        if key is None:
            return None
        value = self._raw[key]
        usable = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(value, float):
            usable = math.isfinite(value) and value % 1 == 0
        if not usable or not (0 if zero else 1) <= value <= _BOUNDS[kind]:
            raise self._bad(
                key, value, f"a whole number from {0 if zero else 1} to {_BOUNDS[kind]} is needed"
            )
        return int(value)

    def _flag(self, key: str, default: bool = False) -> bool:
        value = self._raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false is needed")
        return value

    def _bad(self, key: str, value: object, advice: str) -> BadModel:
        return BadModel(
            f"{self._source}: {key} = {_brief(value)}: {advice}. Take the config.json of the model, or give "
            "sizes: --params, --layers, --hidden, --heads, --kv-heads"
        )
