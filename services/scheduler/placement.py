"""Which instance a waiting sequence goes to: the one that would have its first token soonest.

Pure: candidates are numbers, made by `services/scheduler/outlook.py`. Sessions stick to the instance that
holds their prefix because that is what makes it the cheapest, and leave it when its queue makes another so.
"""

import random
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.budget import Cost

LOAD_TOKENS = 8
"""Tokens of its output for which the newcomer's cost to itself of everybody decoding beside it counts."""

WORK_LEAST, WORK_DELAY, WORK_MOST = 0.5, 3.0, 4.0
"""Work on a prompt delays those that come while it is waited for: where prompts take a share r of the time,
r / (1 - r) requests. Each counts `WORK_DELAY` times as the newcomer's own delay. Without it a cached prefix
is given up for a short queue, and the fleet computes it again and again; what is being computed already is
not begun anew elsewhere for nothing (docs/decisions/2026-11-30-placement.md)."""

EVICTION_SHARE = 0.05
"""Likelihood that a cached token which has to go for the newcomer would have been wanted again."""

TIE = 1.01
"""Costs within this factor of the best are equal."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An instance as a waiting sequence sees it. Tokens are of prompt and known output."""

    instance: str
    lacking_tokens: int
    """Of the sequence, those to compute there: neither cached nor about to be."""
    fetch_tokens: int = 0
    """Of these, what the second tier would bring;"""
    fetch_s: float = 0.0
    """in so many seconds."""
    soon_s: float = 0.0
    """Until those about to be cached are."""
    ahead_s: float = 0.0
    """Expected time of the frames in flight, and of being late with them."""
    room_s: float = 0.0
    """Until others have ended whose slot or blocks it needs."""
    queue_tokens: int = 0
    """Prompt tokens to be computed there first: of admitted sequences, and of waiting ones that will go
    there."""
    running: int = 0
    """Sequences there, and waiting ones that will go there."""
    decoding: int = 0
    evicted_tokens: int = 0
    """Cached tokens it would push out."""
    prompt_share: float = 0.0
    """Part of its time that prompts took lately."""
    cost: Cost
    step_tokens: int
    """Prompt tokens that a step there computes beside the decodes."""


class Placement(Protocol):
    """How one of several instances is chosen."""

    def choose(self, candidates: Many[Candidate], order: int, planning: str, rng: random.Random) -> Candidate:
        """`order` is the sequence's arrival number, `planning` the instance whose frame is being planned,
        which can take it at once. Raises ValueError on no candidates."""


class FirstTokenSoonest:
    """By predicted time to first token. Among equals the instance that is being planned, else one drawn."""

    def choose(self, candidates: Many[Candidate], order: int, planning: str, rng: random.Random) -> Candidate:
        costs = [cost_s(candidate) for candidate in candidates]
        best = min(costs)
        ties = [c for c, cost in zip(candidates, costs) if cost <= best * TIE]
        return next((c for c in ties if c.instance == planning), None) or rng.choice(ties)


class RoundRobin:
    """In turn, whatever they hold; for comparison."""

    def choose(self, candidates: Many[Candidate], order: int, planning: str, rng: random.Random) -> Candidate:
        return sorted(candidates, key=lambda c: c.instance)[order % len(candidates)]


class LeastLoad:
    """The one with the fewest sequences, then prompt tokens to compute; for comparison."""

    def choose(self, candidates: Many[Candidate], order: int, planning: str, rng: random.Random) -> Candidate:
        loads = [(c.running, c.queue_tokens) for c in candidates]
        least = min(loads)
        ties = [c for c, load in zip(candidates, loads) if load == least]
        return next((c for c in ties if c.instance == planning), None) or rng.choice(ties)


def first_token_s(candidate: Candidate) -> float:
    """Predicted seconds to the first token: frames in flight, room, prompts ahead at the share of a step that
    prompts have, then its own; or what the tier brings of it meanwhile, where that is sooner."""
    c = candidate
    begin_s = max(c.ahead_s, c.room_s)
    computed_s = max(begin_s + _prompts_s(c, c.queue_tokens), c.soon_s) + _prompts_s(c, c.lacking_tokens)
    if not c.fetch_tokens:
        return computed_s
    left = max(1, c.lacking_tokens - c.fetch_tokens)
    return min(
        computed_s,
        begin_s + max(_prompts_s(c, c.queue_tokens), c.fetch_s + c.cost.fixed_s) + _prompts_s(c, left),
    )


def cost_s(candidate: Candidate) -> float:
    """`first_token_s`, and what the choice costs others and itself later: the work that others wait for,
    decodes beside it, and what is pushed out of the cache."""
    c = candidate
    share = min(c.prompt_share, 0.99)
    delayed = min(WORK_LEAST + WORK_DELAY * share / (1.0 - share), WORK_MOST)
    tokens = delayed * (c.lacking_tokens - c.fetch_tokens) + EVICTION_SHARE * c.evicted_tokens
    return first_token_s(c) + tokens * c.cost.per_token_s + LOAD_TOKENS * c.cost.per_decode_s * c.running


def _prompts_s(c: Candidate, tokens: int) -> float:
    """Seconds of computing prompt tokens step by step, each beside the decodes."""
    if tokens <= 0:
        return 0.0
    steps = -(-tokens // max(1, c.step_tokens))
    return steps * c.cost.step_s(c.decoding, 0) + tokens * c.cost.per_token_s
