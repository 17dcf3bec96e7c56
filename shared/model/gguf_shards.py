"""A GGUF model of several files, `NAME-00001-of-00003.gguf` and so on: which they are, and as one header."""

import re
from pathlib import Path

from shared.model.errors import ModelError

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\Z")
_MAX_SHARDS = 1000


def model_stem(file: Path) -> str:
    """The file's name without `.gguf` and without its number among several."""
    match = _SHARD.match(file.stem)
    return match[1] if match else file.stem


def shard_files(file: Path) -> tuple[Path, ...]:
    """Every file of the model `file` belongs to, in order. Raises ModelError that names a missing one.

    Any of them stands for the whole. The first holds the metadata.
    """
    match = _SHARD.match(file.stem)
    if match is None:
        return (file,)
    count = int(match[3])
    if not 1 <= int(match[2]) <= count <= _MAX_SHARDS:
        raise ModelError(f"{file} is numbered {match[2]} of {match[3]}, which cannot be; rename it")
    files = tuple(
        file.with_name(f"{match[1]}-{number:05d}-of-{count:05d}{file.suffix}")
        for number in range(1, count + 1)
    )
    lacking = [f.name for f in files if not f.is_file()]
    if lacking:
        raise ModelError(
            f"{file} is one of {count} files of a model, and {', '.join(lacking[:3])}"
            f"{' and more' if len(lacking) > 3 else ''} of them is not in {file.parent}; "
            "put all of them there"
        )
    return files
