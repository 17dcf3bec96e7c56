"""Which collective algorithm for a message of which size, out of times measured on this machine (design §7).

A table is built from the measured times themselves, so that it errs by no model's error; fits of latency and
bandwidth serve to state what was found, to look beyond the measured sizes and to plan with.
"""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import floor, inf, log
from statistics import median
from typing import Any

import msgspec

TOLERANCE = 0.08
"""An algorithm is kept over sizes at which it takes up to this share longer than the best one there: what two
measurements of the same thing differ by. Well below the tenth a choice may ever lose."""

UNLIMITED = 1 << 62
"""`up_to_bytes` of a table's last entry."""

_LEAST_BYTES = 1024
_ROUNDS = 30


@dataclass(frozen=True)
class Timing:
    """A message of `bytes` took `seconds` from begin to landed with `algorithm`, nothing else under way."""

    algorithm: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Line:
    """Time of a message as latency and bandwidth."""

    latency_s: float
    s_per_byte: float

    def seconds(self, size: float) -> float:
        """Of a message of `size` bytes."""
        return self.latency_s + self.s_per_byte * size

    @property
    def bytes_per_s(self) -> float:
        """Infinite where the size makes no difference."""
        return 1.0 / self.s_per_byte if self.s_per_byte else inf


@dataclass(frozen=True)
class Fit:
    """Latency and bandwidth of an algorithm; two lines where messages beyond `knee` leave a cache or travel
    another way."""

    small: Line
    large: Line
    """Its latency is where the line would start at 0 bytes, which may be below zero."""
    knee: int | None
    """Largest size in bytes that `small` is for; None: it is for all, and `large` is the same."""
    error: float
    """Mean of |fitted - measured| over measured."""

    def seconds(self, size: float) -> float:
        """Of a message of `size` bytes; never less than of a smaller one."""
        if self.knee is None or size <= self.knee:
            return self.small.seconds(size)
        return max(self.large.seconds(size), self.small.seconds(self.knee))


def fit(timings: Sequence[Timing]) -> Fit:
    """Latency and bandwidth of one algorithm. Relative errors count, as sizes span five powers of ten, and by
    their amount rather than its square, so that a few disturbed measurements do not bend the line.

    Raises ValueError if there are no timings or they are of several algorithms.
    """
    if len({timing.algorithm for timing in timings}) != 1:
        raise ValueError("a fit needs timings of one algorithm, and of no other")
    points = _typical(timings)
    one = _line(points)
    error = _error(one, points)
    found = Fit(one, one, None, error)
    if error <= 0.05:
        return found
    for cut in range(3, len(points) - 2):
        small, large = _line(points[:cut]), _line(points[cut:], grounded=False)
        split = Fit(small, large, points[cut - 1][0], 0.0)
        parted = _error(split, points)
        if parted < min(error / 2, found.error):
            found = Fit(small, large, split.knee, parted)
    return found


@dataclass(frozen=True)
class Entry:
    """`algorithm` is for messages of at most `up_to_bytes` that no entry before takes."""

    up_to_bytes: int
    algorithm: str


@dataclass(frozen=True)
class CrossoverTable:
    """The algorithm for each size, and the times that say so. Raises ValueError if it is inconsistent."""

    entries: tuple[Entry, ...]
    """Ascending; the last is `UNLIMITED`."""
    timings: tuple[Timing, ...]
    """One for each algorithm and size measured, ascending by both."""

    def __post_init__(self) -> None:
        sizes = [entry.up_to_bytes for entry in self.entries]
        known = {timing.algorithm for timing in self.timings}
        if not sizes or sizes[-1] != UNLIMITED or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"crossover table: sizes {sizes} must ascend and end with {UNLIMITED}")
        if missing := {entry.algorithm for entry in self.entries} - known:
            raise ValueError(f"crossover table: nothing was measured of {', '.join(sorted(missing))}")

    @classmethod
    def build(
        cls,
        timings: Sequence[Timing],
        tolerance: float = TOLERANCE,
        former: "CrossoverTable | None" = None,
    ) -> "CrossoverTable":
        """The table with the fewest changes of algorithm that nowhere takes more than `tolerance` longer than
        the best algorithm, at sizes measured as well as between them, where times are interpolated; of such
        tables, the fastest. A `former` one that is still as good as that keeps its entries.

        Several timings of one algorithm and size count by their median. An algorithm is used at sizes between
        the smallest and the largest it was measured at; the outermost entries go on beyond. Raises ValueError
        without timings or with one that is not positive.
        """
        if not timings:
            raise ValueError("nothing was measured, so there is nothing to choose from")
        if bad := [timing for timing in timings if not (0 < timing.seconds < inf and timing.bytes > 0)]:
            raise ValueError(f"{bad[0]} is no time of a message")
        curves = _curves(timings)
        kept = tuple(
            Timing(name, size, seconds)
            for name, curve in curves.items()
            for size, seconds in zip(curve.sizes, curve.seconds)
        )
        cuts = () if former is None else tuple(entry.up_to_bytes for entry in former.entries)
        stretches = _stretches(curves, tolerance, cuts)
        if former is not None and _holds(former, stretches):
            return cls(former.entries, kept)
        return cls(_fewest_changes(stretches), kept)

    @classmethod
    def from_plain(cls, plain: Any) -> "CrossoverTable":
        """What `to_plain` gave. Raises ValueError saying what in it is wrong."""
        return msgspec.convert(plain, cls)

    def to_plain(self) -> dict[str, Any]:
        """As maps, lists, strings and numbers, for MessagePack or JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def choose(self, size: int) -> str:
        """The algorithm for a message of `size` bytes."""
        return self.entries[bisect_left(self._limits, size)].algorithm

    def predict(self, size: int, algorithm: str | None = None) -> float:
        """Seconds a message of `size` bytes takes with `algorithm`, or else with the one for its size."""
        return self._curves[algorithm or self.choose(size)].at(size)

    @cached_property
    def fits(self) -> Mapping[str, Fit]:
        """Latency and bandwidth of each algorithm measured."""
        names = dict.fromkeys(timing.algorithm for timing in self.timings)
        return {name: fit([timing for timing in self.timings if timing.algorithm == name]) for name in names}

    @cached_property
    def _limits(self) -> list[int]:
        return [entry.up_to_bytes for entry in self.entries[:-1]]

    @cached_property
    def _curves(self) -> "Mapping[str, _Curve]":
        return _curves(self.timings)


def sizes_to_measure(most_bytes: int, least_bytes: int = _LEAST_BYTES) -> tuple[int, ...]:
    """Sizes in bytes from `least_bytes` to `most_bytes`, both included, each about twice the one before and a
    multiple of 4."""
    most = max(4, -(-most_bytes // 4) * 4)
    sizes = []
    size = -(-min(least_bytes, most) // 4) * 4
    while size < most:
        sizes.append(size)
        size *= 2
    return (*sizes, most)


def fingerprint(facts: Mapping[str, object]) -> str:
    """Short name of all that measured times depend on, the same wherever the same facts hold: kind and number
    of devices, how ranks are linked and pinned, version. `facts` are plain data; raises TypeError if not."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class _Curve:
    """Measured times of one algorithm, and straight lines between them."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        """Below the smallest size as there; beyond the largest, more bytes take what the last ones took."""
        i = bisect_left(self.sizes, size)
        if i == 0:
            return self.seconds[0]
        if i == len(self.sizes):
            i -= 1
            if i == 0:
                return self.seconds[0] * size / self.sizes[0]
        a, b = self.sizes[i - 1], self.sizes[i]
        low, high = self.seconds[i - 1], self.seconds[i]
        if size > b:
            return high + max(0.0, high - low) / (b - a) * (size - b)
        return low + (high - low) * (size - a) / (b - a)


@dataclass(frozen=True)
class _Stretch:
    """Sizes (start, stop] in bytes within which no two algorithms cross."""

    start: float
    stop: float
    regrets: Mapping[str, float]
    """Of algorithms that are good enough throughout: mean logarithm of time over the best, times length."""


def _curves(timings: Sequence[Timing]) -> dict[str, _Curve]:
    curves = {}
    for name in sorted({timing.algorithm for timing in timings}):
        points = _typical([timing for timing in timings if timing.algorithm == name])
        curves[name] = _Curve(*zip(*points))
    return curves


def _typical(timings: Sequence[Timing]) -> list[tuple[int, float]]:
    """(bytes, median seconds), ascending."""
    by_size: dict[int, list[float]] = {}
    for timing in timings:
        by_size.setdefault(timing.bytes, []).append(timing.seconds)
    return [(size, median(by_size[size])) for size in sorted(by_size)]


def _stretches(curves: Mapping[str, _Curve], tolerance: float, cuts: Sequence[int]) -> list[_Stretch]:
    sizes = sorted({size for curve in curves.values() for size in curve.sizes})
    if len(sizes) == 1:
        sizes *= 2
    grid: list[float] = sorted({*sizes, *(cut for cut in cuts if sizes[0] < cut < sizes[-1])})
    found = []
    for low, high in pairwise(grid if len(grid) > 1 else sizes):
        here = {
            name: (curve.at(low), curve.at(high))
            for name, curve in curves.items()
            if curve.sizes[0] <= low and high <= curve.sizes[-1]
        }
        # Between two algorithms' ranges nothing was measured; any that is known nearby will do.
        here = here or {name: (curve.at(low), curve.at(high)) for name, curve in curves.items()}
        crossings = {0.0, 1.0}
        for (a, b), (c, d) in combinations(here.values(), 2):
            if (a - c) * (b - d) < 0:
                crossings.add((a - c) / ((a - c) - (b - d)))
        for start, stop in pairwise(sorted(crossings)):
            ends = {name: (a + (b - a) * start, a + (b - a) * stop) for name, (a, b) in here.items()}
            best = min(a for a, _ in ends.values()), min(b for _, b in ends.values())
            worst = {name: max(a / best[0], b / best[1]) for name, (a, b) in ends.items()}
            span = low + (high - low) * start, low + (high - low) * stop
            width = log(span[1] / span[0])
            regrets = {
                name: width * (log(a / best[0]) + log(b / best[1])) / 2
                for name, (a, b) in ends.items()
                if worst[name] <= 1 + tolerance or worst[name] == min(worst.values())
            }
            found.append(_Stretch(*span, regrets))
    return found


def _fewest_changes(stretches: Sequence[_Stretch]) -> tuple[Entry, ...]:
    """Of all ways through the stretches the one with the fewest changes, then the least regret."""
    costs: dict[str, tuple[int, float]] = dict.fromkeys(stretches[0].regrets, (0, 0.0))
    came_from: list[dict[str, str]] = []
    for stretch in stretches:
        best = min(costs, key=lambda name: (costs[name], name))
        onward, origin = {}, {}
        for name, regret in stretch.regrets.items():
            stay, change = costs.get(name), (costs[best][0] + 1, costs[best][1])
            changes, lost = change if stay is None or change < stay else stay
            origin[name] = best if stay is None or change < stay else name
            onward[name] = (changes, lost + regret)
        costs = onward
        came_from.append(origin)
    name = min(costs, key=lambda name: (costs[name], name))
    entries = [Entry(UNLIMITED, name)]
    for stretch, origin in zip(reversed(stretches), reversed(came_from)):
        before, limit = origin[name], floor(stretch.start)
        if before != name and limit < entries[-1].up_to_bytes:
            entries.append(Entry(limit, before))
        elif before != name:
            # Both changes lie between the same two whole numbers of bytes: no message is in between.
            entries[-1] = Entry(limit, before)
        name = before
    return tuple(entries[::-1])


def _holds(table: CrossoverTable, stretches: Sequence[_Stretch]) -> bool:
    return all(
        table.choose(floor(stretch.stop)) in stretch.regrets
        for stretch in stretches
        if floor(stretch.stop) > stretch.start or stretch.start == stretch.stop
    )


def _line(points: Sequence[tuple[int, float]], grounded: bool = True) -> Line:
    """The line with the least sum of relative errors, by least squares weighted anew. It never falls; its
    latency is not negative if `grounded`."""
    scale = points[-1][0]
    ratios = [(1 / seconds, size / scale / seconds) for size, seconds in points]
    weights = [1.0] * len(points)
    latency = slope = 0.0
    for _ in range(_ROUNDS):
        uu = sum(w * u * u for w, (u, _) in zip(weights, ratios))
        uv = sum(w * u * v for w, (u, v) in zip(weights, ratios))
        vv = sum(w * v * v for w, (_, v) in zip(weights, ratios))
        u1 = sum(w * u for w, (u, _) in zip(weights, ratios))
        v1 = sum(w * v for w, (_, v) in zip(weights, ratios))
        determinant = uu * vv - uv * uv
        if determinant <= 1e-12 * uu * vv:
            latency, slope = u1 / uu, 0.0
        else:
            latency, slope = (u1 * vv - v1 * uv) / determinant, (v1 * uu - u1 * uv) / determinant
        if latency < 0 and grounded:
            latency, slope = 0.0, v1 / vv
        elif slope < 0:
            latency, slope = u1 / uu, 0.0
        weights = [1 / max(abs(latency * u + slope * v - 1), 1e-3) for u, v in ratios]
    return Line(latency, slope / scale)


def _error(model: Line | Fit, points: Sequence[tuple[int, float]]) -> float:
    return sum(abs(model.seconds(size) / seconds - 1) for size, seconds in points) / len(points)
