"""Which instance a waiting sequence goes to: the one that would have its first token soonest."""

import random
from collections.abc import Sequence as Many
from dataclasses import dataclass

RUNNING_WEIGHT = 0.5
"""Share of a step that each running sequence counts for: it slows the newcomer's decoding later on."""


@dataclass(frozen=True)
class Candidate:
    """What placement knows of an instance with room for the sequence."""

    instance: str
    cached_tokens: int
    """Of the sequence's ids, by the instance's own block table or the shared index."""
    backlog_tokens: int
    """Prompt tokens admitted there and not yet computed."""
    ahead_s: float
    """Expected time of the frames in flight."""
    running: int
    per_token_s: float
    step_s: float
    """Length of its steps now."""


def cost_s(candidate: Candidate, tokens: int) -> float:
    """Estimated seconds to the first token of a sequence of `tokens` ids, load of later decoding included."""
    compute = (max(1, tokens - candidate.cached_tokens) + candidate.backlog_tokens) * candidate.per_token_s
    return candidate.ahead_s + compute + candidate.step_s * (1 + RUNNING_WEIGHT * candidate.running)


def choose(candidates: Many[Candidate], tokens: int, planning: str, rng: random.Random) -> str:
    """The cheapest. Among equals (within 1 %) the instance that is being planned, which can take it at
    once; else one drawn by `rng`. Raises ValueError on no candidates.
    """
    costs = [cost_s(candidate, tokens) for candidate in candidates]
    best = min(costs)
    ties = [c.instance for c, cost in zip(candidates, costs) if cost <= best * 1.01]
    return planning if planning in ties else rng.choice(ties)
