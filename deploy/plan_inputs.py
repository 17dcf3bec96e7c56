"""What `hortator plan` plans with: a model's sizes from whatever names it, and a device.

Nothing is downloaded but a config.json.
"""

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deploy import plan_machine
from services.worker.memory.devices import BadDevice, Device, device_of, find_device
from services.worker.memory.model_config import parse_sizes, read_sizes
from services.worker.memory.sizes import (
    BadModel,
    ModelSizes,
    parse_count,
    sizes_of_numbers,
    sizes_of_parameters,
)
from shared.model.cache import ModelCache
from shared.model.catalog import find, known_names
from shared.model.conversion import key_of_catalog
from shared.model.errors import ModelError
from shared.model.manifest import read_manifest

_MOST_BYTES = 16 << 20
"""Of a config.json."""
_CONFIG = "config.json"
_MEASURES = "services.worker.engine.peaks"

_CATALOG: dict[str, dict[str, object]] = {
    "smollm2-135m-instruct": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
}
"""Sizes of the catalogue's models, so that they need not be fetched to be planned for."""


def model_named(name: str, context: int | None) -> ModelSizes:
    """The sizes of a catalogue name, folder, config.json, .gguf file, name in the cache or hub repository.

    Raises `BadModel`, or `shared.model.ModelError`.
    """
    known = find(name)
    if known is not None and not ModelCache().has(key_of_catalog(known)) and known.name in _CATALOG:
        return read_sizes(_CATALOG[known.name], known.name, context, known.name)
    if known is not None:
        return _from_file(ModelCache().folder(key_of_catalog(known)) / _CONFIG, context, known.name)
    path = _path(name)
    if path.is_dir():
        if not (path / _CONFIG).is_file():
            raise BadModel(f"{path} has no {_CONFIG}: give the folder of a model, or a {_CONFIG}")
        return _from_file(path / _CONFIG, context, path.resolve().name)
    if path.suffix.lower() == ".gguf":
        return _from_gguf(path, context)
    if path.is_file() or path.suffix.lower() == ".json":
        return _from_file(path, context, path.name if path.name != _CONFIG else path.resolve().parent.name)
    if (folder := _cached(name)) is not None:
        return _from_file(folder / _CONFIG, context, name)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _from_file(_hub_config(name), context, name)
    raise BadModel(
        f"no model {name!r}: it is neither a folder, a {_CONFIG}, a .gguf file, a name in the cache nor "
        f"known. Known: {known_names()}. For the Hugging Face hub write org/name; "
        "without a model give --params 10B"
    )


@dataclass(frozen=True)
class Numbers:
    """Sizes that a person gives instead of a model; 0 and empty: not given."""

    params: str = ""
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0

    @property
    def given(self) -> bool:
        return self != Numbers()


def model_of_numbers(n: Numbers) -> ModelSizes:
    """The sizes that a person gives. Raises `BadModel`."""
    count = parse_count(n.params) if n.params else None
    if count is not None and not (n.layers or n.hidden or n.heads or n.kv_heads):
        return sizes_of_parameters(count)
    if not (n.layers and n.hidden):
        raise BadModel(
            "--layers and --hidden are needed together, to know KV; --heads and --kv-heads refine them"
        )
    return sizes_of_numbers(n.layers, n.hidden, n.heads or None, n.kv_heads or None, count)


def device_named(name: str) -> Device:
    """`cpu`, `measured`, a .json file, or a name of the sheet. Raises `BadDevice`."""
    if name.lower() == "cpu":
        return plan_machine.this_machine()
    if name.lower() == "measured":
        return _measured()
    path = _path(name)
    if path.suffix.lower() == ".json" or path.is_file():
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise BadDevice(f"--device {path} is larger than a description of a device can be")
            return device_of(json.loads(path.read_text(encoding="utf-8")), str(path))
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, BadDevice):
                raise
            raise BadDevice(f"--device {path} cannot be read as JSON: {str(error)[:120]}") from None
    return find_device(name)


def _path(name: str) -> Path:
    """With ~ expanded, where there is such a home."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _cached(name: str) -> Path | None:
    """The imported model of that name, or of that folder name in the cache."""
    cache = ModelCache()
    for folder in map(cache.folder, cache.names()):
        with suppress(ModelError):  # one damaged folder must not hide the others
            if folder.name == name or ((known := read_manifest(folder)) and known.name == name):
                return folder
    return None


def _from_file(path: Path, context: int | None, name: str) -> ModelSizes:
    try:
        with path.open("rb") as stream:
            text = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise BadModel(f"{path} cannot be read: {error.strerror or error}") from None
    if len(text) > _MOST_BYTES:
        raise BadModel(f"{path} has over {_MOST_BYTES >> 20} MiB: that is no {_CONFIG}")
    return parse_sizes(text, str(path), context, name)


def _from_gguf(path: Path, context: int | None) -> ModelSizes:
    """By its header; weights are not read."""
    try:
        from shared.model.gguf_config import config_of
        from shared.model.gguf_reader import read_gguf
    except ImportError as error:
        raise BadModel(
            f"reading {path.name} needs the package {error.name}: pip install 'hortator[worker]', or give "
            f"the model's {_CONFIG}"
        ) from None
    from shared.model.gguf_shards import shard_files

    parts = [read_gguf(file) for file in shard_files(path)]
    shapes = {tensor.name: tensor.shape for part in parts for tensor in part.tensors}
    meta = dict(parts[0].meta)
    # Rotary scaling changes no size, and finding it takes values of a tensor.
    shapes.pop("rope_freqs.weight", None)
    return read_sizes(config_of(meta, shapes, None), str(path), context, path.stem)


def _hub_config(repository: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise BadModel(
            f"{repository} looks like a hub repository, but huggingface_hub is not installed: pip install "
            f"'hortator[worker]', or give the path of its {_CONFIG}"
        ) from None
    try:
        return Path(hf_hub_download(repository, _CONFIG))
    except Exception as error:  # the hub client raises many kinds: HTTP, name, permission, disk
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadModel(
            f"{_CONFIG} of {repository} cannot be had from the hub ({first}): give its path"
        ) from None


def _measured() -> Device:
    """This machine's GPU, or its CPU, as a process of the worker measures it now."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", _MEASURES],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BadDevice(
            f"--device measured: this machine could not be measured ({last}); it takes hortator[worker]. "
            "--device cpu works without"
        )
    found = json.loads(done.stdout)
    if found["kind"] == "cpu":
        return plan_machine.measured(found)
    described = {
        "name": found["name"],
        "memory_gb": found["memory_bytes"] / 1e9,
        "read_gb_s": found["read_gb_s"],
        "tflops": found["matmul_gf_s"] / 1e3,
        "link_gb_s": 32,
        "kind": found["kind"],
        "measured": True,
    }
    return device_of(described, "measured here; links between devices are assumed to be PCIe 4.0 x16")
