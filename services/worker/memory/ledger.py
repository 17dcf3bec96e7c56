"""The ledger: the memory of ranks by what it is for (design §6), and how far a prediction was from it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

TOLERANCE = 0.03
"""A class that was predicted this share too low or too high is worth a warning."""
_SLACK_BYTES = 8 << 20
"""Differences below are of no account: pages and allocators come in pieces."""
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True)
class Ledger:
    """Bytes by class, of one rank or of several together (`+`)."""

    runtime_bytes: int = 0
    """Interpreter, libraries, threads, device context: what a rank takes before it has a model."""
    weights_bytes: int = 0
    """Weights as they are kept, and tables that are computed once."""
    kv_bytes: int = 0
    """All KV blocks."""
    activation_bytes: int = 0
    """The peak of the widest step beyond what it finds: activations, logits, what sampling takes."""
    workspace_bytes: int = 0
    """Messages between ranks, scratch memory of kernels."""
    staging_bytes: int = 0
    """KV on its way to and from other memory."""

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))

    def __add__(self, other: "Ledger") -> "Ledger":
        return Ledger(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def as_dict(self) -> dict[str, int]:
        """The classes in their order, then the total."""
        return {name: getattr(self, name) for name in CLASSES} | {"total_bytes": self.total_bytes}

    @classmethod
    def of(cls, numbers: Mapping[str, int]) -> "Ledger":
        """Of `as_dict`; classes that are missing count as none."""
        return cls(**{name: int(numbers.get(name, 0)) for name in CLASSES})

    def arithmetic(self) -> str:
        """The sum in words: `weights 270.1 MiB + … = 900.0 MiB`; classes that take nothing are left out."""
        parts = [f"{word(name)} {size(getattr(self, name))}" for name in CLASSES if getattr(self, name)]
        return f"{' + '.join(parts) or 'nothing'} = {size(self.total_bytes)}"


CLASSES: tuple[str, ...] = tuple(f.name for f in fields(Ledger))


@dataclass(frozen=True)
class Difference:
    """A class, or `total_bytes`, whose prediction was off."""

    name: str
    predicted: int
    measured: int

    @property
    def share(self) -> float:
        """(measured - predicted) / measured."""
        return (self.measured - self.predicted) / max(self.measured, 1)

    def __str__(self) -> str:
        more = "more" if self.measured > self.predicted else "less"
        return (
            f"{word(self.name)}: measured {size(self.measured)}, {abs(self.share):.1%} {more} than the "
            f"{size(self.predicted)} predicted"
        )


def differences(predicted: Ledger, measured: Ledger, tolerance: float = TOLERANCE) -> list[Difference]:
    """Classes in which the two differ by more than `tolerance` of what was measured, and by more than pages
    and allocators explain. The runtime is none of them: how much of its libraries a process has read by then
    varies; it shows in the total."""
    found = []
    measures, numbers = measured.as_dict(), predicted.as_dict()
    for name, real in measures.items():
        if name == "runtime_bytes":
            continue
        off = abs(real - numbers[name])
        if off > tolerance * real and off > _SLACK_BYTES:
            found.append(Difference(name, numbers[name], real))
    return found


def word(name: str) -> str:
    """`kv_bytes` → `KV`, for people."""
    return {"kv_bytes": "KV", "activation_bytes": "activations"}.get(name, name.removesuffix("_bytes"))


def size(count: int) -> str:
    """Bytes for people: `512.0 MiB`."""
    for unit, name in _UNITS:
        if abs(count) >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
