"""What drawing tokens costs where each rank has the logits of its own part of the vocabulary only.

`before`: ranks tell each other a header, then all their logits, and each draws from the joined rows. `now`:
one message of candidates for all rows (docs/tensor-parallel-coalescing.md). Two ranks on a core each: sharing
memory, and joined by a slow link, which needs root. The logits are those of decode steps behind real text.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from services.worker.collective.native import NativeCollective
from shared.model import resolve
from tests.bench import tp_ranks
from tests.bench.common import DATA, Report, announce, options
from tests.support.netns import pair, unavailable

MODULE = "tests.bench.coalescing"
ROWS = (1, 8, 32)
WAYS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8, top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
}
CONTEXT = 16
"""Tokens of text before the one whose logits are drawn from."""
HEADER = bytes(16)
MOST_FLOATS = 1 << 21


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--rate", default="1gbit", help="of the link, as `tc` writes it")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(json.loads(args.rank))
        return 0
    command = announce(args, MODULE)
    folder = str(resolve(args.model).path)
    told = {"model": folder, "dtype": args.dtype, "rounds": args.rounds, "seed": args.seed}
    measured = {"shared memory": tp_ranks.on_host(MODULE, 2, MOST_FLOATS, told)}
    if why := unavailable():
        print(f"the link is left out: {why}")
    else:
        with pair(args.rate) as spaces:
            measured[f"{args.rate} link"] = tp_ranks.on_links(MODULE, spaces, MOST_FLOATS, told)
    return report_of(measured, command, args.seed).publish(args.out, draw(measured))


# One rank.


def rank_main(told: dict[str, Any]) -> None:
    end = tp_ranks.join(told)
    from tests.bench.tp_batches import alike
    from tests.bench.tp_rig import BLOCK, Rig

    room, most = 2 * BLOCK, max(ROWS)
    rig = Rig(Path(told["model"]), end, told["dtype"], most * room)
    ids = text_of(Path(told["model"]), most, CONTEXT + 1, told["seed"])
    rig.decoder.forward(alike(ids[:, :CONTEXT], 0, room))
    found = []
    for rows in ROWS:
        batch = alike(ids[:rows, CONTEXT:], CONTEXT, room)
        step_s = []
        for _ in range(told["rounds"]):
            end.gather(np.zeros(1, np.uint8))
            begun = time.perf_counter()
            logits = rig.decoder.forward(batch)
            step_s.append(time.perf_counter() - begun)
        values = np.ascontiguousarray(logits.numpy())
        for name in WAYS:
            one = measure(rig, values, name, told["rounds"])
            found.append({"rows": rows, "way": name, "step_s": float(np.median(step_s))} | one)
    end.close()
    if end.rank == 0:
        print(json.dumps(found))


def text_of(folder: Path, rows: int, count: int, seed: int) -> np.ndarray:
    """Ids [rows, count] from as many places of a text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode((DATA / "prose.txt").read_text(), add_special_tokens=False).ids
    starts = np.random.default_rng(seed).integers(0, len(ids) - count, rows)
    return np.array([ids[start : start + count] for start in starts], np.int32)


def measure(rig: Any, values: np.ndarray, name: str, rounds: int) -> dict[str, Any]:
    """Both ways of drawing one token for each row of `values` [rows, own], in turns."""
    from services.worker.engine.sampler import SampleRow
    from services.worker.engine.sharded_sampling import ShardedSampler
    from shared.wire import Sampling

    end, kernels, config = rig.collective, rig.decoder.kernels, rig.decoder.config
    first, own = rig.decoder._model.first_id, config.vocab_size
    joined = Joined(end, own, kernels)
    sampler = ShardedSampler(first, own, joined.vocab, end.rank, end.size, end.gather, kernels)
    taken: dict[str, list[float]] = {"before": [], "now": []}
    equal = True
    for number in range(rounds):
        # Another seed each time, so that the uniforms fall anywhere.
        rows = [
            SampleRow(
                Sampling(max_tokens=1, seed=number, **WAYS[name]), i, np.zeros(CONTEXT, np.int32), CONTEXT
            )
            for i in range(len(values))
        ]
        calls: list[tuple[str, Callable[[np.ndarray], np.ndarray]]] = [
            ("before", lambda logits, rows=rows: joined.sample(logits, rows)),
            ("now", lambda logits, rows=rows: sampler.sample(logits, rows, HEADER)[0]),
        ]
        drawn = {}
        for way, call in calls if number % 2 else calls[::-1]:
            logits = values.copy()
            end.gather(np.zeros(1, np.uint8))
            begun = time.perf_counter()
            drawn[way] = call(logits)
            taken[way].append(time.perf_counter() - begun)
        equal &= bool((drawn["before"] == drawn["now"]).all())
    every = end.gather(np.array([taken["before"], taken["now"]]).view(np.uint8).reshape(-1))
    slowest = every.view(np.float64).reshape(end.size, 2, rounds).max(axis=0)
    traffic = sampler.traffic
    return {
        "before": {"messages": 2, "bytes": joined.bytes / rounds, "seconds": float(np.median(slowest[0]))},
        "now": {
            "messages": traffic.messages_now / rounds,
            "bytes": traffic.bytes_now / rounds,
            "seconds": float(np.median(slowest[1])),
        },
        "joined rows": traffic.joined / traffic.rows,
        "tokens": rounds * len(values),
        "equal": equal,
    }


class Joined:
    """Drawing from all ranks' logits, on every rank."""

    def __init__(self, end: NativeCollective, own: int, kernels: Any) -> None:
        self._end, self._kernels = end, kernels
        self._owns = end.gather(np.array([own], np.int64).view(np.uint8)).view(np.int64)[:, 0]
        self.vocab = int(self._owns.sum())
        self.bytes = 0
        """That this rank told the others."""

    def sample(self, logits: np.ndarray, rows: Any) -> np.ndarray:
        import torch

        from services.worker.engine.sampler import sample

        headers = self._end.gather(np.frombuffer(HEADER, np.uint8))
        assert (headers == headers[0]).all()
        mine = logits
        if (widest := int(self._owns.max())) > logits.shape[1]:
            mine = np.zeros((len(logits), widest), np.float32)
            mine[:, : logits.shape[1]] = logits
        every = self._end.gather(mine.view(np.uint8).reshape(-1))
        parts = every.view(np.float32).reshape(len(every), len(logits), widest)
        whole = np.concatenate([part[:, :own] for part, own in zip(parts, self._owns)], axis=1)
        self.bytes += len(HEADER) + mine.nbytes
        return sample(torch.from_numpy(whole), rows, self._kernels.scan, self._kernels.draw)[0]


# What came of it.


def report_of(measured: dict[str, list[dict[str, Any]]], command: str, seed: int) -> Report:
    rows, verdicts = [], {}
    for link, found in measured.items():
        for one in found:
            before, now = one["before"], one["now"]
            ms = before["seconds"] * 1e3, now["seconds"] * 1e3
            traffic = before["messages"], now["messages"], round(before["bytes"]), round(now["bytes"])
            rows.append(
                (f"{link}, {one['way']}", one["rows"], *traffic, *ms, ms[0] / ms[1], one["step_s"] * 1e3)
            )
        tokens = sum(one["tokens"] for one in found)
        verdicts[f"{link}: all of {tokens} tokens as drawn from joined logits"] = all(
            o["equal"] for o in found
        )
        most = max(one["now"]["messages"] for one in found)
        verdicts[f"{link}: {most:.2f} messages a step at most, 2 before"] = most < 2
        least = min(one["before"]["seconds"] / one["now"]["seconds"] for one in found)
        verdicts[f"{link}: at least {least:.2f} × faster, for any number of rows"] = least > 1
    columns = (
        "link, sampling",
        "rows",
        "messages",
        "now",
        "bytes",
        "now",
        "ms",
        "now",
        "×",
        "decode step, ms",
    )
    title = "Messages and time of sampling a step on 2 ranks: all logits joined, and now"
    return Report("coalescing", title, command, seed, columns, rows, measured, verdicts)


def draw(measured: dict[str, list[dict[str, Any]]]) -> Any:
    from matplotlib import pyplot

    figure, axes_row = pyplot.subplots(
        1, len(measured), figsize=(6 * len(measured), 4), squeeze=False, layout="constrained"
    )
    for axes, (link, found) in zip(axes_row[0], measured.items()):
        for colour, name in enumerate(WAYS):
            own = [one for one in found if one["way"] == name]
            for style, way in (("--", "before"), ("-", "now")):
                times = [one[way]["seconds"] * 1e3 for one in own]
                counts = [one["rows"] for one in own]
                axes.plot(counts, times, f"o{style}", color=f"C{colour}", label=f"{name}, {way}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ROWS, map(str, ROWS))
        axes.set_xlabel("rows")
        axes.set_ylabel("ms of sampling and its messages")
        axes.set_title(link)
        axes.legend(frameon=False, fontsize="small")
    return figure


if __name__ == "__main__":
    sys.exit(main())
