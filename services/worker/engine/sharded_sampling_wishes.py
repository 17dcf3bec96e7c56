"""What the rows of a step ask of sampling over a split vocabulary, and what answering took."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.draw import DRAW
from services.worker.engine.sampler import COLDEST, SampleRow, draws_of

MOST_CANDIDATES = 256
"""Of a row and a rank, where top-k names their number."""

_USUAL_CANDIDATES = 128
"""Where it does not: top-p and min-p rarely leave more."""

_SPARE = 16
"""Candidates beyond top-k: which of several equal ones count is seen from those that follow."""


@dataclass
class Traffic:
    """Messages and bytes that sampling took so far, per rank."""

    steps: int = 0
    messages_now: int = 0
    messages_before: int = 0
    """With one for each kind of thing told: header, largest, sums, candidates, log-probabilities, best ids,
    and each kind that the second message carried."""
    bytes_now: int = 0
    bytes_before: int = 0
    """With the logits of all rows joined."""
    rows: int = 0
    joined: int = 0
    """Rows whose slices were joined all the same."""


@dataclass(frozen=True)
class Wishes:
    """What the rows of a step ask for: the same on all ranks. [rows] each, but for `wants` and `tops`."""

    draws: NDArray[np.void]
    """`DRAW`, but for `largest`."""
    drawn: NDArray[np.bool_]
    """Not simply the largest."""
    filtered: NDArray[np.bool_]
    shifted: NDArray[np.bool_]
    """Bias, penalties or min_tokens change its logits."""
    summed: NDArray[np.bool_]
    """The mass of the whole row counts."""
    listed: NDArray[np.int64]
    """Candidates of each rank."""
    wants: list[int]
    """Rows whose log-probabilities are asked for, and of how many alternatives."""
    tops: NDArray[np.int64]

    @staticmethod
    def of(rows: Sequence[SampleRow], vocab: int) -> "Wishes":
        drawn = np.array([row.sampling.temperature >= COLDEST for row in rows], np.bool_)
        draws = np.zeros(len(rows), DRAW)
        draws["top_p"] = draws["temperature"] = 1.0
        filtered = summed = drawn
        listed = np.zeros(len(rows), np.int64)
        if drawn.any():
            which = np.flatnonzero(drawn)
            draws[which] = draws_of(rows, np.zeros(len(rows), np.int32), which.tolist())
            k, floored = draws["top_k"], draws["min_p"] > 0.0
            k = np.where(k < vocab, k, 0)
            filtered = drawn & ((k > 0) | floored | (draws["top_p"] < 1.0))
            summed = drawn & (k == 0) & ~floored
            listed = np.where(k > 0, np.minimum(k + _SPARE, MOST_CANDIDATES), _USUAL_CANDIDATES)
            hopeless = (k > MOST_CANDIDATES) & ~floored
            listed = np.where(filtered & ~hopeless, np.minimum(listed, vocab), 0)
        wants = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        return Wishes(
            draws=draws,
            drawn=drawn,
            filtered=filtered,
            shifted=np.array([_shifts(row) for row in rows], np.bool_),
            summed=summed,
            listed=listed,
            wants=wants,
            tops=np.array([min(max(rows[i].sampling.logprobs or 0, 0), vocab) for i in wants], np.int64),
        )


def _shifts(row: SampleRow) -> bool:
    """Whether `sampler.adjust` does anything to the row."""
    s = row.sampling
    return bool(
        s.logit_bias
        or s.repetition_penalty != 1.0
        or (s.stop_token_ids and s.min_tokens > row.index)
        or ((s.presence_penalty or s.frequency_penalty) and row.index)
    )
