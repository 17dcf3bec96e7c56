"""Time to first token of a 1,500-token prefix after its worker was killed: second tier or recomputed.

Each round: a prompt with a new prefix is computed, and waited for until all of its blocks are in the second
tier. The worker is killed with SIGKILL and started again by its supervisor, so nothing of the prompt is left
there. Then the same prompt is asked again, which the second tier serves, and one that nobody has.
"""

import asyncio
import os
import random
import signal
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import orjson

from deploy.bench.client import Target
from tests.bench.common import Report, announce, draw_rounds, mesh, options
from tests.bench.holders import in_tier, wait_for
from tests.support.mesh import Mesh

MODULE = "tests.bench.tier_restart"
TARGET = 4.0
WORKER = "w0"


@dataclass(frozen=True)
class Answer:
    ttft_s: float
    tokens: list[int]
    cached: int


async def ask(target: Target, prompt: list[int], tokens: int) -> Answer:
    """A greedy answer, streamed; times from before the connection is opened."""
    host, _, port = target.url.removeprefix("http://").partition(":")
    body = orjson.dumps(
        {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    began = perf_counter()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    first, ids, cached = 0.0, list[int](), 0
    while line := await reader.readline():
        if line.startswith(b"HTTP/1.1") and b" 200 " not in line:
            raise SystemExit(f"a request failed: {line.decode()}{(await reader.read()).decode()}")
        if not line.startswith(b"data: {"):
            continue
        event = orjson.loads(line[6:])
        if "error" in event:
            raise SystemExit(f"a request failed: {event['error']}")
        for choice in event["choices"]:
            first = first or perf_counter() - began
            ids += choice.get("token_ids") or []
        if usage := event.get("usage"):
            cached = usage["prompt_tokens_details"]["cached_tokens"]
    writer.close()
    return Answer(first, ids, cached)


def kill_worker(running: Mesh, prompt: list[int]) -> float:
    """SIGKILL, and wait until its successor serves and the index knows that it holds nothing. Seconds."""
    before = running.processes()[WORKER]
    began = perf_counter()
    os.kill(before.pid, signal.SIGKILL)
    wait_for(running, prompt, lambda rows, _: WORKER not in rows)
    running.wait_ready()
    after = running.processes()[WORKER]
    assert after != before, "the worker was not started again"
    return perf_counter() - began


@dataclass(frozen=True)
class Round:
    cold: Answer
    """Before the restart: nobody had the prompt."""
    restored: Answer
    recomputed: Answer
    """After the restart, another prompt that nobody had."""
    restart_s: float


def rounds(running: Mesh, target: Target, prefix: int, tail: int, count: int, seed: int) -> list[Round]:
    rng = random.Random(seed)

    def prompt() -> list[int]:
        return [rng.randrange(1000, 40_000) for _ in range(prefix + tail)]

    measured = []
    for number in range(count):
        shared = prompt()
        cold = asyncio.run(ask(target, shared, 16))
        wait_for(running, shared, lambda rows, blocks: 0 < blocks <= in_tier(rows))
        took = kill_worker(running, shared)
        # The second tier is found again, and what fetching costs is known, before the clock runs.
        asyncio.run(ask(target, prompt()[:64], 2))
        restored = asyncio.run(ask(target, shared, 16))
        recomputed = asyncio.run(ask(target, prompt(), 16))
        print(
            f"round {number + 1}: cold {cold.ttft_s:.2f} s, restarted in {took:.1f} s, restored "
            f"{restored.ttft_s:.2f} s ({restored.cached} tokens), recomputed {recomputed.ttft_s:.2f} s",
            flush=True,
        )
        measured.append(Round(cold, restored, recomputed, took))
    return measured


def main() -> int:
    parser = options(__doc__ or "", MODULE)
    parser.add_argument(
        "--prefix", type=int, default=1500, help="tokens of the prompt that blocks are kept of"
    )
    parser.add_argument("--tail", type=int, default=16, help="further tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16")
    args = parser.parse_args()
    command = announce(args, MODULE)
    with mesh("--dtype", args.dtype, "--tier-memory", "512MiB") as (running, target):
        measured = rounds(running, target, args.prefix, args.tail, args.rounds, args.seed)
    rows = []
    for name in ("cold", "recomputed", "restored"):
        answers: list[Answer] = [getattr(one, name) for one in measured]
        times = [answer.ttft_s * 1e3 for answer in answers]
        rows.append((name, median(times), min(times), max(times), min(answer.cached for answer in answers)))
    ratio = median(one.recomputed.ttft_s / one.restored.ttft_s for one in measured)
    same = all(one.restored.tokens == one.cold.tokens for one in measured)
    report = Report(
        "tier_restart",
        f"time to first token after a worker was killed, {args.prefix} tokens and {args.tail} more",
        command,
        args.seed,
        ("prompt", "median ms", "min ms", "max ms", "tokens cached, least"),
        rows,
        {
            "rounds": [
                {
                    "cold_s": one.cold.ttft_s,
                    "restored_s": one.restored.ttft_s,
                    "recomputed_s": one.recomputed.ttft_s,
                    "restored_tokens_cached": one.restored.cached,
                    "restart_s": one.restart_s,
                }
                for one in measured
            ]
        },
        {
            f"from the second tier in 1/{ratio:.1f} of recomputing, promised 1/{TARGET:.0f}": ratio >= TARGET,
            "the same tokens as before the restart": same,
        },
    )
    return report.publish(
        args.out,
        draw_rounds(
            {n: [getattr(one, n).ttft_s for one in measured] for n in ("cold", "recomputed", "restored")},
            "a new prefix and a killed worker",
        ),
    )


if __name__ == "__main__":
    raise SystemExit(main())
