"""Drawing the next token of every row of a step at once.

Order of effect, as in vLLM: log-probabilities are of the raw logits; then min_tokens and logit bias, the
repetition, frequency and presence penalties, temperature, min-p, top-k, top-p. What is left is drawn by
inverse CDF over ascending ids with one uniform per row (`uniform.py`). Ties are broken towards the lower id
everywhere, so the same logits give the same token whatever else is in the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.engine.uniform import uniforms
from services.worker.step import I32, TokenLogprobs
from shared.wire import Sampling

NOT_FINITE = -2
"""Instead of a token, where a row's logits hold NaN or infinity."""

Scan = Callable[[NDArray[np.float32]], tuple[NDArray[np.bool_], NDArray[np.int64]]]
"""Values [rows, size] → (every value of the row is finite, index of its first maximum)."""

_MASKED = -np.inf
_STRETCH = 256
"""Ids summed as one when a token is drawn from the whole vocabulary."""
# How far below the largest logit candidates are looked for, until enough are found. Nearly always the first.
_DEPTHS = (4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, np.inf)

_SURELY = 1.0 - 1e-9
"""Sums in different orders differ by less than this."""


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
    logits: torch.Tensor, rows: Sequence[SampleRow], scan: Scan = scan_rows
) -> tuple[I32, dict[int, TokenLogprobs]]:
    """Token of each row (`NOT_FINITE` where its logits are not) and the log-probabilities asked for, by row.

    `logits` [rows, vocab] float32 on the CPU; it is overwritten where a row's sampling changes it.
    """
    values = logits.numpy()
    finite, greedy = scan(values)
    tokens = greedy.astype(np.int32)
    wants = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None and finite[i]]
    raw = torch.log_softmax(logits[wants], dim=-1) if wants else None
    changed = [i for i, row in enumerate(rows) if finite[i] and adjust(values[i], row)]
    for i in changed:
        tokens[i] = values[i].argmax()
    drawn = [i for i, row in enumerate(rows) if finite[i] and row.sampling.temperature > 0]
    if drawn:
        tokens[drawn] = draw(values, tokens, rows, drawn)
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


def draw(values: NDArray[np.float32], largest: I32, rows: Sequence[SampleRow], which: Sequence[int]) -> I32:
    """Draw one token for each row in `which` at its temperature, from what its filters leave.

    `values` [rows, vocab], `largest` the id of the largest of each row. One row at a time: its numbers stay
    in the cache between the passes over them, and how many rows there are cannot change a bit.
    """
    u = uniforms(
        np.array([rows[i].sampling.seed & (2**64 - 1) for i in which], np.uint64),
        np.array([rows[i].choice for i in which], np.uint64),
        np.array([rows[i].index for i in which], np.uint64),
    )
    size = values.shape[1]
    padded = np.full(-(-size // _STRETCH) * _STRETCH, _MASKED, np.float32)
    scaled, weights = padded[:size], torch.empty(len(padded))
    shares = weights.numpy().reshape(-1, _STRETCH)
    tokens = np.empty(len(which), np.int32)
    for at, i in enumerate(which):
        s = rows[i].sampling
        np.subtract(values[i], values[i, largest[i]], out=scaled)
        if s.temperature != 1.0:
            np.divide(scaled, np.float32(s.temperature), out=scaled)
        torch.exp(torch.from_numpy(padded), out=weights)
        # Sums of a stretch need few additions, so they are exact enough; the sum of sums is not.
        sums = shares.sum(axis=1).astype(np.float64)
        kept = keep(scaled, s, float(sums.sum()))
        if kept is not None:
            tokens[at] = kept[_place(np.exp(scaled[kept], dtype=np.float64), u[at])]
            continue
        ends = np.cumsum(sums)
        target = u[at] * ends[-1]
        stretch = min(int(np.searchsorted(ends, target, side="right")), len(ends) - 1)
        inside = shares[stretch].astype(np.float64)
        before = ends[stretch] - sums[stretch]
        tokens[at] = stretch * _STRETCH + _place(inside, (target - before) / sums[stretch])
    return tokens


def _place(weights: NDArray[np.float64], u: float) -> int:
    """The first index whose cumulative weight exceeds the share `u` of the total."""
    cumulative = np.cumsum(weights)
    place = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    # A product that rounds up to the total would point behind the last that has any weight.
    return place if place < len(weights) else int(np.flatnonzero(weights)[-1])


def keep(scaled: NDArray[np.float32], s: Sampling, total: float) -> NDArray[np.intp] | None:
    """Ids, ascending, that min-p, top-k and top-p leave of one row; None for all.

    `scaled` has maximum 0, and `total` is the sum of exp(scaled). top-k keeps exactly k; top-p then keeps the
    shortest run of the most likely whose share of what min-p and top-k left reaches p.
    """
    size = len(scaled)
    k = s.top_k if 0 < s.top_k < size else size
    if k == size and s.top_p >= 1.0 and s.min_p <= 0.0:
        return None
    floor = float(np.log(s.min_p)) if s.min_p > 0.0 else -np.inf
    unfiltered = k == size and floor == -np.inf
    for depth in _DEPTHS:
        found = np.flatnonzero(scaled >= max(floor, -depth))
        # Sorting is what costs: look deeper at once if these cannot be enough.
        if -depth > floor and unfiltered and _mass(scaled[found]) < s.top_p * total * _SURELY:
            continue
        best = _sorted(scaled, found)[:k]
        mass = np.cumsum(np.exp(scaled[best], dtype=np.float64))
        # Whether nothing that a deeper look would find could come in before what is already here.
        whole = len(best) == k or -depth <= floor
        if whole and s.top_p >= 1.0:
            return np.sort(best)
        if whole or (unfiltered and mass[-1] >= s.top_p * total):
            wanted = s.top_p * (total if unfiltered else mass[-1])
            return np.sort(best[: int(np.searchsorted(mass, wanted)) + 1])
    raise AssertionError("the last depth looks at everything")


def _mass(scaled: NDArray[np.float32]) -> float:
    return float(np.exp(scaled, dtype=np.float64).sum())


def _sorted(below: NDArray[np.float32], found: NDArray[np.intp]) -> NDArray[np.intp]:
    """`found`, indices of values none of which is above 0, by value, largest first, ties by lower index."""
    # Bits of a float that is not negative order like the float. One sort of plain integers is far faster than
    # an indirect sort of floats.
    keys = np.abs(below[found]).view(np.uint32).astype(np.uint64) << np.uint64(32)
    return (np.sort(keys | found.astype(np.uint64)) & np.uint64(0xFFFFFFFF)).astype(np.intp)


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
    for depth in _DEPTHS:
        found = np.flatnonzero(below >= -depth)
        if len(found) >= count:
            break
    return _sorted(below, found)[:count]
