"""Deciding a filtered draw by every rank's best candidates, or noticing that they do not suffice.

All ranks decide the same by the same numbers, on whatever CPU they run: nothing here calls a function that
may round differently on another one, as libraries' exponentials do.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.native.decoder import Kernels

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""fdlibm's: n * high is exact for the n that occur."""
_VANISHES = -700.0
_TERMS = tuple(1.0 / float(np.prod(np.arange(1, n + 1, dtype=np.float64))) for n in range(13, -1, -1))


@dataclass(frozen=True)
class Offers:
    """Candidates of n rows from all ranks, and what is known of the rows."""

    listed: NDArray[np.void]
    """`CANDIDATE` [ranks, all]"""
    at: I64
    """[n] first candidate of the row, on every rank."""
    counts: I64
    """[n] candidates asked of each rank."""
    owns: I64
    """[ranks] values that the rank has."""
    top: F32
    """[n] the largest of the whole row."""
    mass: F64
    """[n] sum of exp((v - top) / temperature) over the whole row; used where top-p is the only filter."""
    draws: NDArray[np.void]
    """`DRAW` [n]"""


VERDICT = np.dtype([("token", "i4"), ("value", "f4"), ("proved", "?"), ("", "V3")])
"""What to draw, its value, and whether the candidates prove it."""

_ROW = np.dtype([("at", "i8"), ("counts", "i8"), ("mass", "f8"), ("top", "f4"), ("", "V4")])

Decide = Callable[[Offers, int], NDArray[np.void]]
"""Offers, size of the vocabulary → `VERDICT` [n]."""


@dataclass(frozen=True)
class _Merged:
    """`Offers` as a table."""

    values: F32
    """[n, ranks, most]"""
    ids: NDArray[np.int32]
    """[n, ranks, most], -1 where a rank has no more."""
    more: NDArray[np.bool_]
    """[n, ranks] whether the rank has values that it did not send."""
    top: F32
    draws: NDArray[np.void]

    @staticmethod
    def of(offers: Offers) -> "_Merged":
        most, counts = np.arange(offers.counts.max()), offers.counts[:, None]
        places = offers.at[:, None] + np.minimum(most, counts - 1)
        table = offers.listed[:, places].swapaxes(0, 1)
        ids = np.where((most < counts)[:, None, :], table["id"], -1)
        return _Merged(table["value"], ids, offers.owns > counts, offers.top, offers.draws)


def exp(x: F64) -> F64:
    """e^x of values up to 0 to 2 ulp, the same bits on every CPU; 0 below -700."""
    inside = np.maximum(x, _VANISHES)
    n = np.rint(inside * 1.4426950408889634)
    r = inside - n * _LN2_HIGH - n * _LN2_LOW
    result = np.full_like(r, _TERMS[0])
    for term in _TERMS[1:]:
        result = result * r + term
    return np.where(x < _VANISHES, 0.0, np.ldexp(result, n.astype(np.int32)))


def scale(values: F32, top: F32, temperature: F64) -> F32:
    """(values - top) / temperature as the sampler has it, [n, ...] with top and temperature [n]."""
    shape = (-1,) + (1,) * (values.ndim - 1)
    with np.errstate(over="ignore", invalid="ignore"):
        below = values - top.reshape(shape)
        scaled: F32 = below / temperature.astype(np.float32).reshape(shape)
    return scaled


def decide(offers: Offers, vocab: int) -> NDArray[np.void]:
    """`Decide` in numpy: what the native kernel is measured against.

    As `services.worker.engine.draw` on the whole row: candidates are ordered by scaled value, then id, and
    min-p, top-k and top-p each keep a prefix of that order. The token is proved if no rank can hold back a
    value that belongs into the prefix.
    """
    rows = _Merged.of(offers)
    n = len(rows.draws)
    top_k = rows.draws["top_k"]
    k = np.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    top_p, min_p = rows.draws["top_p"], rows.draws["min_p"]
    with np.errstate(divide="ignore"):
        floor = np.where(min_p > 0.0, np.log(np.maximum(min_p, 0.0)), -np.inf).astype(np.float32)
    scaled = scale(rows.values, rows.top, rows.draws["temperature"])
    ordered, ids = _best_first(scaled.reshape(n, -1), rows.ids.reshape(n, -1))
    weights = np.where(ids >= 0, exp(ordered.astype(np.float64)), 0.0)
    mass = np.cumsum(weights, axis=1)

    # What min-p and top-k leave is a prefix. Where they are not asked for it is all, whose mass is known.
    likely = ((ids >= 0) & (ordered >= floor[:, None])).sum(axis=1)
    left = np.minimum(likely, k)
    only_top_p = (k == vocab) & (min_p <= 0.0)
    total = np.where(only_top_p, offers.mass, _at(mass, left - 1))
    run = (mass < (top_p * total)[:, None]).sum(axis=1) + 1
    kept = np.where(top_p < 1.0, np.minimum(run, left), left)

    last = np.where(rows.ids >= 0, scaled, np.inf).min(axis=2)  # of what each rank sent
    held_back = np.where(rows.more, last, -np.inf)
    ends_above = (held_back < floor[:, None]).all(axis=1) | ~rows.more.any(axis=1)
    # Of top-p alone only the run must be proved; else what its share is taken of must be, all of it.
    border = _at(ordered, np.where(only_top_p, kept, left) - 1)
    complete = _nothing_precedes(rows, scaled, held_back, border)
    reached = np.where(only_top_p, run <= left, left == k) & complete
    verdicts = np.zeros(n, VERDICT)
    verdicts["token"] = _draw(ids, weights, kept, rows.draws["uniform"])
    verdicts["proved"] = reached | ends_above
    for verdict, values, row_ids in zip(verdicts, rows.values, rows.ids):
        verdict["value"] = values[row_ids == verdict["token"]][0]
    return verdicts


def decide_of(kernels: Kernels | None) -> Decide:
    """The fastest way there is to decide. All ranks must have kernels, or none: they round differently."""
    if kernels is None:
        return decide

    def native(offers: Offers, vocab: int) -> NDArray[np.void]:
        listed, owns = np.ascontiguousarray(offers.listed), np.ascontiguousarray(offers.owns, np.int64)
        rows = np.empty(len(offers.draws), _ROW)
        for name in ("at", "counts", "mass", "top"):
            rows[name] = getattr(offers, name)
        verdicts = np.empty(len(rows), VERDICT)
        ranks = listed.ctypes.data, *listed.shape, owns.ctypes.data
        asked = rows.ctypes.data, offers.draws.ctypes.data, len(rows), vocab
        kernels.library.hortator_decide(kernels.team, *ranks, *asked, verdicts.ctypes.data)
        return verdicts

    return native


def _nothing_precedes(rows: _Merged, scaled: F32, held_back: F32, border: F32) -> NDArray[np.bool_]:
    """Whether no value that a rank did not send comes before the candidates that end with `border`."""
    below = ~rows.more | (held_back < border[:, None])
    if below.all():
        return np.ones(len(below), np.bool_)
    # A rank's last candidate is as likely as the border. What it held back may be equal to its last, then it
    # has higher ids than those sent; but scaling may have made others equal, in no order of ids.
    temperature = rows.draws["temperature"]
    least = np.where(rows.ids >= 0, rows.values, np.inf).min(axis=2)
    under = scale(np.nextafter(least, np.float32(-np.inf)), rows.top, temperature)
    equals = (scaled == border[:, None, None]) & (rows.ids >= 0)
    one_value = (~equals | (rows.values == least[:, :, None])).all(axis=2)
    in_order = (held_back == border[:, None]) & (under < border[:, None]) & one_value
    return (below | in_order).all(axis=1)


def _best_first(scaled: F32, ids: NDArray[np.int32]) -> tuple[F32, NDArray[np.int32]]:
    """Both [n, all] by scaled value, largest first, equal ones by id; those without an id last."""
    # Bits of a float that is not negative order like the float.
    keys = np.abs(scaled).view(np.uint32).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint32)
    keys[ids < 0] = np.uint64(2**64 - 1)
    keys.sort(axis=1)
    sorted_ids = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
    ordered = -(keys >> np.uint64(32)).astype(np.uint32).view(np.float32)
    return np.where(sorted_ids < 0, -np.inf, ordered).astype(np.float32), sorted_ids


def _draw(ids: NDArray[np.int32], weights: F64, kept: I64, uniform: F64) -> I64:
    """By inverse CDF over ascending ids, of the first `kept` of each row."""
    most = int(kept.max(initial=1))
    inside = np.arange(most) < kept[:, None]
    first = np.where(inside, ids[:, :most], np.iinfo(np.int32).max)
    order = first.argsort(axis=1)
    by_id = np.take_along_axis(np.where(inside, weights[:, :most], 0.0), order, axis=1)
    mass = np.cumsum(by_id, axis=1)
    place = (mass <= (uniform * mass[:, -1])[:, None]).sum(axis=1)
    # A product that rounds up to the total would point behind the last that has any weight.
    last = most - 1 - (by_id[:, ::-1] > 0.0).argmax(axis=1)
    place = np.minimum(place, last)
    return _at(np.take_along_axis(first, order, axis=1), place).astype(np.int64)


def _at(values: NDArray, places: I64) -> NDArray:
    """values[i, places[i]], places below 0 taken as 0."""
    return np.take_along_axis(values, np.maximum(places, 0)[:, None], axis=1)[:, 0]
