"""Log-probabilities from what ranks found in their slices of the logits."""

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.sharded_sampling_looks import NO_NUMBER
from services.worker.engine.sharded_sampling_merge import exp


def log_sums(found: NDArray[np.void]) -> NDArray[np.float64]:
    """Log of the sum of exp of each row of `found` [ranks, rows]; NaN where it has none."""
    values = found["value"].astype(np.float64)
    top = values.max(axis=0)
    sound = np.isfinite(top) & (found["state"] != NO_NUMBER).all(axis=0)
    below = np.where(sound & np.isfinite(values), values - np.where(sound, top, 0.0), -np.inf)
    total = np.cumsum(found["sum"] * exp(below), axis=0)[-1]
    with np.errstate(divide="ignore"):
        return np.where(sound, np.where(sound, top, 0.0) + np.log(np.where(sound, total, 1.0)), np.nan)


def split(listed: NDArray[np.void], counts: NDArray[np.int64]) -> list[NDArray[np.void]]:
    """`listed` [ranks, all] by row."""
    return np.split(listed, np.cumsum(counts)[:-1], axis=1) if len(counts) else []


def best(listed: NDArray[np.void], norm: float, count: int) -> list[tuple[int, float]]:
    """(id, log-probability) of the `count` best of `listed` [ranks, most]."""
    if count == 0 or np.isnan(norm):
        return []
    known = listed[listed["id"] >= 0]
    first = known[np.lexsort((known["id"], -known["value"]))[:count]]
    return [(int(i), float(value - norm)) for value, i in first.tolist()]
