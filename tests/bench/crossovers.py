"""Whether the algorithm chosen for each size of a sum is the fastest: memory, sockets and slow links.

Of each transport: the table is built as a worker does when its group is formed. Then, at sizes between those
of the table, every algorithm and the one that the table chooses are timed anew, in turns. Ranks are processes
on a core each; for links they are in network namespaces, which needs root.
"""

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

import msgspec
import numpy as np

from services.worker.collective.native import NativeCollective
from services.worker.engine.crossing import from_rank_0, measure_crossovers, told_by_rank_0, use
from services.worker.parallel.crossover import UNLIMITED, CrossoverTable, sizes_to_measure
from tests.bench import tp_ranks
from tests.bench.common import Report, announce, options
from tests.support.netns import islands, unavailable

MODULE = "tests.bench.crossovers"
MOST_BYTES = 512 * 576 * 4
"""Of a message: 512 tokens of the default model."""
MOST_FLOATS = 1 << 21
BESIDE = 1.4
"""Sizes measured anew lie so far above those of the table: about halfway to the next."""
WORST = 1.10
"""Most that a choice may take, as a multiple of the fastest algorithm."""
SIZE_S = {"links": 2.0, "memory": 0.7}
"""Time for measuring one size anew."""
ROUNDS = (5, 25)
"""Least and most of them."""


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--rate", default="1gbit", help="of each rank's link, as `tc` writes it")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(json.loads(args.rank))
        return 0
    command = announce(args, MODULE)
    told = {"size_s": SIZE_S["memory"]}
    measured = {
        "2 ranks, memory and sockets": tp_ranks.on_host(MODULE, 2, MOST_FLOATS, told, sockets=True),
        "4 ranks, memory": tp_ranks.on_host(MODULE, 4, MOST_FLOATS, told),
    }
    if why := unavailable():
        print(f"links are left out: {why}")
    else:
        with islands([4], args.rate) as spaces:
            told = {"size_s": SIZE_S["links"]}
            measured[f"4 ranks, {args.rate} links"] = tp_ranks.on_links(MODULE, spaces, MOST_FLOATS, told)
    return report_of(measured, command, args.seed).publish(args.out, draw(measured))


# One rank.


def rank_main(told: dict[str, Any]) -> None:
    end = tp_ranks.join(told)
    begun = time.perf_counter()
    table = formed(end)
    took_s = time.perf_counter() - begun
    found = [measure(end, table, size, told["size_s"]) for size in sizes_beside(table)]
    end.close()
    if end.rank == 0:
        print(json.dumps({"table": table.to_plain(), "table_s": took_s, "sizes": found}))


def formed(end: NativeCollective) -> CrossoverTable:
    """The table as a worker's group has it, but never a remembered one."""
    mine = measure_crossovers(end, sizes_to_measure(MOST_BYTES), told_by_rank_0(end))
    told = from_rank_0(end, msgspec.msgpack.encode(mine))
    table = msgspec.msgpack.decode(told, type=CrossoverTable)
    use(end, table)
    return table


def sizes_beside(table: CrossoverTable) -> list[int]:
    """In bytes; the last is larger than all that the table was built from."""
    return [round(size * BESIDE / 4) * 4 for size in sorted({timing.bytes for timing in table.timings})]


def measure(end: NativeCollective, table: CrossoverTable, size: int, size_s: float) -> dict[str, Any]:
    """Seconds of a sum of `size` bytes by every algorithm and by the one that such a sum goes by."""
    chosen = really_taken(end, table, size)
    ways = [*end.algorithms(), "chosen"]
    # Each timing is of nine sums; what they take is the same guess on all ranks.
    round_s = 9 * sum(table.predict(size, chosen if way == "chosen" else way) for way in ways)
    rounds = int(np.clip(size_s / round_s, *ROUNDS))
    taken: dict[str, list[float]] = {way: [] for way in ways}
    # What goes before leaves its traces, so the order is drawn anew each round, alike on all ranks.
    rng = np.random.default_rng(size)
    for _ in range(rounds):
        for way in rng.permutation(ways).tolist():
            taken[way].append(end.time(chosen if way == "chosen" else way, size // 4, 1)[1])
    # A sum is over when it is on all ranks.
    every = end.gather(np.array([taken[way] for way in ways]).view(np.uint8).reshape(-1))
    slowest = every.view(np.float64).reshape(end.size, len(ways), rounds).max(axis=0)
    seconds = dict(zip(ways, np.median(slowest, axis=1).tolist()))
    best = min(end.algorithms(), key=lambda way: seconds[way])
    against = slowest[ways.index("chosen")] / slowest[ways.index(best)]
    return {
        "bytes": size,
        "rounds": rounds,
        "chosen": chosen,
        "best": best,
        "seconds": seconds,
        "ratio": median(against.tolist()),
    }


def really_taken(end: NativeCollective, table: CrossoverTable, size: int) -> str:
    """The algorithm by which a sum of `size` bytes goes, which must be the one that the table names."""
    before = {name: carried.messages for name, carried in end.carried().items()}
    end.all_reduce(np.zeros(size // 4, np.float32))
    after = {name: carried.messages for name, carried in end.carried().items()}
    taken = [name for name, messages in after.items() if messages > before.get(name, 0)]
    if taken != [table.choose(size)]:
        sys.exit(f"a sum of {size} bytes went by {taken}, the table says {table.choose(size)}")
    return taken[0]


# What came of it.


def report_of(measured: dict[str, dict[str, Any]], command: str, seed: int) -> Report:
    rows, verdicts, details = [], {}, {}
    for transport, found in measured.items():
        for one in found["sizes"]:
            us = {way: seconds * 1e6 for way, seconds in one["seconds"].items()}
            cells = one["chosen"], us["chosen"], one["best"], us[one["best"]], one["ratio"]
            rows.append((transport, one["bytes"], *cells))
        worst = max(found["sizes"], key=lambda one: one["ratio"])
        words = (
            f"{transport}: the choice takes at most {worst['ratio']:.3f} × the fastest algorithm "
            f"({worst['bytes']} bytes), at most {WORST:.2f} ×"
        )
        verdicts[words] = worst["ratio"] <= WORST
        fits = CrossoverTable.from_plain(found["table"]).fits
        details[transport] = found | {"fits": msgspec.to_builtins(dict(fits))}
    columns = ("transport", "bytes", "chosen", "µs", "fastest", "µs", "ratio")
    title = "Sums by the algorithm chosen and by the fastest, at sizes between those of the table"
    return Report("crossovers", title, command, seed, columns, rows, details, verdicts)


def draw(measured: dict[str, dict[str, Any]]) -> Any:
    from matplotlib import pyplot

    figure, axes_row = pyplot.subplots(
        1, len(measured), figsize=(6 * len(measured), 5), squeeze=False, layout="constrained"
    )
    for axes, (transport, found) in zip(axes_row[0], measured.items()):
        table = CrossoverTable.from_plain(found["table"])
        for number, (name, fit) in enumerate(table.fits.items()):
            own = [timing for timing in table.timings if timing.algorithm == name]
            sizes = np.geomspace(own[0].bytes, own[-1].bytes, 200)
            line = [fit.seconds(size) * 1e6 for size in sizes]
            rate = fit.large.bytes_per_s / 1e6
            label = f"{name}: {fit.small.latency_s * 1e6:.3g} µs, {rate:.3g} MB/s, ±{fit.error:.0%}"
            axes.plot(sizes, line, color=f"C{number}", label=label)
            points = [timing.seconds * 1e6 for timing in own]
            axes.plot([timing.bytes for timing in own], points, "o", ms=4, color=f"C{number}")
        anew = [one["bytes"] for one in found["sizes"]]
        chosen = [one["seconds"]["chosen"] * 1e6 for one in found["sizes"]]
        axes.plot(anew, chosen, "k*", ms=8, label="as chosen, measured anew")
        for entry in table.entries:
            if entry.up_to_bytes != UNLIMITED:
                axes.axvline(entry.up_to_bytes, ls="--", lw=1, color="grey")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("bytes")
        axes.set_ylabel("µs")
        axes.set_title(f"{transport}\n{' → '.join(entry.algorithm for entry in table.entries)}")
        axes.legend(frameon=False, fontsize="small")
    return figure


if __name__ == "__main__":
    sys.exit(main())
