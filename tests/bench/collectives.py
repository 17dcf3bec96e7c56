"""Sums over processes of this host: through shared memory and sockets of ours, and through gloo, in turns.

`called` is `all_reduce` on a numpy array, as the torch path calls it; `in a pass` is what compiled code
sees, which writes its part straight into the room; gloo is `torch.distributed.all_reduce`. Every figure is
the mean of calls in a row, the median over rounds. Ranks are processes, pinned to nothing.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from services.worker.collective.native import SPIN_US, NativeCollective, make_memory
from tests.bench.common import Report, announce, options
from tests.support.collective_groups import mesh

MODULE = "tests.bench.collectives"
SIZES = (2304, 18_432, 147_456, 1_179_648, 4_718_592)
NEEDED = {2304: 20.0, 1_179_648: 3.0}
"""Bytes → how many times faster than gloo two ranks must be."""
MOST_FLOATS = 1 << 21


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON and write no file")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(json.loads(args.rank))
        return 0
    command = "" if args.json else announce(args, MODULE)
    measured = {size: on_processes(size, args.rounds) for size in args.ranks}
    if args.json:
        print(json.dumps(measured))
        return 0
    return report_of(measured, command, args.seed).publish(args.out, draw(measured))


def on_processes(size: int, rounds: int) -> list[dict[str, Any]]:
    """What rank 0 measured: of each size seconds by way."""
    memory, peers = make_memory(size, MOST_FLOATS), mesh(size, socket.socketpair)
    with tempfile.TemporaryDirectory(prefix="hortator-bench-") as folder:
        ranks = []
        for rank in range(size):
            sockets = {peer: end.fileno() for peer, end in peers[rank].items()}
            told = {"rank": rank, "size": size, "memory": memory, "peers": sockets, "rounds": rounds}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", MODULE, "--rank", json.dumps(told | {"store": f"{folder}/store"})],
                    stdout=subprocess.PIPE,
                    text=True,
                    pass_fds=[memory, *sockets.values()],
                )
            )
        os.close(memory)
        for ends in peers:
            for end in ends.values():
                end.close()
        said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"{size} ranks: one of them failed")
    result: list[dict[str, Any]] = json.loads(said[0])
    return result


def rank_main(told: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = told["rank"], told["size"]
    peers = {int(peer): socket.socket(fileno=fd) for peer, fd in told["peers"].items()}
    spin_us = SPIN_US if size <= (os.cpu_count() or 1) else 0.0
    end = NativeCollective(rank, size, told["memory"], peers, most_floats=MOST_FLOATS, spin_us=spin_us)
    dist.init_process_group("gloo", init_method=f"file://{told['store']}", rank=rank, world_size=size)
    found = []
    for length in SIZES:
        values = np.zeros(length // 4, np.float32)
        tensor = torch.zeros(length // 4)
        memory, links = (
            fastest(end, length, ("one-shot", "two-shot")),
            fastest(end, length, end.algorithms()[2:]),
        )
        repeats = 40 if length < 100_000 else 10

        def called(algorithm: str, values: np.ndarray = values, repeats: int = repeats) -> float:
            end.set_table([(1 << 40, algorithm)])
            return in_a_row(end, lambda: end.all_reduce(values), repeats)

        def gloo(tensor: Any = tensor, repeats: int = repeats) -> float:
            return in_a_row(end, lambda: dist.all_reduce(tensor), repeats)

        times: dict[str, list[float]] = {"memory": [], "pass": [], "links": [], "gloo": []}
        for _ in range(told["rounds"]):
            times["memory"].append(called(memory))
            times["pass"].append(end.time(memory, values.size, max(1, repeats // 8))[1])
            times["links"].append(called(links))
            times["gloo"].append(gloo())
        found.append(
            {
                "bytes": length,
                "memory by": memory,
                "links by": links,
                "seconds": {way: statistics.median(taken) for way, taken in times.items()},
                "least": {way: min(taken) for way, taken in times.items()},
            }
        )
    end.close()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


def fastest(end: NativeCollective, length: int, algorithms: tuple[str, ...]) -> str:
    """By rank 0's measurement."""
    times = np.array([end.time(algorithm, length // 4, 5)[1] for algorithm in algorithms])
    return algorithms[int(end.gather(times.view(np.uint8))[0].view(np.float64).argmin())]


def in_a_row(end: NativeCollective, call: Callable[[], object], repeats: int) -> float:
    """Seconds of one of `repeats` calls, begun by all ranks together."""
    call()
    end.gather(np.zeros(1, np.uint8))
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started) / repeats


# What came of it.


def report_of(measured: dict[int, list[dict[str, Any]]], command: str, seed: int) -> Report:
    rows, verdicts = [], {}
    for size, found in measured.items():
        for row in found:
            us = {way: seconds * 1e6 for way, seconds in row["seconds"].items()}
            ratio = us["gloo"] / us["memory"]
            by = row["memory by"], row["links by"]
            rows.append(
                (size, row["bytes"], us["memory"], by[0], us["pass"], us["links"], by[1], us["gloo"], ratio)
            )
            if size == 2 and row["bytes"] in NEEDED:
                least = NEEDED[row["bytes"]]
                words = (
                    f"2 ranks, {row['bytes']} bytes: {ratio:.1f} × faster than gloo, at least {least:.0f} ×"
                )
                verdicts[words] = ratio >= least
    columns = ("ranks", "bytes", "called", "by", "in a pass", "sockets", "by", "gloo", "gloo / called")
    title = "Sums over processes of this host: µs, medians"
    return Report(
        "collectives", title, command, seed, columns, rows, {str(k): v for k, v in measured.items()}, verdicts
    )


def draw(measured: dict[int, list[dict[str, Any]]]) -> Any:
    from matplotlib import pyplot

    figure, axes_row = pyplot.subplots(
        1, len(measured), figsize=(5.5 * len(measured), 4), squeeze=False, layout="constrained"
    )
    names = {"gloo": "gloo", "links": "our sockets", "memory": "our memory", "pass": "our memory, in a pass"}
    for axes, (size, found) in zip(axes_row[0], measured.items()):
        for way, name in names.items():
            times = [row["seconds"][way] * 1e6 for row in found]
            axes.loglog([row["bytes"] for row in found], times, "o-", label=name)
        axes.set_xlabel("bytes")
        axes.set_ylabel("µs")
        axes.set_title(f"{size} processes")
        axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
