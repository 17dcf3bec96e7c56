"""Reading a model folder: safetensors only, memory-mapped, every name and shape checked before use."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.worker.engine.config import ModelConfig, parse_config

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_READABLE = {"F32", "F16", "BF16"}
# Buffers some old folders carry; computed here from config.json instead.
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 64 * 1024


class BadWeights(ValueError):
    """A model folder that cannot be served; the message says which file and tensor, and what to do."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer, float32 as read. Matrices are [out, in]; `qkv` is q, k, v in this order, `gate_up` gate
    then up."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this model must hold, with its shape."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden),
        "model.norm.weight": (c.hidden,),
    }
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden)
    per_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (c.hidden,),
        "post_attention_layernorm.weight": (c.hidden,),
        "self_attn.q_proj.weight": (c.q_size, c.hidden),
        "self_attn.k_proj.weight": (c.kv_size, c.hidden),
        "self_attn.v_proj.weight": (c.kv_size, c.hidden),
        "self_attn.o_proj.weight": (c.hidden, c.q_size),
        "mlp.gate_proj.weight": (c.intermediate, c.hidden),
        "mlp.up_proj.weight": (c.intermediate, c.hidden),
        "mlp.down_proj.weight": (c.hidden, c.intermediate),
    }
    if c.qkv_bias:
        per_layer |= {
            f"self_attn.{n}_proj.bias": (s,) for n, s in zip("qkv", (c.q_size, c.kv_size, c.kv_size))
        }
    if c.out_bias:
        per_layer["self_attn.o_proj.bias"] = (c.hidden,)
    if c.qk_norm:
        per_layer |= {"self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,)}
    for i in range(c.layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in per_layer.items()}
    return shapes


class ModelFolder:
    """A checked model folder. Tensors are read on demand, as float32; `close()` unmaps the files.

    Raises `UnsupportedModel` or `BadWeights` when the folder cannot be computed.
    """

    def __init__(self, path: Path, max_len: int | None = None) -> None:
        self.path = path
        self._raw = _read_json(path / "config.json", "the folder is not a Hugging Face model folder")
        self.config = parse_config(self._raw, str(path / "config.json"), max_len)
        self._files = _weight_files(path)
        self._handles = {file: _open(file) for file in self._files}
        self._where = {name: file for file, handle in self._handles.items() for name in handle.keys()}  # noqa: SIM118
        self._check()

    def tensor(self, name: str) -> torch.Tensor:
        """Tensor `name` as float32, contiguous, in memory of its own: what is only mapped changes with the
        file, and ends the process when the file is cut short."""
        return self._handles[self._where[name]].get_tensor(name).to(torch.float32, copy=True).contiguous()

    def part(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Indices [start, stop) of dimension `dim` of a tensor, as `tensor`; only those are read."""
        view = self._handles[self._where[name]].get_slice(name)
        cut = view[start:stop] if dim == 0 else view[:, start:stop]
        return cut.to(torch.float32, copy=True).contiguous()

    def layers(self) -> Iterator[LayerWeights]:
        """The layers in order, fused as `LayerWeights` says; one is in memory at a time."""
        c = self.config
        for i in range(c.layers):
            p = f"model.layers.{i}."
            attn = p + "self_attn."
            yield LayerWeights(
                input_norm=self.tensor(p + "input_layernorm.weight"),
                qkv=torch.cat([self.tensor(f"{attn}{n}_proj.weight") for n in "qkv"]),
                qkv_bias=torch.cat([self.tensor(f"{attn}{n}_proj.bias") for n in "qkv"])
                if c.qkv_bias
                else None,
                q_norm=self.tensor(attn + "q_norm.weight") if c.qk_norm else None,
                k_norm=self.tensor(attn + "k_norm.weight") if c.qk_norm else None,
                out=self.tensor(attn + "o_proj.weight"),
                out_bias=self.tensor(attn + "o_proj.bias") if c.out_bias else None,
                post_norm=self.tensor(p + "post_attention_layernorm.weight"),
                gate_up=self._stack([f"{p}mlp.{n}_proj.weight" for n in ("gate", "up")]),
                down=self.tensor(p + "mlp.down_proj.weight"),
            )

    def fingerprint(self, dtype: str, kv_dtype: str) -> str:
        """Names these weights computed in this dtype with this KV format: equal on every machine.

        SHA-256 over the config, each file's header and size, and 64 samples of 64 KiB spread over it:
        reading whole files would cost more than loading them.
        """
        digest = hashlib.sha256(f"{dtype}\0{kv_dtype}\0{self.config!r}\0".encode())
        for file in self._files:
            size = file.stat().st_size
            with file.open("rb") as stream:
                header = stream.read(8)
                header += stream.read(int.from_bytes(header, "little"))
                digest.update(f"{file.name}\0{size}\0".encode() + header)
                step = max((size - len(header)) // _SAMPLES_PER_FILE, _SAMPLE_BYTES)
                for offset in range(len(header), size, step):
                    stream.seek(offset)
                    digest.update(stream.read(_SAMPLE_BYTES))
        return digest.hexdigest()[:32]

    def close(self) -> None:
        self._handles.clear()

    def _stack(self, names: list[str]) -> torch.Tensor:
        return torch.cat([self.tensor(name) for name in names])

    def _check(self) -> None:
        expected = expected_shapes(self.config)
        missing = sorted(expected.keys() - self._where.keys())
        if missing:
            raise BadWeights(f"{self.path}: {_some(missing)} missing; fetch the model's weight files again")
        optional = {"lm_head.weight"} if self.config.tied else set()
        extra = sorted(
            n for n in self._where.keys() - expected.keys() - optional if not _IGNORED.fullmatch(n)
        )
        if extra:
            raise BadWeights(
                f"{self.path}: {_some(extra)} unexpected for {self.config.family}: config.json and weights "
                "do not belong together, or the model is of another kind"
            )
        for name, shape in expected.items():
            file = self._where[name]
            part = self._handles[file].get_slice(name)
            if tuple(part.get_shape()) != shape:
                raise BadWeights(f"{file}: {name} is {tuple(part.get_shape())}, config.json makes it {shape}")
            if part.get_dtype() not in _READABLE:
                raise BadWeights(
                    f"{file}: {name} is stored as {part.get_dtype()}; convert the model to F32, F16 or BF16"
                )


def _read_json(path: Path, advice: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadWeights(f"{path} does not exist: {advice}") from None
    except (OSError, ValueError) as error:
        raise BadWeights(f"{path} cannot be read ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise BadWeights(f"{path} is not a JSON object; fetch it again")
    return value


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(_read_json(index, "").get("weight_map", {}).values()))
        for shard in shards:
            if Path(shard).name != shard or not (path / shard).is_file():
                raise BadWeights(f"{index}: shard {shard!r} is not in the folder; fetch the model again")
        files = [path / shard for shard in shards]
    else:
        files = sorted(path.glob("*.safetensors"))
    if files:
        return files
    pickled = sorted(p.name for pattern in _PICKLED for p in path.glob(pattern))
    if pickled:
        raise BadWeights(
            f"{path}: only pickled weights ({', '.join(pickled)}), refused since reading them can run code; "
            "convert them to safetensors"
        )
    raise BadWeights(f"{path}: no *.safetensors file; fetch the model's weights")


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise BadWeights(f"{file} is not a readable safetensors file ({error}); fetch it again") from None


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more tensors are" if len(names) > 3 else f"{shown} is"
