"""GGUF file → standard model folder (float32 safetensors, config, tokenizer), tensor by tensor.

Needs the packages numpy and gguf. Memory used: one slice of a tensor, whatever the model's size.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import QuantError, dequantize
from numpy.typing import NDArray

from shared.model.errors import ModelError
from shared.model.gguf_config import Metadata, Target, config_of, generation_config_of, tensor_target
from shared.model.gguf_tokenizer import tokenizer_files
from shared.model.progress import Progress

_SLICE_VALUES = 1 << 24
"""Values dequantised at a time: 64 MiB of float32."""


@dataclass(frozen=True)
class _Planned:
    source: ReaderTensor
    target: Target
    shape: tuple[int, ...]


def import_gguf(file: Path, folder: Path, progress: Progress) -> None:
    """Write config.json, generation_config.json, tokenizer*.json and model.safetensors into `folder`.

    Raises ModelError for a damaged file, an unknown architecture, tokenizer, tensor or quantisation.
    """
    try:
        reader = GGUFReader(file)
        meta: Metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (
        ValueError,
        IndexError,
        KeyError,
        OSError,
        UnicodeDecodeError,
        OverflowError,
        MemoryError,
    ) as error:
        raise ModelError(f"{file} is not a whole GGUF file ({error}); download it again") from None
    shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    rope_factors = next((t for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    factors = None if rope_factors is None else [float(f) for f in np.asarray(rope_factors.data).ravel()]
    config = config_of(meta, shapes, factors)
    plan = [
        _Planned(tensor, target, shapes[tensor.name])
        for tensor in reader.tensors
        if (target := tensor_target(tensor.name, config)) is not None
    ]
    _check_complete(plan, config)
    documents = {
        "config.json": config,
        "generation_config.json": generation_config_of(meta),
        **tokenizer_files(meta, config["vocab_size"]),
    }
    for name, body in documents.items():
        (folder / name).write_text(json.dumps(body, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    _write_weights(file, plan, folder / "model.safetensors", progress)


def _check_complete(plan: list[_Planned], config: dict[str, Any]) -> None:
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    names = {p.target.name: p.shape for p in plan}
    wanted: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        wanted[f"{at}.self_attn.q_proj.weight"] = (heads * config["head_dim"], hidden)
        wanted[f"{at}.self_attn.k_proj.weight"] = (kv * config["head_dim"], hidden)
        wanted[f"{at}.self_attn.v_proj.weight"] = (kv * config["head_dim"], hidden)
        wanted[f"{at}.self_attn.o_proj.weight"] = (hidden, heads * config["head_dim"])
        wanted[f"{at}.mlp.gate_proj.weight"] = (config["intermediate_size"], hidden)
        wanted[f"{at}.mlp.up_proj.weight"] = (config["intermediate_size"], hidden)
        wanted[f"{at}.mlp.down_proj.weight"] = (hidden, config["intermediate_size"])
        wanted[f"{at}.input_layernorm.weight"] = (hidden,)
        wanted[f"{at}.post_attention_layernorm.weight"] = (hidden,)
    for name, shape in wanted.items():
        if names.get(name) != shape:
            raise ModelError(
                f"the GGUF file has {names.get(name, 'nothing')} for {name}, wanted shape {shape}"
            )


def _write_weights(file: Path, plan: list[_Planned], out: Path, progress: Progress) -> None:
    """safetensors: 8 bytes of header length, a JSON header, then every tensor's bytes in header order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for item in plan:
        end = offset + 4 * int(np.prod(item.shape))
        header[item.target.name] = {"dtype": "F32", "shape": list(item.shape), "data_offsets": [offset, end]}
        offset = end
    free = shutil.disk_usage(out.parent).free
    if free < offset:
        raise ModelError(
            f"{file.name} becomes {offset / 1e9:.1f} GB of float32, but only {free / 1e9:.1f} GB are free at "
            f"{out.parent.parent}; make room, or set HORTATOR_CACHE to a folder on a larger disk"
        )
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with out.open("wb") as stream, progress(f"convert {file.name}", offset) as advance:
        stream.write(len(head).to_bytes(8, "little") + head)
        for item in plan:
            for values in _slices(item):
                stream.write(values.data)
                advance(values.nbytes)


def _slices(item: _Planned) -> Iterator[NDArray[np.float32]]:
    """The tensor's values as contiguous little-endian float32, some rows at a time.

    A permuted tensor is cut between heads only.
    """
    rows = item.shape[0]
    width = int(np.prod(item.shape[1:]))
    unit = item.target.head_dim or 1
    step = max(unit, _SLICE_VALUES // width // unit * unit)
    raw = item.source.data.reshape(rows, -1)
    for start in range(0, rows, step):
        try:
            values = dequantize(raw[start : start + step], item.source.tensor_type)
        except (QuantError, NotImplementedError, ValueError) as error:
            kind = item.source.tensor_type.name
            raise ModelError(
                f"tensor {item.source.name} is stored as {kind}, which cannot be read: {error}"
            ) from None
        if item.target.head_dim:
            # llama.cpp interleaves the two rotary halves of each head; undo it.
            half = item.target.head_dim // 2
            values = values.reshape(-1, half, 2, width).swapaxes(1, 2)
        yield np.ascontiguousarray(values, dtype="<f4")
