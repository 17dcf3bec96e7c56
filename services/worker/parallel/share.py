"""What of a group's steps is computing and what communicating: of each layer, for decoding and for prompts.

Communication is what the step's messages take alone, by the times measured; exposed is what of it the rank
waited for, with whatever it waited for slower ranks.
"""

from dataclasses import dataclass
from typing import Any

PROMPT_TOKENS = 64
"""Steps of at least so many tokens count as prompts, smaller ones as decoding."""

RECENT = 0.05
"""Weight of a new step in what is told of recent ones."""

KINDS = ("decode", "prompt")


@dataclass(frozen=True)
class StepShare:
    """One step on this rank, in seconds."""

    tokens: int
    compute_s: float
    communication_s: float
    exposed_s: float
    undivided_s: float = 0.0
    """Computing that every rank does in full, as norms."""


@dataclass
class LayerShare:
    """A layer of recent steps of one kind, in seconds; means that forget."""

    steps: int = 0
    tokens: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    undivided_s: float = 0.0

    @property
    def share(self) -> float:
        """Communication over computing; 0 before the first step."""
        return self.communication_s / self.compute_s if self.compute_s else 0.0

    def add(self, step: StepShare, layers: int) -> None:
        weight = max(RECENT, 1 / (self.steps + 1))
        self.steps += 1
        self.tokens += weight * (step.tokens - self.tokens)
        self.compute_s += weight * (step.compute_s / layers - self.compute_s)
        self.communication_s += weight * (step.communication_s / layers - self.communication_s)
        self.exposed_s += weight * (step.exposed_s / layers - self.exposed_s)
        self.undivided_s += weight * (step.undivided_s / layers - self.undivided_s)

    def to_plain(self) -> dict[str, Any]:
        """For `status` and JSON, times in microseconds."""
        return {
            "steps": self.steps,
            "tokens": round(self.tokens, 1),
            "compute_us": round(self.compute_s * 1e6, 1),
            "communication_us": round(self.communication_s * 1e6, 1),
            "exposed_us": round(self.exposed_s * 1e6, 1),
            "share": round(self.share, 3),
        }


class Shares:
    """Totals since the start, and a layer of recent steps by kind."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.compute_s = self.communication_s = self.exposed_s = 0.0
        self.recent = {kind: LayerShare() for kind in KINDS}

    def add(self, step: StepShare) -> None:
        self.compute_s += step.compute_s
        self.communication_s += step.communication_s
        self.exposed_s += step.exposed_s
        self.recent[KINDS[step.tokens >= PROMPT_TOKENS]].add(step, self._layers)
