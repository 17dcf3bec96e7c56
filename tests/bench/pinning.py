"""What it is worth to place the ranks of a group well.

One group of two ranks, one computing thread each, sharing memory. Its processes are moved in turns: a core
for each rank as a worker would deal them (`well`), both on the same core (`badly`), and wherever the system
puts them (`left`).
"""

import argparse
import json
import os
import sys
import time
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from shared.model import resolve
from tests.bench import tp_ranks
from tests.bench.common import Report, announce, options

MODULE = "tests.bench.pinning"
PLACES = ("well", "badly", "left")
WITHIN = 1.03
"""Most that ranks placed well may take, as a multiple of any other placement: what noise may make of it."""
DECODE_ROWS, PREFILL = 8, 256
DECODE_AT = 64
"""Tokens that a row has before the step."""
STEPS = 8
"""Decode steps in a row; their mean counts."""
MOST_FLOATS = 1 << 21


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(json.loads(args.rank))
        return 0
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit(f"{MODULE}: one core can only be shared; give it two")
    command = announce(args, MODULE)
    cores = tp_ranks.cores_of(2)
    places = {"well": [[core] for core in cores], "badly": [cores[:1]] * 2}
    places["left"] = [sorted(os.sched_getaffinity(0))] * 2
    told: dict[str, Any] = {"model": str(resolve(args.model).path), "dtype": args.dtype}
    told |= {"places": places, "rounds": args.rounds, "seed": args.seed}
    measured = tp_ranks.on_host(MODULE, 2, MOST_FLOATS, told) | {"cores": places}
    return report_of(measured, command, args.seed).publish(args.out, draw(measured))


# One rank.


def rank_main(told: dict[str, Any]) -> None:
    end = tp_ranks.join(told)
    from tests.bench.tp_batches import alike
    from tests.bench.tp_rig import BLOCK, Rig

    rig = Rig(Path(told["model"]), end, told["dtype"], PREFILL + DECODE_ROWS * (DECODE_AT + BLOCK))
    ids = np.random.default_rng(told["seed"]).integers(0, 1000, (1, PREFILL)).astype(np.int32)
    prompt = alike(ids, 0, PREFILL)
    step = alike(ids[:, :DECODE_ROWS].reshape(DECODE_ROWS, 1), DECODE_AT, DECODE_AT + BLOCK)
    works = {"decode step": (step, STEPS), "prefill": (prompt, 1)}
    taken: dict[str, dict[str, list[float]]] = {name: {place: [] for place in PLACES} for name in works}
    orders = list(permutations(PLACES))
    for number in range(told["rounds"]):
        for place in orders[number % len(orders)]:
            move(told["places"][place][end.rank])
            for name, (batch, repeats) in works.items():
                rig.decoder.forward(batch)  # caches fill where the rank is now
                end.gather(np.zeros(1, np.uint8))
                begun = time.perf_counter()
                for _ in range(repeats):
                    rig.decoder.forward(batch)
                mine = np.array([(time.perf_counter() - begun) / repeats])
                every = end.gather(mine.view(np.uint8)).view(np.float64)
                taken[name][place].append(float(every.max()))
    end.close()
    if end.rank == 0:
        print(json.dumps({"seconds": taken}))


def move(cores: list[int]) -> None:
    """All threads of this process."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue


# What came of it.


def report_of(measured: dict[str, Any], command: str, seed: int) -> Report:
    rows, verdicts = [], {}
    for name, by_place in measured["seconds"].items():
        ms = {place: float(np.median(by_place[place])) * 1e3 for place in PLACES}
        rows.append((name_of(name), *ms.values(), ms["badly"] / ms["well"], ms["left"] / ms["well"]))
        # In turns, and compared within a turn: what else the machine does falls on all of them.
        ratios = {
            place: float(np.median(np.divide(by_place["well"], by_place[place]))) for place in PLACES[1:]
        }
        words = (
            f"{name_of(name)}: well placed takes {ratios['badly']:.2f} × badly placed, "
            f"{ratios['left']:.2f} × left to the system; at most {WITHIN:.2f} ×"
        )
        verdicts[words] = max(ratios.values()) <= WITHIN
    columns = ("", *(f"{place}, ms" for place in PLACES), "badly / well", "left / well")
    title = "The same 2 ranks, one thread each, placed well, badly, and left to the system: medians"
    return Report("pinning", title, command, seed, columns, rows, measured, verdicts)


def name_of(work: str) -> str:
    return f"decode step of {DECODE_ROWS} rows" if work == "decode step" else f"prefill of {PREFILL} tokens"


def draw(measured: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    figure, axes_row = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, (name, by_place) in zip(axes_row, measured["seconds"].items()):
        for at, place in enumerate(PLACES):
            ms = np.array(by_place[place]) * 1e3
            axes.bar([at], [np.median(ms)], color=f"C{at}", alpha=0.6)
            axes.plot([at] * len(ms), ms, "k.", ms=4)
        axes.set_xticks(range(len(PLACES)), ("a core each", "on one core", "left to the system"))
        axes.set_ylabel("ms")
        axes.set_ylim(bottom=0)
        axes.set_title(name_of(name))
    return figure


if __name__ == "__main__":
    sys.exit(main())
