"""What communication costs a layer, and what another number of ranks would make of it (design §7).

More ranks divide computation, and never communication. Once communication takes more than 30 % of a layer's
computation, each doubling pays far less than it seems to, and it is time to say so, with figures.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2

from services.worker.parallel.crossover import Fit
from services.worker.parallel.split import Sizes, plan_shards, weights_of

MOST_SHARE = 0.30
"""Communication over computation of a layer beyond which there is advice."""


@dataclass(frozen=True)
class Steps:
    """What a collective is made of: messages one after the other, and how much of the payload passes a rank's
    link."""

    hops: float
    volume: float


def steps(algorithm: str, degree: int) -> Steps:
    """Of `algorithm` between `degree` ranks: `direct` and `one-shot` (each reads what every other has),
    `scatter` and `two-shot` (a share of each, then all shares), `tree`, `ring`. Whatever libraries call
    theirs counts as a ring, which they use for all but small messages."""
    others = degree - 1
    if algorithm in ("direct", "one-shot"):
        return Steps(min(1, others), others)
    if algorithm in ("scatter", "two-shot"):
        return Steps(2 * min(1, others), 2 * others / degree)
    if algorithm == "tree":
        levels = 2 * ceil(log2(degree))
        return Steps(levels, levels)
    return Steps(2 * others, 2 * others / degree)


Communication = Callable[[int], float]
"""Degree → seconds a layer's messages take between as many ranks; 0 of one."""


def unchanging(degree: int) -> float:
    """`Communication` that takes as long between any number of ranks: 1, or nothing for one rank alone."""
    return float(degree > 1)


class Scaled:
    """`Communication` out of what was measured between `degree` ranks: `fits` of each algorithm, of which the
    fastest is taken for messages of `size` bytes, `messages` to a layer."""

    def __init__(self, fits: Mapping[str, Fit], degree: int, size: int, messages: int = 2) -> None:
        if degree < 2:
            raise ValueError("one rank alone has measured no collective")
        self._messages = messages
        self._parts = []
        for algorithm, fit in fits.items():
            line = fit.small if fit.knee is None or size <= fit.knee else fit.large
            whole_s, now = fit.seconds(size), steps(algorithm, degree)
            latency_s = min(max(line.latency_s, 0.0), whole_s)
            self._parts.append((algorithm, latency_s / now.hops, (whole_s - latency_s) / now.volume))

    def __call__(self, degree: int) -> float:
        if degree < 2:
            return 0.0
        each = ((steps(algorithm, degree), hop_s, all_s) for algorithm, hop_s, all_s in self._parts)
        return self._messages * min(it.hops * hop_s + it.volume * all_s for it, hop_s, all_s in each)


@dataclass(frozen=True)
class Layer:
    """What one of a step's `layers` takes between `degree` ranks, in seconds. What belongs to none, as the
    head, is shared out among them, so that `layers` of these are the step."""

    degree: int
    compute_s: float
    """Of the busiest rank."""
    communication_s: float
    """Of its messages if nothing is computed meanwhile."""
    exposed_s: float
    """In which nothing is computed: what of it is not hidden, and any waiting for slower ranks."""
    layers: int = 1

    @property
    def share(self) -> float:
        """Communication over computation."""
        return self.communication_s / self.compute_s

    @property
    def hidden(self) -> float:
        """How much of what could be hidden is: all of the shorter of computation and communication is 1."""
        could_s = min(self.compute_s, self.communication_s)
        if not could_s:
            return 0.0
        return min(max((self.communication_s - self.exposed_s) / could_s, 0.0), 1.0)

    @property
    def step_s(self) -> float:
        return self.layers * (self.compute_s + self.exposed_s)


def work_share(model: Sizes | None, degree: int) -> float:
    """Share of the whole model's multiplications that the busiest of `degree` ranks does; of no model in
    particular, an even one. Raises ValueError where the model cannot be split."""
    if model is None:
        return 1 / degree
    work = [weights_of(model, shard) for shard in plan_shards(model, degree).shards]
    return max(work) / weights_of(model, plan_shards(model, 1).shards[0])


def predict(
    now: Layer,
    degree: int,
    communication: Communication,
    model: Sizes | None = None,
    undivided_s: float = 0.0,
) -> Layer:
    """What a layer would take between `degree` ranks: computation by what the busiest rank holds, except
    `undivided_s` of it that every rank does in full, as norms; communication as `communication` grows; and as
    much of what can be hidden hidden as now. Each rank is to have as many cores as now. Raises ValueError
    where the model cannot be split."""
    divided_s = max(0.0, now.compute_s - undivided_s)
    compute_s = now.compute_s - divided_s
    compute_s += divided_s * work_share(model, degree) / work_share(model, now.degree)
    grown = communication(degree)
    known = communication(now.degree)
    communication_s = now.communication_s * grown / known if known and now.communication_s else grown
    exposed_s = communication_s - now.hidden * min(compute_s, communication_s)
    if degree > 1:
        exposed_s += max(0.0, now.exposed_s - now.communication_s)
    return Layer(degree, compute_s, communication_s, exposed_s, now.layers)


@dataclass(frozen=True)
class Advice:
    """That communication takes too much, and what other numbers of ranks would make of a step."""

    now: Layer
    others: tuple[Layer, ...]
    """Predicted, by ascending degree: one rank alone, the neighbours below, the one above."""

    @property
    def best(self) -> Layer:
        """What takes least time, of now and the others; of equals the fewest ranks."""
        return min((*self.others, self.now), key=lambda layer: (layer.step_s, layer.degree))

    def speedup(self, other: Layer) -> float:
        """How many times as fast a step would be."""
        return self.now.step_s / other.step_s

    @property
    def sentence(self) -> str:
        """For people, with figures."""
        now = self.now
        what = "step" if now.layers > 1 else "layer"
        said = [
            f"communication takes {now.share:.0%} of a layer's compute "
            f"({_ms(now.communication_s)} beside {_ms(now.compute_s)}; {_ms(now.exposed_s)} were waited)"
        ]
        for other in reversed(self.others):
            who = "one rank alone" if other.degree == 1 else f"{other.degree} ranks"
            text = f"{who} would take {_ms(other.step_s)} instead of {_ms(now.step_s)} a {what}"
            if other.degree > now.degree:
                text += f" ({self.speedup(other):.2f}×, not {_times(other.degree / now.degree)}×)"
            else:
                text += f" ({self.speedup(other):.2f}×)"
            said.append(text)
        best = self.best.degree
        if best < now.degree:
            said.append(f"start with --tp {best}, which is faster")
        elif best == now.degree:
            said.append("more ranks will not pay; a faster link would")
        else:
            gain, cost = self.speedup(self.best), best / now.degree
            said.append(f"more ranks hardly pay: {gain:.2f}× for {_times(cost)}× as many")
        return "; ".join(said)


def advise(
    now: Layer, communication: Communication, model: Sizes | None = None, undivided_s: float = 0.0
) -> Advice | None:
    """Advice where communication takes more than 30 % of a layer's computation, hidden or not, else None.
    Arguments as of `predict`."""
    if now.degree < 2 or now.share <= MOST_SHARE:
        return None
    others = (
        predict(now, degree, communication, model, undivided_s) for degree in neighbours(now.degree, model)
    )
    return Advice(now, tuple(others))


def neighbours(degree: int, model: Sizes | None = None) -> Sequence[int]:
    """Degrees worth comparing with `degree`, ascending: one, half as many, one less, and twice as many or
    else the most below that between which the model can be split."""
    fewer = {1, degree // 2, degree - 1} - {0, degree}
    more = next((more for more in range(2 * degree, degree, -1) if _splits(model, more)), None)
    return [*(less for less in sorted(fewer) if _splits(model, less)), *([more] if more else [])]


def _splits(model: Sizes | None, degree: int) -> bool:
    if model is None:
        return True
    try:
        plan_shards(model, degree)
    except ValueError:
        return False
    return True


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.2f} ms" if value >= 0.1 else f"{value * 1e3:.1f} µs"


def _times(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
