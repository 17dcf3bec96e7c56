"""The memory of every option of a plan as stacked bars against the device's, in a PNG or SVG file."""

from pathlib import Path

from deploy.bench.plots import figure, save
from services.worker.memory.options import COMFORT
from services.worker.memory.plan import Plan, named
from services.worker.memory.recommend import gb

_COLOURS = {
    "runtime": "#718096",
    "weights": "#2b6cb0",
    "KV": "#dd6b20",
    "activations": "#2f855a",
    "workspace": "#805ad5",
    "staging": "#b83280",
}
_MOST_BARS = 24


def draw(plan: Plan, path: Path) -> Path:
    """The fullest rank of each option, one bar each; devices' memory and what is planned of it as lines."""
    options = plan.compared[:_MOST_BARS]
    largest = max(plan.device.memory_bytes, *(option.fullest.total_bytes for option in options))
    unit, name = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    made, axes = figure(width=max(6.0, 2.5 + 1.1 * len(options)), height=5.0)
    labels = [
        f"{'one device' if option.layout.devices == 1 else str(option.layout).replace(' × ', chr(10))}"
        f"{'' if option.served else chr(10) + '(not served)'}"
        for option in options
    ]
    places = range(len(options))
    bottom = [0.0] * len(options)
    for number, (word, colour) in enumerate(_COLOURS.items()):
        heights = [named(option.fullest)[number][1] / unit for option in options]
        if any(heights):
            axes.bar(places, heights, 0.6, bottom=bottom, label=word, color=colour)
        bottom = [a + b for a, b in zip(bottom, heights)]
    for place, option, top in zip(places, options, bottom):
        chosen = " ←" if option is plan.recommendation.option else ""
        axes.annotate(
            f"{gb(option.fullest.total_bytes)}\n{option.used:.0%}{chosen}",
            (place, top),
            ha="center",
            va="bottom",
            fontsize=8,
            fontweight="bold" if chosen else "normal",
        )
    memory = plan.device.memory_bytes / unit
    axes.axhline(memory, color="#c53030", label=f"memory, {gb(plan.device.memory_bytes)}")
    axes.axhline(
        COMFORT * memory, color="#c53030", linestyle="--", linewidth=1, label=f"planned for, {COMFORT:.0%}"
    )
    axes.set_xticks(list(places), labels, fontsize=8)
    axes.set_xlim(-0.6, len(options) - 0.4)
    axes.set_ylim(0, 1.15 * largest / unit)
    axes.set_ylabel(f"{name}, fullest rank")
    demand = plan.demand
    axes.set_title(
        f"{plan.model.name}: {demand.concurrency:,} sequences × {demand.kept:,} tokens on {plan.device.name}",
        fontsize=10,
        parse_math=False,
    )
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return save(made, path)
