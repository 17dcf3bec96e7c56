"""How much of the ranks' communication hides behind computing, on links of limited bandwidth.

Two ranks in two network namespaces, one core each, joined by a link of a rate. Of one layer's pair of
reductions and of a whole prefill: what computing takes without waiting, what the messages take alone, and
what passes take whose tokens are cut into more or fewer chunks. Needs root.
"""

import argparse
import ctypes
import json
import subprocess
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from shared.model import resolve
from tests.bench.common import Report, announce, options
from tests.support.netns import pair, unavailable

MODULE = "tests.bench.overlap_netns"
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
PORT = 29_400
LEARNING = 8
"""Steps after which costs were corrected enough."""
LIMITS = {"pair": 1.08, "prefill": 1.05}
"""Most that a pass as planned may take, as a multiple of the larger of computing and communicating."""


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "250mbit"])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args)
        return 0
    if why := unavailable():
        sys.exit(f"{MODULE}: {why}")
    command = announce(args, MODULE)
    folder = str(resolve(args.model).path)
    measured = {rate: on_link(rate, folder, args) for rate in args.rates}
    return report_of(measured, command, args.seed).publish(args.out, draw(measured))


def on_link(rate: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    own = ["--tokens", args.tokens, "--model", folder, "--dtype", args.dtype, "--rounds", args.rounds]
    with pair(rate) as spaces:
        addresses = ",".join(space.address for space in spaces)
        ranks = [
            subprocess.Popen(
                space.command(
                    *(sys.executable, "-m", MODULE, "--addresses", addresses, "--rank", str(rank)),
                    *map(str, own),
                    core=rank,
                ),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, space in enumerate(spaces)
        ]
        said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"{rate}: a rank failed")
    result: dict[str, Any] = json.loads(said[0])
    return result


# One rank.


def rank_main(args: argparse.Namespace) -> None:
    from services.worker.parallel.overlap import plan_chunks
    from tests.bench.tp_rig import Rig, cut, over_sockets

    addresses = args.addresses.split(",")
    hidden = json.loads((Path(args.model) / "config.json").read_text())["hidden_size"]
    collective = over_sockets(args.rank, addresses, PORT, 4 * args.tokens * hidden)
    rig = Rig(Path(args.model), collective, args.dtype, args.tokens)
    naive = NaiveGloo(args.rank, addresses, args.tokens * hidden)
    one = cut(args.tokens, 1)
    rig.whole(one, 1)
    # As a worker forms its group: algorithms timed, costs measured, chunks planned; then steps to learn from.
    tuning = rig.tune(args.tokens)
    for _ in range(LEARNING):
        rig.whole(tuning.plan(args.tokens), 1)
        rig.learn(tuning)
    # Of a layer alone nothing hides the first chunk's computing and the last one's sum: another plan.
    alone = len(plan_chunks(args.tokens, replace(tuning.costs, layers=1))) - 1
    plans = {"pair": alone, "prefill": len(tuning.plan(args.tokens)) - 1}

    def slowest(walls: list[float]) -> list[float]:
        told = collective.gather(np.array(walls).view(np.uint8)).view(np.float64)
        return told.max(axis=0).tolist()

    middle = rig.layers // 2
    sizes = {
        "pair": lambda chunks: rig.some_layers(middle, middle + 1, chunks, 1)[0],
        "prefill": lambda chunks: rig.whole(chunks, 1)[0],
    }
    counts = {"pair": 2, "prefill": 2 * (rig.layers - 1) + 2}
    report: dict[str, Any] = {}
    for name, run in sizes.items():
        rounds = args.rounds * (4 if name == "pair" else 1)
        walls: dict[str, list[float]] = {}
        for _ in range(rounds):
            rig.silence(True)
            walls.setdefault("compute", []).append(run(one).wall)
            rig.silence(False)
            # All but two messages of a prefill are of all its tokens.
            alone = rig.messages(counts[name], args.tokens * hidden, 1)[0]
            walls.setdefault("communication", []).append(alone)
            for count in sorted({*COUNTS, plans[name]}):
                walls.setdefault(f"chunks {count}", []).append(run(cut(args.tokens, count)).wall)
            if name == "pair":
                rig.decoder._model.exchange = ctypes.pointer(naive.exchange)
                walls.setdefault("gloo in 4", []).append(run(cut(args.tokens, 4)).wall)
                rig.silence(False)
        report[name] = {what: median(slowest(each)) for what, each in walls.items()}
        report[name]["planned"] = plans[name]
    collective.close()
    if args.rank == 0:
        print(json.dumps(report))


class NaiveGloo:
    """What one writes first: gloo's asynchronous all-reduce of each chunk, awaited when it is needed."""

    def __init__(self, rank: int, addresses: list[str], most_floats: int) -> None:
        import os

        import torch
        import torch.distributed as dist

        from services.worker.collective import abi

        os.environ["GLOO_SOCKET_IFNAME"] = "eth"
        dist.init_process_group(
            "gloo", init_method=f"tcp://{addresses[0]}:{PORT + 1}", rank=rank, world_size=len(addresses)
        )
        self._dist = dist
        self._memory = torch.zeros(8, most_floats)
        self._next, self._floats = 0, 0
        self._flying: deque[tuple[Any, Any]] = deque()
        self._calls = (
            abi.ROOM(lambda _, floats, kind: self._room(floats)),
            abi.BEGIN(lambda _: self._begin()),
            abi.LAND(lambda _, landed: self._land(landed)),
            abi.RELEASE(lambda _: None),
        )
        self.exchange = abi.Exchange(None, rank, len(addresses), 4 * most_floats, *self._calls)

    def _room(self, floats: int) -> int:
        self._floats = floats
        return self._memory[self._next].data_ptr()

    def _begin(self) -> None:
        part = self._memory[self._next, : self._floats]
        self._flying.append((part, self._dist.all_reduce(part, async_op=True)))
        self._next = (self._next + 1) % len(self._memory)

    def _land(self, landed: Any) -> None:
        part, work = self._flying.popleft()
        work.wait()
        landed.contents.parts = 1
        landed.contents.part[0] = part.data_ptr()


# What came of it.


def bound(found: dict[str, float]) -> float:
    return max(found["compute"], found["communication"])


def report_of(measured: dict[str, Any], command: str, seed: int) -> Report:
    rows, verdicts = [], {}
    for rate, sizes in measured.items():
        for name, found in sizes.items():
            best = min((what for what in found if what.startswith("chunks")), key=found.__getitem__)
            chosen, most = f"chunks {found['planned']:.0f}", LIMITS[name]
            shown = ("compute", "communication", "chunks 1", "gloo in 4", chosen, best)
            rows.append(
                (rate, name, *(f"{found[what] * 1e3:.1f}" if what in found else "" for what in shown))
            )
            ratio = found[chosen] / bound(found)
            verdicts[f"{rate}, {name}: planned {ratio:.3f} × the bound, at most {most}"] = ratio <= most
            apart = found[chosen] / found[best]
            verdicts[f"{rate}, {name}: planned {apart:.3f} × the best of the sweep, at most 1.05"] = (
                apart <= 1.05
            )
    columns = ("link", "what", "compute", "messages", "plain order", "gloo in 4", "planned", "best cut")
    title = "Communication behind computing: ms of two ranks, one core each"
    return Report("overlap_netns", title, command, seed, columns, rows, measured, verdicts)


def draw(measured: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(measured), 2, figsize=(10, 4 * len(measured)), squeeze=False, layout="constrained"
    )
    for axes_row, (rate, sizes) in zip(grid, measured.items()):
        for axes, (name, found) in zip(axes_row, sizes.items()):
            counts = sorted(int(what.split()[1]) for what in found if what.startswith("chunks "))
            axes.plot(counts, [found[f"chunks {count}"] * 1e3 for count in counts], "o-", label="measured")
            planned = found["planned"]
            chosen = found[f"chunks {planned:.0f}"] * 1e3
            axes.plot([planned], [chosen], "*", ms=16, label="as planned")
            axes.axhline(bound(found) * 1e3, ls="--", color="k", label="larger of compute and communication")
            total = (found["compute"] + found["communication"]) * 1e3
            axes.axhline(total, ls=":", color="k", label="sum of both")
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, map(str, counts))
            axes.set_ylim(bottom=0)
            axes.set_xlabel("chunks")
            axes.set_ylabel("ms")
            axes.set_title(f"{rate}, {'one layer' if name == 'pair' else 'whole prefill'}")
            axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
