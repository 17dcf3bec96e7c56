"""What drawing tokens costs where each rank has the logits of its own part of the vocabulary only.

`before`: ranks tell each other a header, then all their logits, and each draws from the joined rows. `now`:
one message of candidates for all rows, and more only where these do not prove a draw
(docs/tensor-parallel-coalescing.md). Two ranks on a core each: sharing memory, and joined by a slow link,
which needs root. The logits are those of replies that the model writes to chats, and those that it has of
tests/data/prose.txt, where it is less sure; other rows in each round.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from services.worker.collective.native import NativeCollective
from shared.model import resolve
from tests.bench import tp_ranks
from tests.bench.common import DATA, Report, announce, options
from tests.support.netns import pair, unavailable

if TYPE_CHECKING:
    from services.worker.engine.sharded_sampling import ShardedSampler

MODULE = "tests.bench.coalescing"
ROWS = (1, 8, 32)
GREEDY: dict[str, Any] = {"temperature": 0.0}
WARM: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("replies", GREEDY),
    "temperature 0.8, top-p 0.9": ("replies", WARM),
    "the same, as in prose": ("prose", WARM),
}
"""Name → whose logits, and how tokens are drawn from them."""
STEPS, ROOM = 16, 64
"""Tokens of each reply whose logits are kept, and the most of prompt and reply."""
PROSE, CONTEXT = 384, 64
"""Tokens of the text, of which so many only serve as context."""
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
    from tests.bench.tp_rig import Rig

    rig = Rig(Path(told["model"]), end, told["dtype"], max(ROWS) * ROOM)
    logits = {"prose": prose(rig, Path(told["model"])), "replies": replies(rig, told["seed"])}
    found = []
    for rows in ROWS:
        step = alike(np.full((rows, 1), 504, np.int32), ROOM - 1, ROOM)
        step_s = time_of(rig, step, told["rounds"])
        for name, (source, _) in WAYS.items():
            one = measure(rig, logits[source], rows, name, told)
            found.append({"rows": rows, "way": name, "step_s": step_s} | one)
    end.close()
    if end.rank == 0:
        print(json.dumps(found))


def prose(rig: Any, folder: Path) -> np.ndarray:
    """This rank's logits [tokens, own] behind each token of a text."""
    from tests.bench.tp_batches import alike

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = (DATA / "prose.txt").read_text()
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids[:PROSE], np.int32)
    batch = replace(alike(ids[None], 0, PROSE), logit_tokens=np.arange(CONTEXT, PROSE, dtype=np.int32))
    logits: np.ndarray = rig.decoder.forward(batch).numpy().copy()
    return logits


def replies(rig: Any, seed: int) -> np.ndarray:
    """This rank's logits [tokens, own] of decode steps in which the model writes replies."""
    from services.worker.engine.sampler import SampleRow
    from shared.wire import Sampling
    from tests.bench.tp_batches import alike

    sampler, _ = samplers(rig)
    chats = [np.array(one["ids"], np.int32) for one in json.loads((DATA / "golden.json").read_text())[:4]]
    rows, most = np.arange(max(ROWS), dtype=np.int32), max(ROWS)
    chat_of = rows * len(chats) // most
    values = np.empty((most, rig.decoder.config.vocab_size), np.float32)
    for number, chat in enumerate(chats):
        own = rows[chat_of == number]
        values[own] = rig.decoder.forward(alike(np.tile(chat, (len(own), 1)), 0, ROOM, own)).numpy()
    starts = np.array([len(chats[number]) for number in chat_of], np.int32)
    kept = []
    for step in range(STEPS):
        kept.append(values.copy())
        drawn = [
            SampleRow(Sampling(max_tokens=STEPS, seed=seed, **WARM), row, np.zeros(step, np.int32), 0)
            for row in rows.tolist()
        ]
        tokens, _ = sampler.sample(values, drawn, HEADER)
        values = rig.decoder.forward(alike(tokens[:, None], starts + np.int32(step), ROOM)).numpy()
    return np.concatenate(kept)


def samplers(rig: Any) -> "tuple[ShardedSampler, Joined]":
    from services.worker.engine.sharded_sampling import ShardedSampler

    end, kernels, own = rig.collective, rig.decoder.kernels, rig.decoder.config.vocab_size
    joined = Joined(end, own, kernels)
    first = rig.decoder._model.first_id
    return ShardedSampler(first, own, joined.vocab, end.rank, end.size, end.gather, kernels), joined


def time_of(rig: Any, batch: Any, rounds: int) -> float:
    """Seconds of a pass on this rank, the median."""
    taken = []
    for _ in range(rounds):
        rig.barrier()
        begun = time.perf_counter()
        rig.decoder.forward(batch)
        taken.append(time.perf_counter() - begun)
    return median(taken)


def measure(rig: Any, logits: np.ndarray, count: int, name: str, told: dict[str, Any]) -> dict[str, Any]:
    """Both ways of drawing a token for each of `count` rows of `logits` [tokens, own], in turns."""
    from services.worker.engine.sampler import SampleRow
    from shared.wire import Sampling

    end, (sampler, joined) = rig.collective, samplers(rig)
    taken: dict[str, list[float]] = {"before": [], "now": []}
    equal, rounds = True, told["rounds"]
    rng = np.random.default_rng(told["seed"])  # alike on all ranks
    history = np.zeros(0, np.int32)
    for number in range(rounds):
        which = rng.choice(len(logits), count, replace=False)
        sampling = Sampling(max_tokens=1, seed=int(rng.integers(1 << 62)), **WAYS[name][1])
        rows = [SampleRow(sampling, choice, history, 0) for choice in range(count)]
        calls: list[tuple[str, Callable[[np.ndarray], np.ndarray]]] = [
            ("before", partial(joined.sample, rows=rows)),
            ("now", partial(now, sampler, rows)),
        ]
        drawn = {}
        for way, call in calls if number % 2 else calls[::-1]:
            values = logits[which]
            rig.barrier()
            begun = time.perf_counter()
            drawn[way] = call(values)
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
        "least": dict(zip(("before", "now"), slowest.min(axis=1).tolist())),
        "joined rows": traffic.joined / traffic.rows,
        "tokens": rounds * count,
        "equal": equal,
    }


def now(sampler: "ShardedSampler", rows: Any, logits: np.ndarray) -> np.ndarray:
    return sampler.sample(logits, rows, HEADER)[0]


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
            what = f"{link}, {one['way']}", one["rows"]
            rows.append((*what, *traffic, *ms, ms[0] / ms[1], one["joined rows"], one["step_s"] * 1e3))
        tokens = sum(one["tokens"] for one in found)
        verdicts[f"{link}: all of {tokens} tokens as drawn from joined logits"] = all(
            o["equal"] for o in found
        )
        for name in WAYS:
            own = [one for one in found if one["way"] == name]
            most = max(one["now"]["messages"] for one in own)
            words = (
                f"{link}, {name}: at most {most:.2f} messages a step, {own[0]['before']['messages']} before"
            )
            if WAYS[name][0] == "replies":  # rows of which nothing is proved are joined, which takes two more
                verdicts[words] = most < own[0]["before"]["messages"]
            gains = [one["before"]["seconds"] / one["now"]["seconds"] for one in own]
            told = ", ".join(f"{gain:.2f} × with {one['rows']}" for gain, one in zip(gains, own))
            verdicts[f"{link}, {name}: faster by {told} rows, with any number"] = min(gains) > 1
    columns = (
        *("link, sampling", "rows", "messages", "now", "bytes", "now", "ms", "now", "×", "rows joined"),
        "decode step, ms",
    )
    title = "Messages and time of sampling a step on 2 ranks, means and medians: all logits joined, and now"
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
