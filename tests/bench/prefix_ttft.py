"""Time to first token of a prompt whose 1,500-token prefix is cold, and of one whose prefix is cached."""

import asyncio
import random
from statistics import median
from time import perf_counter

from deploy.bench.client import Target, stream_completion
from deploy.bench.records import Record
from tests.bench.common import Report, announce, draw_rounds, mesh, options

MODULE = "tests.bench.prefix_ttft"
TARGET = 20.0


async def first_token(target: Target, prompt: list[int]) -> tuple[float, int]:
    """(seconds to the first token, prompt tokens found cached by the server's usage)."""
    began = perf_counter()
    record = Record(0.0, len(prompt), 2)
    await stream_completion(target, prompt, record, began, ignore_eos=True, timeout_s=120)
    if record.error:
        raise SystemExit(f"a request failed: {record.error}")
    return record.ttft, record.cached_tokens


async def rounds(
    target: Target, prefix: int, tail: int, count: int, seed: int
) -> list[tuple[float, float, int]]:
    """Per round a new prefix: (cold seconds, cached seconds, tokens cached)."""
    rng = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [rng.randrange(1000, 40000) for _ in range(length)]

    await first_token(target, ids(64))
    measured = []
    for _ in range(count):
        shared = ids(prefix)
        cold, _ = await first_token(target, shared + ids(tail))
        warm, cached = await first_token(target, shared + ids(tail))
        measured.append((cold, warm, cached))
    return measured


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument("--prefix", type=int, default=1500, help="tokens that both prompts of a round share")
    parser.add_argument("--tail", type=int, default=16, help="tokens of its own at each prompt's end")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    command = announce(args, MODULE)
    with mesh() as (_, target):
        measured = asyncio.run(rounds(target, args.prefix, args.tail, args.rounds, args.seed))
    cold, warm = median(row[0] for row in measured), median(row[1] for row in measured)
    ratio = cold / warm
    rows = [
        ("cold", cold * 1e3, min(r[0] for r in measured) * 1e3, max(r[0] for r in measured) * 1e3, 0),
        (
            "cached",
            warm * 1e3,
            min(r[1] for r in measured) * 1e3,
            max(r[1] for r in measured) * 1e3,
            measured[0][2],
        ),
    ]
    report = Report(
        "prefix_ttft",
        f"time to first token, prefix of {args.prefix} tokens and {args.tail} more, {args.rounds} rounds",
        command,
        args.seed,
        ("prefix", "median ms", "min ms", "max ms", "tokens cached"),
        rows,
        {"rounds_s": measured},
        {f"cached is 1/{ratio:.1f} of cold, promised 1/{TARGET:.0f}": ratio >= TARGET},
    )
    return report.publish(
        args.out,
        draw_rounds(
            {"cold": [cold for cold, _, _ in measured], "cached": [warm for _, warm, _ in measured]},
            "a new prefix",
        ),
    )


if __name__ == "__main__":
    raise SystemExit(main())
