"""manifest.json of a cached model folder: what it is, where it came from, and the SHA-256 of every file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from shared.model.errors import ModelError

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Entry:
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    name: str
    aliases: tuple[str, ...]
    source: str
    licence: str
    converter: int = 1
    """Version of the converter that made the folder; the first one did not write its number."""
    files: dict[str, Entry] = field(default_factory=dict)


def hash_file(path: Path, start: bytes = b"") -> str:
    """SHA-256 of the file, lower-case hex."""
    digest = sha256(start)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def write_manifest(
    folder: Path, name: str, aliases: tuple[str, ...], source: str, licence: str, converter: int = 1
) -> Manifest:
    """Hash every file of the folder and write its manifest."""
    files = {
        path.name: Entry(path.stat().st_size, hash_file(path))
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != MANIFEST
    }
    manifest = Manifest(name, aliases, source, licence, converter, files)
    body = {
        "format": FORMAT,
        "name": name,
        "aliases": list(aliases),
        "source": source,
        "licence": licence,
        "converter": converter,
        "files": {n: {"size": e.size, "sha256": e.sha256} for n, e in files.items()},
    }
    (folder / MANIFEST).write_text(json.dumps(body, indent=1) + "\n")
    return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """None where the folder has no manifest. Raises ModelError for one that cannot be read."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        body = json.loads(path.read_text())
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']}, this version reads {FORMAT}")
        files = {n: Entry(int(e["size"]), str(e["sha256"])) for n, e in body["files"].items()}
        return Manifest(
            body["name"],
            tuple(body["aliases"]),
            body["source"],
            body["licence"],
            int(body.get("converter", 1)),
            files,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is damaged ({error}); remove the folder and pull the model again") from None


def differences(folder: Path, manifest: Manifest) -> Iterator[str]:
    """What differs from the manifest, in words; nothing if every byte is as it was written."""
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != entry.size:
            yield f"{name} has {path.stat().st_size} bytes, wanted {entry.size}"
        elif (found := hash_file(path)) != entry.sha256:
            yield f"{name} has SHA-256 {found}, wanted {entry.sha256}"
