"""When more ranks do not pay: what two ranks say on a slow link and over shared memory, and if it is true.

Prompts are computed by two ranks with a core each, over a link of limited bandwidth between two network
namespaces and over shared memory; then by one rank alone. What was predicted for one rank from what two were
measured to do is held against what one really takes. Needs root.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from deploy.bench.plots import figure, grouped_bars
from shared.model import resolve
from tests.bench.common import Report, announce, options
from tests.support.netns import pair, unavailable

MODULE = "tests.bench.advice"
PORT = 29_410
STEPS = 10
MOST_OFF = 0.15


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--rate", default="250mbit")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", default="", help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args)
        return 0
    if why := unavailable():
        sys.exit(f"{MODULE}: {why}")
    command = announce(args, MODULE)
    folder = str(resolve(args.model).path)
    found = {args.rate: over_link(folder, args), "shared memory": over_memory(folder, args)}
    return report_of(found, args, command).publish(args.out, draw(found))


def command_of(folder: str, args: argparse.Namespace, rank: int, *where: str) -> list[str]:
    own = ("--tokens", str(args.tokens), "--model", folder, "--dtype", args.dtype)
    return [sys.executable, "-m", MODULE, "--rank", str(rank), *own, *where]


def over_link(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    with pair(args.rate) as spaces:
        addresses = ",".join(space.address for space in spaces)
        return finished(
            [
                subprocess.Popen(
                    space.command(*command_of(folder, args, rank, "--addresses", addresses), core=rank),
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank, space in enumerate(spaces)
            ]
        )


def over_memory(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    from services.worker.collective.native import make_memory

    hidden = json.loads((Path(folder) / "config.json").read_text())["hidden_size"]
    fd = make_memory(2, 4 * args.tokens * hidden)
    ranks = [
        subprocess.Popen(
            ["taskset", "-c", str(rank), *command_of(folder, args, rank, "--memory", str(fd))],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(fd,),
        )
        for rank in range(2)
    ]
    os.close(fd)
    return finished(ranks)


def finished(ranks: "list[subprocess.Popen[str]]") -> dict[str, Any]:
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"{MODULE}: a rank failed")
    found: dict[str, Any] = json.loads(said[0])
    return found


def rank_main(args: argparse.Namespace) -> None:
    from services.worker.collective.native import NativeCollective
    from services.worker.collective.port import LOOPBACK
    from services.worker.parallel.advice import Layer, Scaled, predict
    from tests.bench.tp_rig import Rig, cut, over_sockets

    folder = Path(args.model)
    most = 4 * args.tokens * json.loads((folder / "config.json").read_text())["hidden_size"]
    if args.memory is not None:
        collective = NativeCollective(args.rank, 2, args.memory, None, most)
    else:
        collective = over_sockets(args.rank, args.addresses.split(","), PORT, most)
    rig = Rig(folder, collective, args.dtype, args.tokens)
    tuning = rig.tune(args.tokens)
    one = cut(args.tokens, 1)
    alone = Rig(folder, LOOPBACK, args.dtype, args.tokens) if args.rank == 0 else None
    walls, measured = [], []
    for _ in range(STEPS):
        walls.append(rig.whole(tuning.plan(args.tokens), 1)[0].wall)
        rig.learn(tuning)
        if alone is not None:  # meanwhile the other rank waits for the next step
            measured.append(alone.whole(one, 1)[0].wall)
    collective.close()
    if args.rank:
        return
    recent = tuning.shares.recent["prompt"]
    now = Layer(2, recent.compute_s, recent.communication_s, recent.exposed_s, rig.layers)
    assert tuning.table is not None
    chunks = len(tuning.plan(args.tokens)) - 1
    size = 4 * rig.hidden * args.tokens // chunks
    single = predict(now, 1, Scaled(tuning.table.fits, 2, size), rig.config, recent.undivided_s)
    advice = tuning.advice(recent)
    print(
        json.dumps(
            {
                "two ranks": median(walls[2:]),
                "share": now.share,
                "chunks": chunks,
                "one rank, predicted": single.step_s,
                "one rank, measured": median(measured[1:]),
                "advice": advice.sentence if advice else None,
            }
        )
    )


def report_of(found: dict[str, Any], args: argparse.Namespace, command: str) -> Report:
    rows, verdicts = [], {}
    for where, figures in found.items():
        predicted, measured = figures["one rank, predicted"], figures["one rank, measured"]
        times = (figures["two ranks"], predicted, measured)
        rows.append((where, f"{figures['share']:.0%}", *(f"{value * 1e3:.0f}" for value in times)))
        off = predicted / measured - 1
        verdicts[f"{where}: one rank predicted {off:+.1%} off, at most {MOST_OFF:.0%}"] = abs(off) <= MOST_OFF
        if figures["advice"]:
            print(f"{where}: {figures['advice']}")
    verdicts[f"{args.rate}: advice is given"] = bool(found[args.rate]["advice"])
    verdicts["shared memory: none is"] = not found["shared memory"]["advice"]
    columns = ("between two ranks", "messages of computing", "two ranks ms", "one predicted", "one measured")
    title = f"A prompt of {args.tokens} tokens: what two ranks say of one"
    return Report("advice", title, command, args.seed, columns, rows, found, verdicts)


def draw(found: dict[str, Any]) -> Any:
    made, axes = figure(6.0, 4.2)
    names = ("two ranks", "one rank, predicted", "one rank, measured")
    series = {name: [figures[name] * 1e3 for figures in found.values()] for name in names}
    grouped_bars(axes, list(found), series, "ms a prompt")
    return made


if __name__ == "__main__":
    sys.exit(main())
