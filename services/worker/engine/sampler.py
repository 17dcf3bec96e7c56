"""Drawing the next token of every row of a step at once.

Order of effect, as in vLLM: log-probabilities are of the raw logits; then min_tokens and logit bias, the
repetition, frequency and presence penalties, temperature, min-p, top-k, top-p. What is left is drawn by
inverse CDF over ascending ids with one uniform per row (`uniform.py`). Ties are broken towards the lower id
everywhere, so the same logits give the same token whatever else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.engine.uniform import uniforms
from services.worker.step import I32, TokenLogprobs
from shared.wire import Sampling

NOT_FINITE = -2
"""Instead of a token, where a row's logits hold NaN or infinity."""

_MASKED = -np.inf
# Candidates looked at first for top-p and min-p; rows whose nucleus is wider are sorted whole.
_NUCLEUS_GUESS = 256


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


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[I32, dict[int, TokenLogprobs]]:
    """Token of each row (`NOT_FINITE` where its logits are not) and the log-probabilities asked for, by row.

    `logits` [rows, vocab] float32 on the CPU; it is overwritten where a row's sampling changes it.
    """
    values = logits.numpy()
    finite, greedy = scan_rows(values)
    tokens = greedy.astype(np.int32)
    wants = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None and finite[i]]
    raw = torch.log_softmax(logits[wants], dim=-1) if wants else None
    changed = [i for i, row in enumerate(rows) if finite[i] and adjust(values[i], row)]
    if changed:
        tokens[changed] = values[changed].argmax(axis=1)
    drawn = [i for i, row in enumerate(rows) if finite[i] and row.sampling.temperature > 0]
    if drawn:
        tokens[drawn] = draw(values[drawn], [rows[i] for i in drawn])
    tokens[~finite] = NOT_FINITE
    if raw is None:
        return tokens, {}
    counts = [rows[i].sampling.logprobs or 0 for i in wants]
    found = top_logprobs(raw, tokens[wants], counts)
    return tokens, {i: TokenLogprobs(chosen, top) for i, (chosen, top) in zip(wants, found)}


def scan_rows(values: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
    """(every value finite, index of the largest) of each row."""
    best = values.argmax(axis=1)  # NaN counts as largest
    top = np.take_along_axis(values, best[:, None], axis=1)[:, 0]
    return np.isfinite(top) & np.isfinite(values.min(axis=1)), best


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


def draw(logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> I32:
    """Draw one token per row at its temperature from what its filters leave."""
    u = uniforms(
        np.array([row.sampling.seed & (2**64 - 1) for row in rows], np.uint64),
        np.array([row.choice for row in rows], np.uint64),
        np.array([row.index for row in rows], np.uint64),
    )
    temperature = np.array([row.sampling.temperature for row in rows], np.float32)[:, None]
    scaled = (logits - logits.max(axis=1, keepdims=True)) / temperature  # largest is 0
    tokens = np.empty(len(rows), np.int32)
    for i, row in enumerate(rows):
        kept = keep(scaled[i], row.sampling)
        weights = np.exp(scaled[i] if kept is None else scaled[i][kept], dtype=np.float64)
        cumulative = np.cumsum(weights)
        place = int(np.searchsorted(cumulative, u[i] * cumulative[-1], side="right"))
        # A product that rounds up to the total would point behind the end.
        place = min(place, int(np.flatnonzero(weights)[-1]) if place >= len(weights) else place)
        tokens[i] = place if kept is None else kept[place]
    return tokens


def keep(scaled: NDArray[np.float32], s: Sampling) -> NDArray[np.intp] | None:
    """Ids, ascending, that min-p, top-k and top-p leave of one row; None for all. `scaled` has maximum 0.

    top-k keeps exactly k; top-p then keeps the shortest run of the most likely whose share of what top-k left
    reaches p.
    """
    size = len(scaled)
    k = s.top_k if 0 < s.top_k < size else size
    if k == size and s.top_p >= 1.0 and s.min_p <= 0.0:
        return None
    floor = np.log(s.min_p) if s.min_p > 0.0 else -np.inf
    above = np.flatnonzero(scaled >= floor) if s.min_p > 0.0 else None
    if s.top_p >= 1.0 and (k == size or (above is not None and len(above) <= k)):
        return above
    total = float(np.exp(scaled if above is None else scaled[above], dtype=np.float64).sum())
    guess = k if k < size else _NUCLEUS_GUESS
    while True:
        best = _largest(scaled, min(guess, size))
        if above is not None:
            best = best[scaled[best] >= floor]
        if s.top_p >= 1.0:
            return np.sort(best)
        mass = np.cumsum(np.exp(scaled[best], dtype=np.float64))
        wanted = s.top_p * (mass[-1] if k < size else total)
        if k < size or guess >= size or mass[-1] >= wanted or (above is not None and len(best) == len(above)):
            return np.sort(best[: int(np.searchsorted(mass, wanted)) + 1])
        guess *= 8


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest values, largest first, ties by lower index."""
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        found = np.flatnonzero(values >= threshold)
    else:
        found = np.arange(len(values))
    order = np.lexsort((found, -values[found]))
    return found[order][:count]


def top_logprobs(
    raw: torch.Tensor, chosen: NDArray[np.integer], counts: Sequence[int]
) -> list[tuple[float, list[tuple[int, float]]]]:
    """(log-probability of `chosen`, the best `counts` as (id, logprob), best first) of each row of `raw`."""
    values = raw.numpy()
    result: list[tuple[float, list[tuple[int, float]]]] = []
    for row, token, count in zip(values, chosen, counts):
        best = _largest(row, count) if count else np.empty(0, np.intp)
        result.append((float(row[token]), [(int(i), float(row[i])) for i in best]))
    return result
