"""Reading a GGUF file's metadata with its types checked: a damaged one holds anything under any key. Pure."""

import math
from typing import Any

from shared.model.errors import ModelError

Metadata = dict[str, Any]
"""Every key of the file: str, int, float, bool or a list of these."""

_ADVICE = "the file is damaged, or made by a converter that is not llama.cpp's; get the model again"


def required(meta: Metadata, key: str) -> Any:
    """The value of `key`, which a language model always has."""
    if meta.get(key) is None:
        raise ModelError(f"the GGUF file has no {key}; it is not a whole language model")
    return meta[key]


def integer(meta: Metadata, key: str, low: int, high: int, default: int | None = None) -> int:
    """A whole number in [low, high]. Without `default` the key must be there."""
    value = required(meta, key) if default is None else meta.get(key, default)
    if isinstance(value, list):
        # Hybrid models give a number for each layer.
        raise ModelError(f"the GGUF file has a list for {key}: layers that differ are not supported")
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelError(
            f"the GGUF file says {_shown(value)} for {key}, wanted a whole number from {low} to {high}; "
            f"{_ADVICE}"
        )
    return value


def number(meta: Metadata, key: str, default: float | None = None) -> float:
    """A positive finite number."""
    value = required(meta, key) if default is None else meta.get(key, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise ModelError(f"the GGUF file says {_shown(value)} for {key}, wanted a positive number; {_ADVICE}")
    return float(value)


def text(meta: Metadata, key: str, default: str | None = None) -> str:
    value = required(meta, key) if default is None else meta.get(key, default)
    if not isinstance(value, str):
        raise ModelError(f"the GGUF file says {_shown(value)} for {key}, wanted a text; {_ADVICE}")
    return value


def flag(meta: Metadata, key: str, default: bool) -> bool:
    value = meta.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"the GGUF file says {_shown(value)} for {key}, wanted true or false; {_ADVICE}")
    return value


def items(meta: Metadata, key: str, kind: type, count: int | None = None) -> list[Any]:
    """A list of values of one type; `count` of them where it is given."""
    value = required(meta, key)
    if not isinstance(value, list) or any(not isinstance(v, kind) or isinstance(v, bool) for v in value):
        raise ModelError(
            f"the GGUF file says {_shown(value)} for {key}, wanted a list of {kind.__name__}; {_ADVICE}"
        )
    if count is not None and len(value) != count:
        raise ModelError(f"the GGUF file has {len(value)} entries in {key}, wanted {count}; {_ADVICE}")
    return value


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 60 else f"{shown[:50]}… ({len(shown)} characters)"
