"""How many chunks a step's tokens are cut into, so that sums travel while others are computed (design §7).

A step is a wavefront: the embedding and each half of a layer are a stage; every stage takes one chunk after
another, in order, and the sum of a chunk over all ranks travels while the next chunks are computed. A chunk's
next stage begins as soon as its sum has landed. More chunks hide more of the link; each costs a message, and
weights are read again for it. Plans are arithmetic alone, so that ranks given the same costs find the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec

from services.worker.parallel.crossover import Line
from services.worker.parallel.split import deal

TILE = 6
"""Rows that the native kernels multiply at once."""

MOST_CHUNKS = 32

GAIN = 0.005
"""More chunks must save at least this share of a step: predictions are no better than that."""

_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
_BUCKETS = 16
_PROBE = 1.05  # times slower, for how much of that a step would feel
_FELT = 0.25  # of it, below which waiting says more of other things


@dataclass(frozen=True)
class Work:
    """Seconds one stage of a chunk takes to compute."""

    fixed_s: float
    """Of every chunk, whatever its size."""
    row_s: float
    """Of each row on top."""
    least_s: float = 0.0
    """No chunk takes less: the time in which its weights are read, which further rows hide behind."""

    def seconds(self, rows: int) -> float:
        """Of a chunk of `rows` rows."""
        return max(self.least_s, self.fixed_s + self.row_s * rows)

    def scaled(self, reading: float, multiplying: float) -> "Work":
        """With other speeds: what a chunk takes by itself, and what its rows take."""
        return Work(self.fixed_s * reading, self.row_s * multiplying, self.least_s * reading)


@dataclass(frozen=True)
class Link:
    """How a sum of all ranks' parts travels: one after the other."""

    busy_s: float
    """In which the link is taken by a message, beside its bytes."""
    s_per_byte: float
    latency_s: float = 0.0
    """From leaving the link to having landed; the next message may travel meanwhile."""

    def busy(self, size: float) -> float:
        """Seconds a message of `size` bytes takes the link for itself."""
        return self.busy_s + self.s_per_byte * size

    @classmethod
    def of(cls, line: Line) -> "Link":
        """From a fit to lone messages, which cannot tell latency from the link being taken: as if all of it
        were the latter."""
        return cls(line.latency_s, line.s_per_byte)


@dataclass(frozen=True)
class Costs:
    """What a step's computation and communication take on the busiest rank."""

    layers: int
    attend: Work
    """First half of a layer: up to the part of the output projection."""
    feed: Work
    """Second half: the feed-forward layer."""
    link: Link
    row_bytes: int
    """Of each token in a message: hidden size × 4."""
    message_s: float = 0.0
    """Computing time a message takes of the rank: to begin it and to take it in."""
    embed: Work = Work(0.0, 0.0)
    """Before the first layer."""
    tile: int = TILE
    """Rows multiplied at once; chunks are cut between tiles unless they are of few."""

    @classmethod
    def from_plain(cls, plain: Any) -> "Costs":
        """What `to_plain` gave. Raises ValueError saying what in it is wrong."""
        return msgspec.convert(plain, cls)

    def to_plain(self) -> dict[str, Any]:
        """As maps and numbers, for MessagePack or JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


@dataclass(frozen=True)
class Wavefront:
    """What a plan comes to, in seconds."""

    total_s: float
    """From the first chunk's start to the last sum's landing."""
    compute_s: float
    """In which the rank computes."""
    communication_s: float
    """In which at least one message is under way."""
    exposed_s: float
    """In which the rank waits for a message: total less compute."""
    link_s: float
    """In which the link is taken: all messages' bytes, and what each takes beside them."""


def simulate(plan: Sequence[int], costs: Costs) -> Wavefront:
    """What a step takes that is cut at the rows `plan`: (0, …, rows), ascending. Exact by the rules above;
    once layers repeat themselves, the rest are counted instead of gone through.

    Raises ValueError if the plan is none.
    """
    if len(plan) < 2 or plan[0] != 0 or any(a >= b for a, b in pairwise(plan)):
        raise ValueError(f"chunk plan {tuple(plan)}: rows must ascend from 0")
    return _simulate([b - a for a, b in pairwise(plan)], costs)


def plan_chunks(rows: int, costs: Costs, most: int = MOST_CHUNKS) -> tuple[int, ...]:
    """First row of each chunk and then `rows`: the cut into at most `most` about equal chunks that takes the
    least time, and one chunk where more save nothing worth it. Raises ValueError without rows."""
    if rows < 1:
        raise ValueError(f"a step of {rows} rows cannot be planned")
    return _cut(rows, *_best(rows, costs, min(most, rows)))


class Planner:
    """Plans of a rank's steps by their number of rows, under the costs at hand.

    Numbers of rows that differ by less than a sixteenth share a number of chunks, so that hardly a step waits
    for its plan. The same costs give the same plans on every rank.
    """

    def __init__(self, costs: Costs, most: int = MOST_CHUNKS) -> None:
        self._costs, self._most = costs, most
        self._known: dict[int, tuple[int, int]] = {}

    @property
    def costs(self) -> Costs:
        return self._costs

    def use(self, costs: Costs) -> None:
        """Plan with other costs from now on."""
        if costs != self._costs:
            self._costs = costs
            self._known.clear()

    def plan(self, rows: int) -> tuple[int, ...]:
        """As `plan_chunks`, for about as many rows."""
        bucket = _bucket(rows)
        if (known := self._known.get(bucket)) is None:
            known = self._known[bucket] = _best(bucket, self._costs, min(self._most, bucket))
        return _cut(rows, *known)


@dataclass(frozen=True)
class Measured:
    """What a step with chunk plan `plan` was measured to take, in seconds, on the rank that plans."""

    plan: tuple[int, ...]
    compute_s: float
    exposed_s: float
    """In which the rank waited for messages."""
    link_s: float | None = None
    """In which its link was taken; None where there is no link to ask, as between ranks that share memory."""


@dataclass(frozen=True)
class Correction:
    """How the machine differs from the costs at the outset: what a `Corrector` has learnt, as data."""

    reading: float = 1.0
    """Times what a chunk takes by itself."""
    multiplying: float = 1.0
    """Times what its rows take."""
    messages: float = 1.0
    """Times what a message takes of the link by itself."""
    bytes: float = 1.0
    """Times what its bytes take."""
    latency_s: float = 0.0
    """Added to the link's latency; it may be less than none, but the sum is not."""

    def apply(self, costs: Costs) -> Costs:
        """`costs` as corrected."""
        link = costs.link
        return replace(
            costs,
            attend=costs.attend.scaled(self.reading, self.multiplying),
            feed=costs.feed.scaled(self.reading, self.multiplying),
            embed=costs.embed.scaled(self.reading, self.multiplying),
            message_s=costs.message_s * self.reading,
            link=Link(
                link.busy_s * self.messages,
                link.s_per_byte * self.bytes,
                max(0.0, link.latency_s + self.latency_s),
            ),
        )


class Corrector:
    """Corrects costs by what steps are measured to take.

    Computing time and the link's time are each a sum of two parts, one by the chunk and one by the row; as
    steps differ in both, the parts are told apart by least squares in which a step counts less the longer ago
    it was. Factors start at one and stay within a quarter and four times. The latency follows what waiting
    nothing else explains. Run on one rank, which gives all others the correction before the same step.
    """

    LIMIT = 4.0
    RATE = 0.05
    """Weight of a new step against all before it."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._compute, self._link = _Shares(), _Shares()
        self._latency_s = 0.0

    @property
    def correction(self) -> Correction:
        """What was learnt so far."""
        reading, multiplying = self._compute.factors(self.LIMIT)
        messages, per_byte = self._link.factors(self.LIMIT)
        return Correction(reading, multiplying, messages, per_byte, self._latency_s)

    @property
    def costs(self) -> Costs:
        """The costs at the outset as corrected so far."""
        return self.correction.apply(self._costs)

    def observe(self, measured: Measured) -> None:
        """Learn from one step. Raises ValueError if its plan is none."""
        sizes = [b - a for a, b in pairwise(measured.plan)]
        costs, corrected = self._costs, self.costs
        expected = simulate(measured.plan, corrected)
        self._compute.observe(*_parts(sizes, costs, corrected), measured.compute_s, self.RATE)
        stages, link = 1 + 2 * costs.layers, costs.link
        alone_s = stages * link.busy_s * len(sizes)
        bytes_s = stages * link.s_per_byte * costs.row_bytes * sum(sizes)
        unexplained_s = measured.exposed_s - expected.exposed_s
        if measured.link_s is None:
            self._learn_by_waiting(sizes, corrected, expected, unexplained_s)
            return
        self._link.observe(alone_s, bytes_s, measured.link_s, self.RATE)
        # The more of a message's time is its bytes', the less its time says of the latency.
        lone_s = link.latency_s + link.busy(costs.row_bytes)
        weight = lone_s / (lone_s + bytes_s / stages / len(sizes))
        most_s = self.LIMIT * lone_s
        moved_s = self.RATE * weight * min(max(unexplained_s / stages, -most_s), most_s)
        self._latency_s = min(max(self._latency_s + moved_s, -link.latency_s), most_s)

    def _learn_by_waiting(
        self, sizes: Sequence[int], corrected: Costs, expected: Wavefront, unexplained_s: float
    ) -> None:
        """Without a link to ask: by how much all that messages take must differ for a step to wait as it did.
        A step in one chunk feels all of that, one that hides its messages nothing."""
        link, messages = self._costs.link, (1 + 2 * self._costs.layers) * len(sizes)
        travel_s = expected.link_s + messages * corrected.link.latency_s
        slower = Correction(messages=_PROBE, bytes=_PROBE, latency_s=(_PROBE - 1) * corrected.link.latency_s)
        felt_s = _simulate(sizes, slower.apply(corrected)).exposed_s - expected.exposed_s
        felt = felt_s / (_PROBE - 1) / travel_s if travel_s else 0.0
        if felt < _FELT:
            return
        alone_s = messages * (link.busy_s + link.latency_s)
        bytes_s = _travelling(sizes, self._costs) - messages * link.busy_s
        self._link.observe(alone_s, bytes_s, travel_s + unexplained_s / felt, self.RATE * felt)


class _Shares:
    """Factors (f, g) for which f·u + g·v comes closest to what was measured, by relative error."""

    _TRUST = 0.002  # in the factors being 1, against steps that all weigh 1 together
    _MOST = 16.0  # times what was believed, or a part as small: no measurement counts as further off

    def __init__(self) -> None:
        self._uu = self._uv = self._vv = self._u = self._v = 0.0

    def observe(self, u: float, v: float, measured: float, rate: float) -> None:
        believed = u + v
        if not believed > 0:
            return
        measured = min(max(measured, believed / self._MOST), believed * self._MOST)
        u, v = u / measured, v / measured
        self._uu += rate * (u * u - self._uu)
        self._uv += rate * (u * v - self._uv)
        self._vv += rate * (v * v - self._vv)
        self._u += rate * (u - self._u)
        self._v += rate * (v - self._v)

    def factors(self, limit: float) -> tuple[float, float]:
        uu, vv, uv = self._uu + self._TRUST, self._vv + self._TRUST, self._uv
        u, v = self._u + self._TRUST, self._v + self._TRUST
        determinant = uu * vv - uv * uv
        f, g = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
        return min(max(f, 1 / limit), limit), min(max(g, 1 / limit), limit)


def _simulate(sizes: Sequence[int], costs: Costs) -> Wavefront:
    """`simulate` of chunks of `sizes` rows."""
    link, message_s = costs.link, costs.message_s
    latency_s = link.latency_s
    busy = [link.busy(size * costs.row_bytes) for size in sizes]
    embed, attend, feed = (
        list(zip(range(len(sizes)), [work.seconds(size) + message_s for size in sizes], busy))
        for work in (costs.embed, costs.attend, costs.feed)
    )
    landed = [0.0] * len(sizes)
    free = free_link = latest = under_way = 0.0
    before: list[float] = []
    free_before = under_way_before = 0.0
    for layer in range(-1, costs.layers):
        for stage in (embed,) if layer < 0 else (attend, feed):
            for chunk, compute_s, busy_s in stage:
                if landed[chunk] > free:
                    free = landed[chunk]
                free += compute_s
                free_link = (free if free > free_link else free_link) + busy_s
                under_way += free_link + latency_s - (free if free > latest else latest)
                landed[chunk] = latest = free_link + latency_s
        state = [free_link - free, *(at - free for at in landed)]
        step = free - free_before
        if before and all(abs(a - b) <= 1e-9 * step for a, b in zip(state, before)):
            left = costs.layers - 1 - layer
            latest += left * step
            under_way += left * (under_way - under_way_before)
            break
        before, free_before, under_way_before = state, free, under_way
    compute_s = _computing(sizes, costs)
    return Wavefront(latest, compute_s, under_way, max(0.0, latest - compute_s), _travelling(sizes, costs))


def _computing(sizes: Sequence[int], costs: Costs) -> float:
    """Seconds a step of chunks of `sizes` rows computes."""
    layer = sum(costs.attend.seconds(size) + costs.feed.seconds(size) for size in sizes)
    embed = sum(costs.embed.seconds(size) for size in sizes)
    return costs.layers * layer + embed + (1 + 2 * costs.layers) * len(sizes) * costs.message_s


def _travelling(sizes: Sequence[int], costs: Costs) -> float:
    """Seconds the messages of such a step take the link for themselves."""
    return (1 + 2 * costs.layers) * sum(costs.link.busy(size * costs.row_bytes) for size in sizes)


def _parts(sizes: Sequence[int], costs: Costs, corrected: Costs) -> tuple[float, float]:
    """What of `_computing` chunks take by themselves and what their rows do; `corrected` tells which chunks
    are so small that rows hide behind the reading of weights."""
    alone_s = (1 + 2 * costs.layers) * len(sizes) * costs.message_s
    rows_s = 0.0
    for times, work, real in (
        (1, costs.embed, corrected.embed),
        (costs.layers, costs.attend, corrected.attend),
        (costs.layers, costs.feed, corrected.feed),
    ):
        for size in sizes:
            if real.least_s > real.fixed_s + real.row_s * size:
                alone_s += times * work.least_s
            else:
                alone_s += times * work.fixed_s
                rows_s += times * work.row_s * size
    return alone_s, rows_s


def _best(rows: int, costs: Costs, most: int) -> tuple[int, int]:
    """(chunks, rows they are whole multiples of) that take least time."""
    best, best_s = (1, 1), _simulate([rows], costs).total_s
    tried = {1}

    def attempt(count: int) -> bool:
        """False: its computation or its messages alone take too long, as those of more chunks will."""
        nonlocal best, best_s
        tried.add(count)
        for unit in _units(rows, count, costs.tile):
            sizes = [b - a for a, b in pairwise(_cut(rows, count, unit))]
            fewer = count < best[0] or (count == best[0] and unit > best[1])
            enough_s = best_s if fewer else best_s * (1 - GAIN)
            if max(_computing(sizes, costs), _travelling(sizes, costs)) >= enough_s:
                return False
            total_s = _simulate(sizes, costs).total_s
            if total_s < enough_s:
                best, best_s = (count, unit), total_s
        return True

    for count in (*(count for count in _COUNTS if count < most), most):
        if count not in tried and not attempt(count):
            break
    before = max((count for count in _COUNTS if count < best[0]), default=0)
    behind = min((count for count in _COUNTS if count > best[0]), default=most)
    for count in range(before + 1, min(behind, most + 1)):
        if count not in tried:
            attempt(count)
    return best


def _units(rows: int, count: int, tile: int) -> tuple[int, ...]:
    """Between what to cut: tiles if there are enough, and rows where a tile is much of a chunk."""
    if count > -(-rows // tile):
        return (1,)
    return (tile, 1) if tile > 1 and rows < 4 * tile * count else (tile,)


def _cut(rows: int, count: int, unit: int) -> tuple[int, ...]:
    """`rows` in `count` about equal chunks of whole units, or fewer chunks if there are not as many."""
    units = -(-rows // unit)
    return (*(run.start * unit for run in deal(units, min(count, units))), rows)


def _bucket(rows: int) -> int:
    """The largest number of rows that shares a plan with `rows`: exact up to 32."""
    step = max(1, (1 << max(0, (rows - 1).bit_length() - 1)) // _BUCKETS)
    return -(-rows // step) * step
