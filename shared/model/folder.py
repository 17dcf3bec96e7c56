"""A model folder as Hugging Face lays it out, checked before anything in it is believed.

Nothing in a folder is ever executed: weights are safetensors, never pickle, and Python code that a folder
brings along (`auto_map`) is refused.
"""

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from shared.model.errors import ModelError
from shared.model.manifest import Manifest, read_manifest

_PICKLE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_MAX_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelFolder:
    """A folder that is safe to load. Whether its architecture can be run is the worker's decision."""

    path: Path
    name: str
    """What clients call it."""
    aliases: tuple[str, ...]
    config: dict[str, Any]
    """config.json."""
    context_length: int
    """Tokens of prompt and output together, as trained."""
    vocab_size: int
    eos_ids: tuple[int, ...]
    has_tokenizer: bool
    weights: tuple[Path, ...]
    """The safetensors files, in name order."""
    fingerprint: str
    """Hex; equal for equal weights and config, whatever the folder is called."""

    @property
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def chat_template(self) -> str | None:
        """The Jinja text, or None where the model has none."""
        separate = self.path / "chat_template.jinja"
        if separate.is_file():
            return separate.read_text(encoding="utf-8")
        template = _read_json(self.path / "tokenizer_config.json", optional=True).get("chat_template")
        if isinstance(template, list):  # several named ones; "default" is the one for chat
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        return template if isinstance(template, str) else None


def open_folder(path: Path, name: str = "", aliases: tuple[str, ...] = ()) -> ModelFolder:
    """Check the folder and read its facts. Raises ModelError that says what is wrong and what to do."""
    path = path.expanduser().resolve()
    if not path.is_dir():
        raise ModelError(f"{path} is not a folder; give a model folder, a .gguf file or a known model name")
    manifest = read_manifest(path)
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path} has no config.json, so it is not a model folder; give the folder that holds config.json "
            "and *.safetensors, or a .gguf file"
        )
    config = _read_json(path / "config.json")
    _refuse_code(path, config)
    weights = _weights(path)
    context = config.get("max_position_embeddings")
    if not isinstance(context, int) or context < 1:
        raise ModelError(
            f"{path}/config.json has no usable max_position_embeddings; it must be the context length"
        )
    vocab = config.get("vocab_size")
    if not isinstance(vocab, int) or vocab < 1:
        raise ModelError(f"{path}/config.json has no usable vocab_size")
    return ModelFolder(
        path=path,
        name=name or (manifest.name if manifest else path.name),
        aliases=aliases or (manifest.aliases if manifest else ()),
        config=config,
        context_length=context,
        vocab_size=vocab,
        eos_ids=_eos_ids(path, config),
        has_tokenizer=(path / "tokenizer.json").is_file(),
        weights=weights,
        fingerprint=_fingerprint(path, weights, manifest),
    )


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(body, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(body).__name__}")
    return body


def _refuse_code(path: Path, config: dict[str, Any]) -> None:
    for file, body in (
        ("config.json", config),
        ("tokenizer_config.json", _read_json(path / "tokenizer_config.json", optional=True)),
    ):
        if body.get("auto_map"):
            raise ModelError(
                f"{path}/{file} wants to run Python code of its own (auto_map: {body['auto_map']}), which is "
                "never done here. If the architecture is one of those in docs/models.md, remove the "
                "auto_map key; "
                "otherwise this model cannot be served"
            )


def _weights(path: Path) -> tuple[Path, ...]:
    index = path / _INDEX
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelError(
                    f"{index} names {name!r}: only .safetensors files in the same folder are read"
                )
            if not (path / name).is_file():
                raise ModelError(
                    f"{path / name} is missing, though {_INDEX} names it; download the model again"
                )
        files = [path / name for name in names]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for p in path.iterdir() if p.suffix in _PICKLE)
        if pickles:
            raise ModelError(
                f"{path} has only pickle weights ({', '.join(pickles[:3])}), which can run any code when "
                "they "
                "are loaded and are never opened here. Get the model's safetensors files, or convert it in a "
                "sandbox: transformers' save_pretrained writes safetensors"
            )
        raise ModelError(f"{path} has no *.safetensors file; download the model's weights")
    for file in files:
        _check_safetensors(file)
    return tuple(files)


def _check_safetensors(file: Path) -> None:
    """The header fits and the data is all there: a cut-off download is found before loading begins."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelError(f"{file} is not a safetensors file, or is cut off; download it again")
        try:
            header = json.loads(stream.read(length))
            end = max((t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            raise ModelError(f"{file} has a damaged safetensors header; download it again") from None
    if 8 + length + end != size:
        raise ModelError(
            f"{file} has {size} bytes but its header wants {8 + length + end}; download it again"
        )


def _eos_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    found: list[int] = []
    for body in (_read_json(path / "generation_config.json", optional=True), config):
        value = body.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found += [i for i in ids if isinstance(i, int) and i not in found]
    return tuple(found)


def _fingerprint(path: Path, weights: tuple[Path, ...], manifest: Manifest | None) -> str:
    """From the manifest where there is one; else from config, tensor tables and samples of each file.

    Hashing every byte of a large model at each start would take longer than loading it; three samples of
    1 MiB a file and all its tensor names, shapes and offsets tell models apart.
    """
    digest = sha256((path / "config.json").read_bytes())
    for file in weights:
        if manifest and file.name in manifest.files:
            digest.update(bytes.fromhex(manifest.files[file.name].sha256))
            continue
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(length))
            for start in (8 + length, size // 2, max(0, size - (1 << 20))):
                stream.seek(start)
                digest.update(stream.read(1 << 20))
    return digest.hexdigest()
