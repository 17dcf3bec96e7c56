"""Filters and the draw: which ids min-p, top-k and top-p leave of a row, and which of them is taken.

What is left is drawn by inverse CDF over ascending ids with one uniform. The native kernel does the same
(`native/src/draw.h`).
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.step import I32

DRAW = np.dtype(
    [("row", "i8"), ("largest", "i8"), ("top_k", "i8")]
    + [(name, "f8") for name in ("top_p", "min_p", "uniform", "temperature")]
)
"""One row to draw: where its logits are, the id of the largest, its filters, its uniform, its temperature."""

DrawRows = Callable[[NDArray[np.float32], NDArray[np.void]], I32]
"""Logits [rows, vocab], all finite or -inf, and `DRAW` of n of them → n tokens."""

_MASKED = -np.inf
_STRETCH = 256
"""Ids summed as one when a token is drawn from the whole vocabulary."""

DEPTHS = (4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, np.inf)
"""How far below the largest logit to look for candidates, until enough are found: nearly always the first."""

_SURELY = 1.0 - 1e-9
"""Sums in different orders differ by less than this."""


def draw_rows(values: NDArray[np.float32], draws: NDArray[np.void]) -> I32:
    """`DrawRows` in numpy: what the native kernel is measured against.

    One row at a time: its numbers stay in the cache between the passes over them, and how many rows there are
    cannot change a bit.
    """
    size = values.shape[1]
    padded = np.full(-(-size // _STRETCH) * _STRETCH, _MASKED, np.float32)
    scaled, weights = padded[:size], torch.empty(len(padded))
    shares = weights.numpy().reshape(-1, _STRETCH)
    tokens = np.empty(len(draws), np.int32)
    for at, (i, largest, top_k, top_p, min_p, u, temperature) in enumerate(draws.tolist()):
        np.subtract(values[i], values[i, largest], out=scaled)
        np.divide(scaled, np.float32(temperature), out=scaled)
        torch.exp(torch.from_numpy(padded), out=weights)
        # Sums of a stretch need few additions, so they are exact enough; the sum of sums is not.
        sums = shares.sum(axis=1).astype(np.float64)
        kept = keep(scaled, top_k, top_p, min_p, float(sums.sum()))
        if kept is not None:
            tokens[at] = kept[_place(np.exp(scaled[kept], dtype=np.float64), u)]
            continue
        ends = np.cumsum(sums)
        target = u * ends[-1]
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


def keep(
    scaled: NDArray[np.float32], top_k: int, top_p: float, min_p: float, total: float
) -> NDArray[np.intp] | None:
    """Ids, ascending, that min-p, top-k and top-p leave of one row; None for all.

    `scaled` has maximum 0, and `total` is the sum of exp(scaled). top-k keeps exactly k; top-p then keeps the
    shortest run of the most likely whose share of what min-p and top-k left reaches p.
    """
    size = len(scaled)
    k = top_k if 0 < top_k < size else size
    if k == size and top_p >= 1.0 and min_p <= 0.0:
        return None
    floor = float(np.log(min_p)) if min_p > 0.0 else -np.inf
    unfiltered = k == size and floor == -np.inf
    for depth in DEPTHS:
        found = np.flatnonzero(scaled >= max(floor, -depth))
        # Sorting is what costs: look deeper at once if these cannot be enough.
        if -depth > floor and unfiltered and _mass(scaled[found]) < top_p * total * _SURELY:
            continue
        best = best_first(scaled, found)[:k]
        mass = np.cumsum(np.exp(scaled[best], dtype=np.float64))
        # Whether nothing that a deeper look would find could come in before what is already here.
        whole = len(best) == k or -depth <= floor
        if whole and top_p >= 1.0:
            return np.sort(best)
        if whole or (unfiltered and mass[-1] >= top_p * total):
            wanted = top_p * (total if unfiltered else mass[-1])
            return np.sort(best[: int(np.searchsorted(mass, wanted)) + 1])
    raise AssertionError("the last depth looks at everything")


def _mass(scaled: NDArray[np.float32]) -> float:
    return float(np.exp(scaled, dtype=np.float64).sum())


def best_first(below: NDArray[np.float32], found: NDArray[np.intp]) -> NDArray[np.intp]:
    """`found`, indices of values none of which is above 0, by value, largest first, ties by lower index."""
    # Bits of a float that is not negative order like the float. One sort of plain integers is far faster than
    # an indirect sort of floats.
    keys = np.abs(below[found]).view(np.uint32).astype(np.uint64) << np.uint64(32)
    return (np.sort(keys | found.astype(np.uint64)) & np.uint64(0xFFFFFFFF)).astype(np.intp)
