"""What formats of weights and KV cost in accuracy, against float32: greedy tokens and perplexity.

Both are fed a given text, so that one difference does not become many. Perplexity is that of
`tests/data/prose.txt`. Agreement, of the default model: the share of `tests/data/golden.json` whose tokens
are still the likeliest ones; of another model: the share of the prose's positions at which the likeliest
token is that of float32. Takes one to two minutes for the default model.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deploy.bench.plots import COLOURS, figure
from services.worker.engine.executor import EngineOptions, TorchExecutor
from shared.model import resolve
from tests.bench.common import DATA, MODEL, Report, announce, options
from tests.unit.engine_support import Driver, greedy

MODULE = "tests.bench.accuracy"
FORMATS = (
    ("float32", "float32"),
    ("float16", "float32"),
    ("float16", "float16"),
    ("int8", "float32"),
    ("int8-dynamic", "float32"),
    ("int8-dynamic", "float16"),
)
"""(`--dtype`, `--kv-dtype`); the first is what others are compared with."""
AGREED = 0.95
"""Share of golden tokens that 16-bit formats must give."""
WORSE = 0.02
"""Perplexity an int8 format may add, as a share."""


@dataclass(frozen=True)
class Accuracy:
    agreed: float
    """Share of tokens."""
    perplexity: float
    tops: list[int]
    """The likeliest token at each position of the prose."""


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--kernels", choices=("auto", "native", "torch"), default="auto")
    args = parser.parse_args()
    command = announce(args, MODULE)
    found: dict[tuple[str, str], Accuracy] = {}
    for form in FORMATS:
        found[form] = measure(args, *form, found[FORMATS[0]].tops if found else None)
    return report(found, args, command).publish(args.out, draw(found))


def measure(args: argparse.Namespace, dtype: str, kv_dtype: str, expected: list[int] | None) -> Accuracy:
    """Both measures of one format; `expected` are the tops of the first."""
    print(f"{dtype}, KV {kv_dtype} …", flush=True)
    folder = resolve(args.model).path
    engine = EngineOptions(
        dtype=dtype, kv_dtype=kv_dtype, kernels=args.kernels, kv_bytes=300 << 20, max_len=2048, measure_s=0.0
    )
    executor = TorchExecutor(folder, engine)
    try:
        prose = judged(executor, ids_of_prose(folder), 1)
        tops = [top for top, _, _ in prose]
        if folder == resolve(MODEL).path:
            golden = json.loads((DATA / "golden.json").read_text())
            same = [
                top == chosen
                for case in golden
                for top, chosen, _ in judged(executor, case["ids"] + case["golden"], len(case["ids"]))
            ]
        else:
            same = [top == other for top, other in zip(tops, expected or tops, strict=True)]
    finally:
        executor.close()
    perplexity = math.exp(-sum(logprob for _, _, logprob in prose) / len(prose))
    return Accuracy(sum(same) / len(same), perplexity, tops)


def ids_of_prose(folder: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode((DATA / "prose.txt").read_text(), add_special_tokens=False).ids
    return ids


def judged(executor: TorchExecutor, ids: list[int], first: int) -> list[tuple[int, int, float]]:
    """(likeliest token, token that stands there, its logprob) at each position from `first` on."""
    run = Driver(executor).generate([ids], [greedy(1, prompt_logprobs=1)])[0]
    return [
        (part.top[i][0][0], ids[part.start + i], part.chosen[i])
        for part in run.prompt_logprobs
        for i in range(len(part.chosen))
        if part.start + i >= first
    ]


def report(found: dict[tuple[str, str], Accuracy], args: argparse.Namespace, command: str) -> Report:
    base = found[FORMATS[0]].perplexity
    verdicts = {}
    for (dtype, kv_dtype), accuracy in found.items():
        worse = accuracy.perplexity / base - 1
        name = f"{dtype}, KV {kv_dtype}"
        if dtype == "float16":
            words = f"{name}: {accuracy.agreed:.1%} of tokens agree, at least {AGREED:.0%}"
            verdicts[words] = accuracy.agreed >= AGREED
        elif dtype.startswith("int8"):
            verdicts[f"{name}: perplexity {worse:+.2%}, at most {WORSE:+.0%}"] = worse <= WORSE
    rows = [
        (dtype, kv, f"{a.agreed:.1%}", f"{a.perplexity:.3f}", f"{a.perplexity / base - 1:+.2%}")
        for (dtype, kv), a in found.items()
    ]
    return Report(
        name="accuracy",
        title=f"Accuracy of weight and KV formats, {args.model}",
        command=command,
        seed=args.seed,
        columns=("weights", "KV", "tokens that agree", "perplexity", "against float32"),
        rows=rows,
        details={},
        verdicts=verdicts,
    )


def draw(found: dict[tuple[str, str], Accuracy]) -> Any:
    base = found[FORMATS[0]].perplexity
    plot, axes = figure()
    names = [f"{dtype}\nKV {kv}" for dtype, kv in found]
    axes.bar(names, [100 * (a.perplexity / base - 1) for a in found.values()], color=COLOURS[0])
    axes.axhline(100 * WORSE, color=COLOURS[1], linestyle="--")
    axes.set_ylabel("perplexity above float32, %")
    return plot


if __name__ == "__main__":
    raise SystemExit(main())
