"""The ledger of the default model: predicted before start against what the system says of the process.

Each rank is a process of its own, at three sizes of KV memory and in three formats of weights, and one of
them computes the widest step for real. Takes about a minute on a quiet machine.
"""

from typing import Any

from deploy.bench.plots import COLOURS, figure
from services.worker.memory.ledger import CLASSES, word
from tests.bench.common import MODEL, Report, announce, options
from tests.support.weighed import weighed

MODULE = "tests.bench.ledger"
MIB = 1 << 20
WITHIN = 0.03
CASES = (
    ("float16", "float16", 128, False),
    ("float16", "float16", 512, True),
    ("float16", "float16", 2048, False),
    ("float32", "float32", 512, False),
    ("int8-dynamic", "float16", 512, False),
)
"""(`--dtype`, `--kv-dtype`, KV in MiB, whether the widest step is computed)."""
TOLD = ("weights_bytes", "kv_bytes", "activation_bytes", "total_bytes")


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    command = announce(args, MODULE)
    found = []
    for dtype, kv_dtype, kv, real in CASES:
        print(f"{dtype}, KV {kv_dtype} {kv} MiB …", flush=True)
        of = {"dtype": dtype, "kv_dtype": kv_dtype, "threads": args.threads, "block_tokens": 0}
        found.append(weighed(args.model, kv * MIB, real=real, **of))
    return report(found, args.model, args.seed, command).publish(args.out, draw(found))


def off(told: dict[str, Any], name: str) -> float:
    measured: int = told["measured"][name]
    return measured / told["predicted"][name] - 1


def report(found: list[dict[str, Any]], model: str, seed: int, command: str) -> Report:
    worst = {name: max((off(told, name) for told in found), key=abs) for name in TOLD}
    verdicts = {
        f"{word(name)}: measured {share:+.1%} against predicted at the worst, at most {WITHIN:.0%}": abs(
            share
        )
        <= WITHIN
        for name, share in worst.items()
    }
    for told in found:
        if "real_total_bytes" in told:
            more = told["real_total_bytes"] / told["measured"]["total_bytes"] - 1
            verdicts[f"the widest step really takes {more:+.1%} of what the account says, at most 3%"] = (
                more <= WITHIN
            )
    rows = [
        (
            f"{dtype}, KV {kv} MiB",
            *(f"{told['measured'][name] / MIB:.1f} ({off(told, name):+.1%})" for name in TOLD),
            f"{told['measured']['runtime_bytes'] / MIB:.1f}",
            f"{told['start_s']:.2f}",
        )
        for (dtype, _, kv, _), told in zip(CASES, found, strict=True)
    ]
    return Report(
        name="ledger",
        title=f"Ledger of {model}: MiB measured, and how far from predicted",
        command=command,
        seed=seed,
        columns=("", *map(word, TOLD), "runtime", "taking account, s"),
        rows=rows,
        details={"ranks": found},
        verdicts=verdicts,
    )


def draw(found: list[dict[str, Any]]) -> Any:
    plot, axes = figure()
    for place, told in enumerate(found):
        for side, kind in ((-0.2, "predicted"), (0.2, "measured")):
            bottom = 0.0
            for number, name in enumerate(CLASSES):
                height = told[kind][name] / MIB
                label = word(name) if place == 0 and kind == "measured" else None
                colour = COLOURS[number % len(COLOURS)]
                axes.bar(place + side, height, 0.35, bottom, color=colour, label=label)
                bottom += height
    axes.set_xticks(range(len(CASES)), [f"{dtype}\nKV {kv} MiB" for dtype, _, kv, _ in CASES], fontsize=8)
    axes.set_ylabel("MiB: predicted left, measured right")
    axes.legend(frameon=False)
    return plot


if __name__ == "__main__":
    raise SystemExit(main())
