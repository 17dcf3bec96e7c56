"""PNG plots of bench results."""

from pathlib import Path
from typing import Any

from deploy.bench.results import Result

COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#b83280", "#718096")


def figure(width: float = 8.0, height: float = 4.5, columns: int = 1) -> tuple[Any, Any]:
    """A matplotlib figure and its axes (a list where `columns` > 1), drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made, axes = pyplot.subplots(1, columns, figsize=(width * columns, height), layout="constrained")
    for one in axes if columns > 1 else [axes]:
        one.grid(alpha=0.3)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    return made, list(axes) if columns > 1 else axes


def save(made: Any, path: Path) -> Path:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=120)
    pyplot.close(made)
    return path


def grouped_bars(axes: Any, groups: list[str], series: dict[str, list[float]], unit: str) -> None:
    """One cluster of bars for each group, one colour for each series, values written on top."""
    width = 0.8 / max(1, len(series))
    for number, (name, values) in enumerate(series.items()):
        places = [g + (number - (len(series) - 1) / 2) * width for g in range(len(groups))]
        bars = axes.bar(places, values, width * 0.95, label=name, color=COLOURS[number % len(COLOURS)])
        texts = [f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in values]
        axes.bar_label(bars, labels=texts, fontsize=8, padding=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(unit)
    if len(series) > 1:
        axes.legend(frameon=False)


def plot_all(results: list[Result], folder: Path) -> list[Path]:
    """throughput.png, latency.png, and over_time.png (TTFT and gaps as the run went on)."""
    settings = list(dict.fromkeys(r.setting for r in results))
    targets = list(dict.fromkeys(r.target for r in results))
    by = {(r.target, r.setting): r.summary for r in results}
    nan = float("nan")

    def values(field: str) -> dict[str, list[float]]:
        return {t: [getattr(by[t, s], field) if (t, s) in by else nan for s in settings] for t in targets}

    made, axes = figure()
    grouped_bars(axes, settings, values("output_tok_s"), "output tokens/s")
    written = [save(made, folder / "throughput.png")]

    made, panes = figure(6.0, 4.5, columns=3)
    for pane, (field, title) in zip(
        panes,
        (("ttft_p50_ms", "time to first token, p50"), ("gap_p50_ms", "gap, p50"), ("gap_p99_ms", "gap, p99")),
        strict=True,
    ):
        grouped_bars(pane, settings, values(field), "ms")
        pane.set_title(title)
    written.append(save(made, folder / "latency.png"))

    made, (left, right) = figure(7.0, 4.5, columns=2)
    for number, target in enumerate(targets):
        colour = COLOURS[number % len(COLOURS)]
        offset = 0.0
        first: list[tuple[float, float]] = []
        gaps: list[tuple[float, float]] = []
        for run in (run for r in results if r.target == target for run in r.runs):
            for record in run.records:
                if record.error or record.first is None:
                    continue
                first.append((offset + record.first, record.ttft * 1e3))
                at = record.first
                for gap in record.gaps:
                    at += gap
                    gaps.append((offset + at, gap * 1e3))
            offset += run.wall_s
        for axes, points in ((left, first), (right, gaps)):
            if points:
                axes.scatter(
                    *zip(*points, strict=True), s=5, alpha=0.5, color=colour, label=target, linewidths=0
                )
    for axes, title in ((left, "time to first token"), (right, "gap between events")):
        axes.set_title(f"{title}, over the target's own time")
        axes.set_xlabel("s")
        axes.set_ylabel("ms")
        if len(targets) > 1:
            axes.legend(frameon=False, markerscale=3)
    written.append(save(made, folder / "over_time.png"))
    return written
