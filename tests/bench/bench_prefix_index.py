"""How long a scheduler waits for one prefix lookup on a real Valkey or Redis: 10, 100 and 1,000 blocks, 100
instances, at rest and while the index is written to.

`python tests/bench/bench_prefix_index.py [--lookups N]` prints one JSON line for each, with the commands,
bytes and time that the server itself counted, and ends with status 1 where p99 of 1,000 blocks at rest is
above 2 ms; measure on an idle machine. Instances hold random prefixes of the chain, so that 90 of the 1,000
bitmaps differ from the one before. The writer is a process of its own, as kvstore is: what 100 instances at
1,000 tokens/s each store and hand out again, 6,400 blocks a second each.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))

from shared.store.redis import RedisStore
from tests.support.servers import redis_server

BLOCKS, INSTANCES, SEED = (10, 100, 1000), 100, 1
TARGET_MS = 2.0
EVENT_BLOCKS, EVENTS_PER_S = 64, 100


def chain_of(blocks: int) -> list[bytes]:
    return [hashlib.sha256(str(i).encode()).digest() for i in range(blocks)]


async def fill(store: RedisStore) -> None:
    rng = random.Random(SEED)
    chain = chain_of(max(BLOCKS))
    for number in range(INSTANCES):
        row = await store.index_begin("m", f"w{number}", 1)
        held = len(chain) if number % 10 == 0 else rng.randint(1, len(chain))
        await store.index_add("m", row, chain[:held])


async def write(url: str) -> None:
    """Events of one more instance after the other, for ever."""
    rng = random.Random(SEED + 1)
    store = RedisStore(url)
    row = await store.index_begin("m", "writer", 1)
    last: list[bytes] = []
    print("writing", flush=True)
    due = time.monotonic()
    while True:
        fresh = [rng.randbytes(32) for _ in range(EVENT_BLOCKS)]
        await store.index_add("m", row, fresh)
        await store.index_remove("m", row, last)
        last, due = fresh, due + 1 / EVENTS_PER_S
        await asyncio.sleep(max(0.0, due - time.monotonic()))


@contextmanager
def writer(url: str) -> Iterator[None]:
    command = [sys.executable, __file__, "--write", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.terminate()


async def measure(store: RedisStore, blocks: int, lookups: int) -> dict[str, Any]:
    chain = chain_of(blocks)
    found = await store.longest_prefix("m", chain)
    waits, pings = [], []
    for _ in range(lookups):
        started = time.perf_counter()
        await store.ping()
        between = time.perf_counter()
        await store.longest_prefix("m", chain)
        pings.append(between - started)
        waits.append(time.perf_counter() - between)
    quantiles = statistics.quantiles(waits, n=100)
    # Nothing but lookups, for what the server counts.
    server = store._client
    await server.config_resetstat()
    cpu = time.process_time()
    for _ in range(100):
        await store.longest_prefix("m", chain)
    cpu = time.process_time() - cpu
    commands, traffic = await server.info("commandstats"), await server.info("stats")
    mget = commands["cmdstat_mget"]
    return {
        "blocks": blocks,
        "instances": len(found),
        "lookups": lookups,
        "p50_ms": round(quantiles[49] * 1e3, 3),
        "p99_ms": round(quantiles[98] * 1e3, 3),
        "round_trips": mget["calls"] / 100,
        "request_bytes": round(traffic["total_net_input_bytes"] / 100),
        "reply_bytes": round(traffic["total_net_output_bytes"] / 100),
        "server_ms": round(mget["usec_per_call"] / 1e3, 3),
        "client_cpu_ms": round(cpu / 100 * 1e3, 3),
        "ping_p50_ms": round(statistics.median(pings) * 1e3, 3),
        "ping_p99_ms": round(statistics.quantiles(pings, n=100)[98] * 1e3, 3),
        "load": round(os.getloadavg()[0], 1),
    }


async def run(lookups: int) -> int:
    slowest = 0.0
    with redis_server() as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        store = RedisStore(url)
        await fill(store)
        for blocks in BLOCKS:
            at_rest = await measure(store, blocks, lookups)
            print(json.dumps({"writes": False, **at_rest}), flush=True)
            slowest = at_rest["p99_ms"]
        with writer(url):
            for blocks in BLOCKS:
                # Its bytes are counted as well, so they are left out.
                busy = await measure(store, blocks, lookups)
                print(json.dumps({"writes": True, **busy, "request_bytes": None, "reply_bytes": None}))
        await store.close()
    print(f"{'ok  ' if slowest <= TARGET_MS else 'MISS'} p99 {slowest} ms, promised {TARGET_MS:g} ms")
    return 0 if slowest <= TARGET_MS else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lookups", type=int, default=2000)
    parser.add_argument("--write", metavar="URL", help="be the writer on this server until ended")
    args = parser.parse_args()
    return uvloop.run(write(args.write) if args.write else run(args.lookups)) or 0


if __name__ == "__main__":
    raise SystemExit(main())
