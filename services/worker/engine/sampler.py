"""Drawing the next token of every row of a step at once.

Order of effect, as in vLLM: log-probabilities are of the raw logits; then min_tokens and logit bias, the
repetition, frequency and presence penalties, temperature, min-p, top-k, top-p. What is left is drawn by
inverse CDF over ascending ids with one uniform per row (`uniform.py`). Ties are broken towards the lower id
everywhere, so the same logits give the same token whatever else is in the batch. Filters and draw are in
`draw.py`; this is about what comes before and after.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.engine.draw import DEPTHS, DRAW, DrawRows, best_first, draw_rows
from services.worker.engine.uniform import uniforms
from services.worker.step import I32, NOT_FINITE, TokenLogprobs
from shared.wire import Sampling

Scan = Callable[[NDArray[np.float32]], tuple[NDArray[np.bool_], NDArray[np.int64]]]
"""Values [rows, size] → (every value of the row is finite, index of its first maximum)."""

COLDEST = 1e-5
"""Below this temperature the largest is taken, as in vLLM: float32 could not tell it from a division by 0."""

HOTTEST = 1e30
"""Temperatures are lowered to this, which float32 holds."""

_MOST_IDS = 2**31 - 1
_MASKED = -np.inf


@dataclass(frozen=True)
class SampleRow:
    """What drawing one row needs."""

    sampling: Sampling
    choice: int
    history: I32
    """[known] prompt and output ids."""
    prompt_len: int
    """Of the original prompt: history[prompt_len:] is output."""

    @property
    def index(self) -> int:
        """Number of the output token to be drawn."""
        return len(self.history) - self.prompt_len


def scan_rows(values: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """`Scan` in numpy."""
    best = values.argmax(axis=1)  # NaN counts as largest
    top = np.take_along_axis(values, best[:, None], axis=1)[:, 0]
    return np.isfinite(top) & np.isfinite(values.min(axis=1)), best


def sample(
    logits: torch.Tensor, rows: Sequence[SampleRow], scan: Scan = scan_rows, draw: DrawRows = draw_rows
) -> tuple[I32, dict[int, TokenLogprobs]]:
    """Token of each row (`NOT_FINITE` where its logits are not) and the log-probabilities asked for, by row.

    `logits` [rows, vocab] float32 on the CPU; it is overwritten where a row's sampling changes it.
    """
    values = logits.numpy()
    finite, greedy = scan(values)
    tokens = greedy.astype(np.int32)
    wants = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None and finite[i]]
    raw = torch.log_softmax(logits[wants], dim=-1) if wants else None
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what is not finite is found below
        changed = [i for i, row in enumerate(rows) if finite[i] and adjust(values[i], row)]
    for i in changed:
        tokens[i] = values[i].argmax()  # NaN counts as largest
        finite[i] = np.isfinite(values[i, tokens[i]])
    drawn = [i for i, row in enumerate(rows) if finite[i] and row.sampling.temperature >= COLDEST]
    if drawn:
        tokens[drawn] = draw(values, draws_of(rows, tokens, drawn))
    tokens[~finite] = NOT_FINITE
    if raw is None:
        return tokens, {}
    counts = [rows[i].sampling.logprobs or 0 for i in wants]
    found = top_logprobs(raw, tokens[wants], counts)
    return tokens, {i: TokenLogprobs(chosen, top) for i, (chosen, top) in zip(wants, found)}


def adjust(logits: NDArray[np.float32], row: SampleRow) -> bool:
    """Apply min_tokens, bias and penalties in place; False if there are none."""
    s, changed = row.sampling, False
    if s.min_tokens > row.index and s.stop_token_ids:
        logits[list(s.stop_token_ids)] = _MASKED
        changed = True
    if s.logit_bias:
        biased, bias = zip(*s.logit_bias)
        np.add.at(logits, list(biased), np.asarray(bias, np.float32))
        changed = True
    if s.repetition_penalty != 1.0:
        ids = np.unique(row.history)
        seen, penalty = logits[ids], np.float32(s.repetition_penalty)
        logits[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        changed = True
    if (s.presence_penalty or s.frequency_penalty) and row.index:
        ids, times = np.unique(row.history[row.prompt_len :], return_counts=True)
        logits[ids] -= (times * s.frequency_penalty + s.presence_penalty).astype(np.float32)
        changed = True
    return changed


def draws_of(rows: Sequence[SampleRow], largest: I32, which: Sequence[int]) -> NDArray[np.void]:
    """`DRAW` of each row in `which`."""
    draws = np.empty(len(which), DRAW)
    draws["row"], draws["largest"] = which, largest[which]
    samplings = [rows[i].sampling for i in which]
    # Whatever a client sends, nothing is divided by zero, and the largest passes every filter.
    draws["top_k"] = [min(max(s.top_k, 0), _MOST_IDS) for s in samplings]
    draws["top_p"] = [s.top_p for s in samplings]
    draws["min_p"] = [min(s.min_p, 1.0) for s in samplings]
    draws["temperature"] = [min(s.temperature, HOTTEST) for s in samplings]
    draws["uniform"] = uniforms(
        np.array([s.seed & (2**64 - 1) for s in samplings], np.uint64),
        np.array([rows[i].choice for i in which], np.uint64),
        np.array([rows[i].index for i in which], np.uint64),
    )
    return draws


def top_logprobs(
    raw: torch.Tensor, chosen: NDArray[np.integer], counts: Sequence[int]
) -> list[tuple[float, list[tuple[int, float]]]]:
    """(log-probability of `chosen`, the best `counts` as (id, logprob), best first) of each row of `raw`."""
    values = raw.numpy()
    result: list[tuple[float, list[tuple[int, float]]]] = []
    for row, token, count in zip(values, chosen, counts):
        best = _best(row, count)
        result.append((float(row[token]), [(int(i), float(row[i])) for i in best]))
    return result


def _best(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest, largest first."""
    if count == 0:
        return np.empty(0, np.intp)
    below = values - values.max()
    for depth in DEPTHS:
        found = np.flatnonzero(below >= -depth)
        if len(found) >= count:
            break
    return best_first(below, found)[:count]
