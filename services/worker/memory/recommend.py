"""One of the options, and why: the fewest devices that hold the load with room left and keep pace. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.worker.memory.devices import Device
from services.worker.memory.footprint import Case, Layout
from services.worker.memory.options import COMFORT, FITS, Option, nearest
from services.worker.parallel.advice import MOST_SHARE

PAYS = 0.7
"""More ranks pay if a step gets faster by at least this share of how many more they are."""
_ALIKE = 0.95
"""Throughputs within this share of the best are the same; then fewer ranks an instance are better."""


@dataclass(frozen=True)
class Recommendation:
    """What to do."""

    kind: str
    """`one device`, `several instances`, `tensor parallel`, or `does not fit`."""
    option: Option | None
    """None where nothing fits."""
    sentence: str
    """What to do, for people."""
    reasons: tuple[str, ...]
    """With figures."""
    needs: int | None = None
    """Devices on which it would fit, where it does not on those there are; None: on no number of them."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "sentence": self.sentence,
            "reason": "; ".join(self.reasons),
            "reasons": list(self.reasons),
            "option": str(self.option.layout) if self.option else None,
            "data_parallel": self.option.layout.replicas if self.option else None,
            "tensor_parallel": self.option.layout.tp if self.option else None,
            "devices": self.option.layout.devices if self.option else None,
            "needs_devices": self.needs,
        }


def choose(options: Sequence[Option], gap_s: float) -> Option | None:
    """The fewest devices that fit and take at most `gap_s` for a step; if none is so fast, the fastest; None
    if nothing fits."""
    fitting = [option for option in options if option.fits and option.served]
    quick = [option for option in fitting if option.step_s <= gap_s]
    if not quick:
        return min(fitting, key=lambda o: (o.step_s, o.layout.devices), default=None)
    fewest = min(option.layout.devices for option in quick)
    return _best([option for option in quick if option.layout.devices == fewest])


def recommend(case: Case, chosen: Option, alone: Option | None, wider: Option | None) -> Recommendation:
    """To use `chosen`. `alone` is one device, if that is an option; `wider` has more ranks an instance."""
    device, gap_s = case.device, case.demand.gap_s
    reasons = [_memory(chosen, device), *_pace(chosen, gap_s)]
    if alone is not None and alone is not chosen:
        reasons.append(_why_not_alone(alone, device, gap_s))
    if wider is not None:
        reasons += _more_ranks(chosen, wider)
    reasons += _spare(chosen, case.count)
    return Recommendation(_kind(chosen), chosen, _sentence(chosen, device, case.count), tuple(reasons))


def _best(options: Sequence[Option]) -> Option:
    most = max(option.tok_s for option in options)
    alike = [option for option in options if option.tok_s >= _ALIKE * most]
    return min(alike, key=lambda option: (option.layout.tp, -option.tok_s))


def _kind(chosen: Option) -> str:
    if chosen.layout.devices == 1:
        return "one device"
    return "tensor parallel" if chosen.layout.tp > 1 else "several instances"


def _sentence(chosen: Option, device: Device, count: int) -> str:
    layout = chosen.layout
    if device.shared:
        return f"{layout.tp} ranks on this machine (--tp {layout.tp}), as asked for."
    if layout.devices == 1:
        one = _devices(1, device)
        if chosen.max_concurrency is None:
            return f"{one[0].upper()}{one[1:]} holds the weights; whether KV fits beside them is not known."
        return f"{one[0].upper()}{one[1:]} is enough: do not distribute."
    instances = f"{layout.replicas} instances of " if layout.replicas > 1 else ""
    ranks = f"{layout.tp} ranks (--tp {layout.tp})" if layout.tp > 1 else "one device each (--tp 1)"
    use = f" {layout.devices} of the {count} devices" if layout.devices < count else f" all {count} devices"
    return f"Use{use}: {instances}{ranks}."


def _memory(chosen: Option, device: Device) -> str:
    total, most = chosen.fullest.total_bytes, chosen.max_concurrency
    room = f"; at most {most:,} such sequences fit" if most else ""
    return (
        f"the fullest rank takes {gb(total)} of {gb(device.memory_bytes)} ({chosen.used:.1%}, at most "
        f"{COMFORT:.0%}){room}"
    )


def _pace(chosen: Option, gap_s: float) -> list[str]:
    speed = chosen.speed
    if speed is None:
        return []
    within = "within" if chosen.step_s <= gap_s else "no option comes nearer to"
    return [
        f"a step of {speed.sequences} sequences takes {ms(chosen.step_s)}, {within} the {ms(gap_s)} between "
        f"tokens that are allowed (--gap-ms); about {chosen.tok_s:,.0f} tokens/s in all"
    ]


def _why_not_alone(alone: Option, device: Device, gap_s: float) -> str:
    if not alone.fits:
        return (
            f"one device alone {alone.verdict}: {gb(alone.fullest.total_bytes)} of {gb(device.memory_bytes)}"
        )
    return f"one device alone takes {ms(alone.step_s)} a step, more than {ms(gap_s)}"


def _more_ranks(chosen: Option, wider: Option) -> list[str]:
    if chosen.speed is None or wider.speed is None:
        return []
    times = wider.layout.tp / chosen.layout.tp
    gain, share = chosen.step_s / wider.step_s, wider.speed.decode.share
    pays = gain >= 1 + PAYS * (times - 1) and share <= MOST_SHARE
    verdict = "would pay if steps had to be shorter" if pays else "do not pay"
    return [
        f"more ranks {verdict}: {wider.layout.tp} would make a step {gain:.2f} × as fast, not {times:g} ×; "
        f"messages would take {share:.0%} of the computing"
    ]


def _spare(chosen: Option, count: int) -> list[str]:
    fit = count // chosen.layout.ranks
    if fit <= chosen.layout.replicas:
        return []
    return [
        f"{count - chosen.layout.devices} of the {count} are not needed for this load; as further instances "
        f"they would serve {fit / chosen.layout.replicas:g} × as many sequences"
    ]


def refuse(case: Case, options: Sequence[Option], needs: Layout | None) -> Recommendation:
    """That none of `options` fits. `needs` is what `fewest_devices` found."""
    device = case.device
    served = [option for option in options if option.served]
    near = nearest(options)
    verdict = near.verdict
    reasons = [
        f"{_at(near)} the fullest rank would take {gb(near.fullest.total_bytes)} of "
        f"{gb(device.memory_bytes)} ({near.used:.1%}, at most {COMFORT:.0%})"
    ]
    if verdict != FITS and near.used <= 1:
        reasons.append(
            "above that nothing is left for outputs longer than expected: running sequences would be "
            "preempted, their KV computed anew or fetched from the second tier, and these rates not reached"
        )
    most = max((option.max_concurrency or 0 for option in served), default=0)
    if most:
        reasons.append(
            f"{most:,} sequences of {case.demand.context:,} tokens would fit (--concurrency {most})"
        )
    else:
        reasons.append(
            "not even one sequence would fit: fewer bytes a weight (--dtype), or more or larger devices"
        )
    where = f"It {verdict} on {_devices(case.count, device)}"
    if needs is None:
        sentence = f"{where}, nor on any number of them that its heads can be split over."
        return Recommendation("does not fit", None, sentence, tuple(reasons))
    number = needs.devices
    how = f"{needs.replicas} instances of {needs.tp} ranks" if needs.replicas > 1 else f"--tp {needs.tp}"
    sentence = f"{where}: it needs {number} of them ({how})."
    return Recommendation("does not fit", None, sentence, tuple(reasons), number)


def _at(option: Option) -> str:
    return "alone" if option.layout.devices == 1 else f"with {option.layout}"


def _devices(count: int, device: Device) -> str:
    if device.kind == "cpu":
        return "this machine" if count == 1 else f"{count} machines like this one"
    return f"one {device.name}" if count == 1 else f"{count} × {device.name}"


def gb(count: float) -> str:
    """Bytes for people, in the powers of ten that devices are sold by."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= unit:
            value = count / unit
            return f"{value:.0f} {name}" if value >= 1000 else f"{value:.4g} {name}"
    return f"{count:.0f} bytes"


def ms(seconds: float) -> str:
    """Times for people."""
    value = seconds * 1e3
    if value >= 1e4:
        return f"{value / 1e3:.1f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value * 1e3:.0f} µs"
