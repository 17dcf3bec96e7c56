"""One frozen settings class per process, read once from `HORTATOR_<FIELD>` variables; unknown keys raise."""

import dataclasses
import difflib
import math
import os
import re
import secrets
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

PREFIX = "HORTATOR_"
OF_THE_NODE = {
    "HORTATOR_CACHE": "Where this machine keeps models and compiled kernels (default ~/.cache/hortator)."
}
"""Variables of the machine rather than of a service, and what they mean."""

S = TypeVar("S", bound="ServiceSettings")

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}
_SIZE_UNITS = {"": 0, "kib": 10, "mib": 20, "gib": 30, "tib": 40}


class CannotStart(Exception):
    """Why a service cannot work, for who started it to mend: what is wrong, where, and what to do."""


class SettingsError(CannotStart, ValueError):
    """A setting that is unknown or cannot be read; the message names the variable and what would be valid."""


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """What every service can be told. Subclasses add their own fields, units in names."""

    unused: ClassVar[frozenset[str]] = frozenset()
    """Fields of this class that a subclass accepts, so that one environment does for all, but never reads."""

    nats_url: str = "nats://127.0.0.1:4222"
    """Where the broker is."""
    nats_user: str = ""
    """Empty: no authentication. Answers then come to `_INBOX.>`, else to `_INBOX.<user>.>`."""
    nats_password: str = dataclasses.field(default="", repr=False)
    """Of `nats_user`."""
    redis_url: str = dataclasses.field(default="redis://127.0.0.1:6379/0", repr=False)
    """May hold user:password. Set to nothing (HORTATOR_REDIS_URL=): no Redis, so no reuse of KV across
    instances."""
    http: str = "127.0.0.1:0"
    """HOST:PORT of health and metrics; port 0: any free port, written to `ready_file`."""
    model: str = "smollm2-135m-instruct"
    """Name of the model served; part of subjects and Redis keys."""
    instance: str = ""
    """Name of this process in subjects, logs and metrics, e.g. `w0`; empty: drawn at random."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log lines are JSON, on standard output."""
    ready_file: str = ""
    """Written atomically with {"http": "host:port", "pid": n} once the service listens; empty: none."""
    parent_pid: int = 0
    """Die with this process, which must be our parent; 0: nobody's child."""
    stop_grace_s: float = 15.0
    """After SIGTERM the service may finish its work this long; then it is cancelled."""


def load(cls: type[S], env: Mapping[str, str] = os.environ) -> S:
    """Read `cls` from `env`. Raises `SettingsError` for unknown `HORTATOR_*` keys and unreadable values."""
    hints = typing.get_type_hints(cls)
    names = {PREFIX + field.name.upper(): field.name for field in dataclasses.fields(cls) if field.init}
    values: dict[str, Any] = {}
    for key, text in env.items():
        if not key.startswith(PREFIX) or key in OF_THE_NODE:
            continue
        if key not in names:
            raise SettingsError(_unknown(key, list(names)))
        values[names[key]] = convert(key, text, hints[names[key]])
    if not values.get("instance"):
        values["instance"] = f"{_service_word(cls)}-{secrets.token_hex(4)}"
    return cls(**values)


def as_env(settings: ServiceSettings) -> dict[str, str]:
    """The variables from which `load` makes these settings again; defaults are left out."""
    return {
        PREFIX + field.name.upper(): _text(getattr(settings, field.name))
        for field in dataclasses.fields(settings)
        if getattr(settings, field.name) != field.default
    }


def _text(value: Any) -> str:
    if value is None:
        return ""
    return ("1" if value else "0") if isinstance(value, bool) else str(value)


def _service_word(cls: type) -> str:
    return cls.__name__.removesuffix("Settings").lower() or "service"


def _unknown(key: str, known: list[str]) -> str:
    names = [name.removeprefix(PREFIX) for name in known]
    near = difflib.get_close_matches(key.removeprefix(PREFIX), names, n=3)
    meant = f"; did you mean {', '.join(PREFIX + name for name in near)}?" if near else "."
    return f"unknown setting {key}{meant} Unset it or correct its name"


def convert(key: str, text: str, type_: Any) -> Any:
    """`text` as a value of a field's type. Raises `SettingsError` that begins with `key`."""
    args = typing.get_args(type_)
    if isinstance(type_, types.UnionType) and type(None) in args:
        (inner,) = (arg for arg in args if arg is not type(None))
        return None if text == "" else convert(key, text, inner)
    if typing.get_origin(type_) is Literal:
        if text in args:
            return text
        raise SettingsError(f"{key}={text!r} is not one of {', '.join(choices(type_))}")
    try:
        if type_ is bool:
            return _boolean(text)
        if type_ in (str, Path):
            return type_(text)
        if type_ in (int, float):
            number = type_(text)
    except ValueError:
        raise SettingsError(f"{key}={text!r} cannot be read as {type_.__name__}") from None
    if type_ not in (int, float):
        raise SettingsError(f"{key}: settings of type {type_!r} are not supported")
    # Sizes, counts and times: no service has a use for one below zero, and all of them fail late and far off.
    if not 0 <= number < math.inf:
        raise SettingsError(f"{key}={text!r} must be a finite number of at least 0")
    return number


def parse_size(key: str, text: str) -> int:
    """Bytes of e.g. `512MiB` or `536870912`. Raises `SettingsError` that begins with `key`."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text.strip())
    shift = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or shift is None:
        raise SettingsError(f"{key}={text!r} is not a size: write bytes, or for example 512MiB or 2GiB")
    return int(float(match[1]) * (1 << shift))


def choices(type_: Any) -> list[str]:
    """What a field of few values takes, without the empty text; none of any other field."""
    return [str(a) for a in typing.get_args(type_) if a != ""] if typing.get_origin(type_) is Literal else []


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(text)
