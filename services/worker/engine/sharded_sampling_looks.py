"""What one rank finds out about its own slice of a row of logits, to tell the others instead of them."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.native.decoder import Kernels

LOOK = np.dtype([("row", "i8"), ("temperature", "f8"), ("count", "i8"), ("at", "i8")])
"""One question about row `row`: sum its likelihoods at `temperature` (0: no), and list its `count` best from
candidate `at` on. `src/candidates.h` has the same structs."""

FOUND = np.dtype([("value", "f4"), ("id", "i4"), ("sum", "f8"), ("state", "i4"), ("raw", "f4")])
"""The answer: the largest value and the first id that has it, the sum of exp((v - value) / temperature), one
of the states below, and room for the logit that the value was before anything shifted it."""

CANDIDATE = np.dtype([("value", "f4"), ("id", "i4")])
"""By value, largest first, equal ones by lower id; id -1 where there are no more."""

NO_NUMBER, INFINITE, FINITE = range(3)
"""States: some value is NaN; none is, but some are infinite; all are finite."""

Looks = Callable[[NDArray[np.float32], NDArray[np.void], int, int], tuple[NDArray[np.void], NDArray[np.void]]]
"""Values [rows, own], `LOOK` [n], id of column 0, number m of candidates → `FOUND` [n], `CANDIDATE` [m]."""


def look_rows(
    values: NDArray[np.float32], looks: NDArray[np.void], first: int, candidates: int
) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """`Looks` in numpy: what the native kernel is measured against."""
    found, listed = np.zeros(len(looks), FOUND), np.empty(candidates, CANDIDATE)
    listed["value"], listed["id"] = -np.inf, -1
    for answer, (row, temperature, count, at) in zip(found, looks.tolist()):
        mine = values[row]
        best = int(mine.argmax())  # NaN counts as largest
        top = mine[best]
        answer["value"] = answer["raw"] = top
        answer["id"] = first + best
        if np.isnan(top):
            continue
        answer["state"] = FINITE if np.isfinite(top) and np.isfinite(mine.min()) else INFINITE
        if temperature > 0.0 and np.isfinite(top):
            with np.errstate(over="ignore"):
                scaled = (mine - top) / np.float32(temperature)
            answer["sum"] = np.exp(scaled, dtype=np.float64).sum()
        if count := min(count, len(mine)):
            least = np.partition(mine, len(mine) - count)[len(mine) - count]
            near = np.flatnonzero(mine >= least)
            near = near[np.argsort(-mine[near], kind="stable")][:count]
            listed["value"][at : at + count], listed["id"][at : at + count] = mine[near], first + near
    return found, listed


def looks_of(kernels: Kernels | None) -> Looks:
    """The fastest way there is to look."""
    if kernels is None:
        return look_rows

    def look(
        values: NDArray[np.float32], looks: NDArray[np.void], first: int, candidates: int
    ) -> tuple[NDArray[np.void], NDArray[np.void]]:
        found, listed = np.empty(len(looks), FOUND), np.empty(candidates, CANDIDATE)
        rows, size = values.shape
        stride = values.strides[0] // values.itemsize if rows > 1 else size
        where = values.ctypes.data, size, stride, first, looks.ctypes.data, len(looks)
        kernels.library.hortator_look(kernels.team, *where, found.ctypes.data, listed.ctypes.data)
        return found, listed

    return look
