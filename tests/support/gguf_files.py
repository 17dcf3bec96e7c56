"""Small GGUF files written with the reference writer, for tests of their import."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter
from gguf import GGUFValueType as Value
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, LAYERS = 64, 4, 2, 96, 300, 2
HEAD_DIM = HIDDEN // HEADS


def interleave(weight, heads):
    """llama.cpp's converter, `LlamaModel.permute`, verbatim."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def weights(seed: int, arch: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{i}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, FFN),
        }
        if arch == "qwen2":
            shapes |= {f"blk.{i}.attn_q.bias": (HIDDEN,), f"blk.{i}.attn_k.bias": (KV_HEADS * HEAD_DIM,)}
            shapes |= {f"blk.{i}.attn_v.bias": (KV_HEADS * HEAD_DIM,)}
        if arch == "qwen3":
            shapes |= {f"blk.{i}.attn_q_norm.weight": (HEAD_DIM,), f"blk.{i}.attn_k_norm.weight": (HEAD_DIM,)}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def add_tokenizer(writer: GGUFWriter, pre: str = "smollm", model: str = "gpt2") -> None:
    """A byte-level vocabulary of the printable ASCII characters, with one merge."""
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    words = ["<|end|>", "Ġ", *(chr(c) for c in range(33, 127)), "ab"]
    writer.add_token_list(words)
    writer.add_token_types([3] + [1] * (len(words) - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)


def write(path: Path, tensors, kind=Kind.F32, arch="llama", pre="smollm", model="gpt2", extra=lambda w: None):
    writer = GGUFWriter(path, arch)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokenizer(writer, pre, model)
    extra(writer)
    for name, values in tensors.items():
        if name.endswith(("norm.weight", "bias")) or kind == Kind.F32:
            writer.add_tensor(name, values)
        else:
            data = values.astype(np.float16) if kind == Kind.F16 else quantize(values, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}

_FLOATS_AT = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}
"""Where blocks of the types that the package reads but does not write have float16 scales (ggml-common.h)."""


def stored(values: np.ndarray, kind: Kind) -> np.ndarray:
    """A tensor of this shape as `kind` stores it: the values given, or random blocks where the package cannot
    quantise. What it stands for is what `dequantize` makes of it."""
    if kind not in _FLOATS_AT:
        return quantize(values, kind)
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(values.shape[0])
    raw = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, size), dtype=np.uint8)
    for at in _FLOATS_AT[kind]:
        scale = rng.uniform(1e-4, 2e-3, raw.shape[:-1]).astype("<f2")
        raw[..., at : at + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(*values.shape[:-1], -1)


def write_model(path: Path, model: Any, kind: Kind, arch: str, fill: Callable[[GGUFWriter], None]) -> None:
    """A transformers model as llama.cpp's converter lays it out, matrices stored as `kind`. The model's own
    weights become the values that were stored. `fill` adds what the file says of the tokenizer."""
    import torch

    c = model.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer = GGUFWriter(path, arch)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    fill(writer)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        rows = np.arange(len(values))
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = interleave(rows, len(values) // head_dim)
        parts = name.split(".")
        numbered = parts[1] == "layers"
        there = f"blk.{parts[2]}.{GGUF_NAMES['.'.join(parts[3:])]}" if numbered else GGUF_NAMES[name]
        if values.ndim == 1:
            writer.add_tensor(there, values)
            continue
        raw = stored(np.ascontiguousarray(values[rows]), kind)
        writer.add_tensor(there, raw, raw_dtype=kind)
        meant = np.empty_like(values)
        meant[rows] = dequantize(raw, kind)  # row i of the file is row rows[i] of the model
        parameter.data = torch.from_numpy(meant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encode(text: str) -> bytes:
    body = text.encode()
    return struct.pack("<Q", len(body)) + body


def rewrite(file: Path, changed: dict[str, tuple[Value, Any] | None]) -> bytes:
    """The file's bytes with metadata changed: (type, value) for a key, None to leave it out. Tensors stay."""
    reader = GGUFReader(file)
    fields = {n: f for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    entries = [
        encode(name) + b"".join(part.tobytes() for part in field.parts[2:])
        for name, field in fields.items()
        if name not in changed
    ]
    entries += [encode(name) + _value(*made) for name, made in changed.items() if made is not None]
    infos = b"".join(part.tobytes() for t in reader.tensors for part in t.field.parts)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(reader.tensors), len(entries)) + b"".join(entries) + infos
    return head + b"\0" * (-len(head) % 32) + file.read_bytes()[reader.data_offset :]


_CODES = {
    Value.UINT16: "<H",
    Value.UINT32: "<I",
    Value.INT32: "<i",
    Value.INT64: "<q",
    Value.FLOAT32: "<f",
    Value.BOOL: "<?",
}


def _value(kind: Value, value: Any) -> bytes:
    return struct.pack("<I", kind) + _body(kind, value)


def _body(kind: Value, value: Any) -> bytes:
    if kind == Value.STRING:
        return encode(value)
    if kind != Value.ARRAY:
        return struct.pack(_CODES[kind], value)
    of = {str: Value.STRING, bool: Value.BOOL, float: Value.FLOAT32}.get(type((value or [0])[0]), Value.INT32)
    return struct.pack("<IQ", of, len(value)) + b"".join(_body(of, v) for v in value)
