"""GGUF file → standard model folder (safetensors, config, tokenizer), tensor by tensor.

Needs the packages numpy, gguf and tokenizers. Memory used: the header, and one slice of a tensor, whatever
the model's size.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import QuantError, dequantize
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shared.model.errors import ModelError
from shared.model.gguf_config import Target, config_of, generation_config_of, tensor_target
from shared.model.gguf_metadata import Metadata, integer
from shared.model.gguf_reader import GgufTensor, read_gguf
from shared.model.gguf_shards import shard_files
from shared.model.gguf_tokenizer import tokenizer_files
from shared.model.progress import Progress

_SLICE_VALUES = 1 << 24
"""Values dequantised at a time: 64 MiB of float32."""

_VALUE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class _Planned:
    source: GgufTensor
    target: Target

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def out_bytes(self) -> int:
        return self.source.values * _VALUE_BYTES[self.source.type.kept_as]


def import_gguf(file: Path, folder: Path, progress: Progress) -> None:
    """Write config.json, generation_config.json, tokenizer*.json and model.safetensors into `folder`.

    `file` may be any one of a model's several files. Raises ModelError for a damaged file, an unknown
    architecture, tokenizer, tensor or quantisation, before anything large is read or written.
    """
    try:
        _import(file, folder, progress)
    except ModelError as error:
        # Most reasons speak of "the GGUF file": say which.
        named = str(file) in str(error) or file.name in str(error)
        raise error if named else ModelError(f"{file}: {error}") from None


def _import(file: Path, folder: Path, progress: Progress) -> None:
    meta, tensors = _read(shard_files(file))
    shapes = {name: t.shape for name, t in tensors.items()}
    config = config_of(meta, shapes, _rope_factors(tensors.get("rope_freqs.weight")))
    plan = [
        _Planned(tensor, target)
        for name, tensor in tensors.items()
        if (target := tensor_target(name, config)) is not None
    ]
    _check_complete(plan, config)
    for item in plan:
        _check_type(item.source)
    documents = {
        "config.json": config,
        "generation_config.json": generation_config_of(meta, config["vocab_size"]),
        **tokenizer_files(meta, config["vocab_size"]),
    }
    _check_tokenizer(documents["tokenizer.json"])
    for name, body in documents.items():
        (folder / name).write_text(json.dumps(body, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    _write_weights(file, plan, folder / "model.safetensors", progress)


def _read(files: tuple[Path, ...]) -> tuple[Metadata, dict[str, GgufTensor]]:
    """The metadata of the first file and the tensors of all."""
    meta: Metadata = {}
    tensors: dict[str, GgufTensor] = {}
    for number, file in enumerate(files):
        part = read_gguf(file)
        count = integer(part.meta, "split.count", 0, 1 << 16, default=0)
        at = integer(part.meta, "split.no", 0, 1 << 16, default=0)
        if (count or 1, at) != (len(files), number):
            raise ModelError(
                f"{file} says that it is file {at + 1} of {count or 1}, but its name makes it {number + 1} "
                f"of {len(files)}: give the files the names they were made with (NAME-00001-of-00003.gguf)"
            )
        meta = meta or part.meta
        for tensor in part.tensors:
            if tensor.name in tensors:
                raise ModelError(f"{file} has the tensor {tensor.name!r} that another of the files has too")
            tensors[tensor.name] = tensor
    wanted = integer(meta, "split.tensors.count", 0, 1 << 20, default=len(tensors))
    if wanted != len(tensors):
        raise ModelError(
            f"{files[0]} speaks of {wanted} tensors, but its {len(files)} files hold {len(tensors)}; "
            "download them again"
        )
    return meta, tensors


def _rope_factors(tensor: GgufTensor | None) -> list[float] | None:
    if tensor is None:
        return None
    if tensor.type.name != "F32" or tensor.values > 1 << 16:
        raise ModelError(f"rope_freqs.weight holds {tensor.values} {tensor.type.name} values; wanted float32")
    return [float(f) for f in np.frombuffer(_stored(tensor, 0, tensor.stored_bytes), "<f4")]


def _check_type(tensor: GgufTensor) -> None:
    """Dequantise one block of zeros: whether the package can is known before the first byte is written."""
    try:
        dequantize(np.zeros((1, tensor.type.block_bytes), np.uint8), GGMLQuantizationType(tensor.type.code))
    except (QuantError, NotImplementedError, ValueError):
        raise ModelError(
            f"tensor {tensor.name} is stored as {tensor.type.name}, which the package gguf cannot turn into "
            "floats; get the model as Q8_0, Q6_K, Q4_K, F16 or another common type"
        ) from None


def _check_tokenizer(body: dict[str, Any]) -> None:
    try:
        Tokenizer.from_str(json.dumps(body))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(
            f"the tokenizer in the GGUF file is damaged ({error}); use the model's Hugging Face folder"
        ) from None


def _check_complete(plan: list[_Planned], config: dict[str, Any]) -> None:
    """Every tensor of the architecture is there in its shape, and no other."""
    if config["num_hidden_layers"] > len(plan):
        raise ModelError(
            f"the GGUF file speaks of {config['num_hidden_layers']} layers but has {len(plan)} tensors; "
            "it is not a whole model"
        )
    wanted = _shapes(config)
    found = {p.target.name: p.shape for p in plan}
    names = {p.target.name: p.source.name for p in plan}
    for name in (*wanted, *found):
        if name not in wanted:
            raise ModelError(
                f"the GGUF file has a tensor {names[name]!r}, but only {config['num_hidden_layers']} layers"
            )
        if found.get(name) != wanted[name]:
            raise ModelError(
                f"the GGUF file has {found.get(name, 'nothing')} for {name}, wanted shape {wanted[name]}; "
                "it is not a whole model"
            )


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config["model_type"] == "qwen2":
        layer |= {f"self_attn.{n}_proj.bias": (size,) for n, size in (("q", q), ("k", kv), ("v", kv))}
    if config["model_type"] == "qwen3":
        layer |= {f"self_attn.{n}_norm.weight": (head_dim,) for n in "qk"}
    shapes = {
        f"model.layers.{number}.{name}": shape
        for number in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    shapes["model.embed_tokens.weight"] = (config["vocab_size"], hidden)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _write_weights(file: Path, plan: list[_Planned], out: Path, progress: Progress) -> None:
    """safetensors: 8 bytes of header length, a JSON header, then every tensor's bytes in header order.

    Values of 16 bits stay as they are; everything else becomes float32.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # Larger values first, so that each tensor begins at a multiple of its value's size.
    plan = sorted(plan, key=lambda item: item.source.type.kept_as != "F32")
    for item in plan:
        end = offset + item.out_bytes
        header[item.target.name] = {
            "dtype": item.source.type.kept_as,
            "shape": list(item.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    free = shutil.disk_usage(out.parent).free
    if free < offset:
        raise ModelError(
            f"{file.name} becomes {offset / 1e6:,.1f} MB of weights, but only {free / 1e6:,.1f} MB are free "
            f"at {out.parent.parent}; make room (`hortator model rm --stale`), or set HORTATOR_CACHE to a "
            "folder on a larger disk"
        )
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with out.open("wb") as stream, progress(f"convert {file.name}", offset) as advance:
        stream.write(len(head).to_bytes(8, "little") + head)
        for item in plan:
            for values in _slices(item):
                stream.write(values.data)
                advance(values.nbytes)


def _slices(item: _Planned) -> Iterator[NDArray[Any]]:
    """The tensor's values as contiguous little-endian float32, float16 or bfloat16 bits, some rows at a time.

    A permuted tensor is cut between heads only. Raises ModelError for values that are not finite.
    """
    source = item.source
    rows, width = item.shape[0], math.prod(item.shape[1:])
    if len(item.shape) == 1:  # a vector's blocks lie along it
        rows, width = 1, item.shape[0]
    unit = item.target.head_dim or 1
    step = max(unit, _SLICE_VALUES // width // unit * unit)
    row_bytes = source.type.bytes_of(width)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        raw = np.frombuffer(_stored(source, first * row_bytes, count * row_bytes), np.uint8)
        values = _values(source, raw.reshape(count, row_bytes))
        if item.target.head_dim:
            # llama.cpp interleaves the two rotary halves of each head; undo it.
            half = item.target.head_dim // 2
            values = values.reshape(-1, half, 2, width).swapaxes(1, 2)
        yield np.ascontiguousarray(values)


def _values(source: GgufTensor, raw: NDArray[np.uint8]) -> NDArray[Any]:
    """Rows of stored bytes → rows of values. NaN and infinity are no weights: they come of damaged scales."""
    if source.type.name == "BF16":
        values = raw.view("<u2")
        finite = bool(((values & 0x7F80) != 0x7F80).all())
    elif source.type.name == "F16":
        values = raw.view("<f2")
        finite = bool(np.isfinite(values).all())
    else:
        with np.errstate(all="ignore"):
            values = dequantize(raw, GGMLQuantizationType(source.type.code)).astype("<f4", copy=False)
        finite = bool(np.isfinite(values).all())
    if not finite:
        raise ModelError(
            f"{source.file}: tensor {source.name} holds values that are not finite, so the file is damaged; "
            "download it again"
        )
    return values


def _stored(source: GgufTensor, start: int, count: int) -> bytes:
    with source.file.open("rb") as stream:
        stream.seek(source.start + start)
        raw = stream.read(count)
    if len(raw) != count:
        raise ModelError(f"{source.file} became shorter while it was read; wait until it is there")
    return raw
