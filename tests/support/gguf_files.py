"""Small GGUF files written with the reference writer, for tests of their import."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter
from gguf import GGUFValueType as Value
from gguf.quants import quantize

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
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    words = ["<|end|>", "Ġ", *(chr(c) for c in range(33, 127)), "ab"]
    writer.add_token_list(words)
    writer.add_token_types([3] + [1] * (len(words) - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
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
