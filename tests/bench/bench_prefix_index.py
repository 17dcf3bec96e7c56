"""How long a scheduler waits for one prefix lookup: 1,000 blocks, 100 instances, on a real Valkey or Redis.

`python tests/bench/bench_prefix_index.py [--lookups N]` prints one JSON line; the bar is
p99 ≤ 2 ms on an idle machine.
Instances hold random prefixes of the chain, so that 90 of the 1,000 bitmaps differ from the one before.
"""

import argparse
import hashlib
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))

from shared.store.redis import RedisStore
from tests.support.servers import redis_server

BLOCKS, INSTANCES, SEED = 1000, 100, 1


async def measure(lookups: int) -> dict[str, object]:
    rng = random.Random(SEED)
    chain = [hashlib.sha256(str(i).encode()).digest() for i in range(BLOCKS)]
    with redis_server() as server:
        store = RedisStore(f"redis://127.0.0.1:{server.port}/0")
        for number in range(INSTANCES):
            row = await store.index_begin("m", f"w{number}", 1)
            held = BLOCKS if number % 10 == 0 else rng.randint(1, BLOCKS)
            await store.index_add("m", row, chain[:held])
        waits, pings = [], []
        for _ in range(lookups):
            started = time.perf_counter()
            await store.ping()
            between = time.perf_counter()
            found = await store.longest_prefix("m", chain)
            pings.append(between - started)
            waits.append(time.perf_counter() - between)
        cpu = time.process_time()
        for _ in range(200):
            await store.longest_prefix("m", chain)
        cpu = (time.process_time() - cpu) / 200
        await store.close()
    assert len(found) == INSTANCES
    quantiles = statistics.quantiles(waits, n=100)
    return {
        "blocks": BLOCKS,
        "instances": INSTANCES,
        "lookups": lookups,
        "p50_ms": round(quantiles[49] * 1e3, 3),
        "p99_ms": round(quantiles[98] * 1e3, 3),
        "client_cpu_ms": round(cpu * 1e3, 3),
        "ping_p50_ms": round(statistics.median(pings) * 1e3, 3),
        "ping_p99_ms": round(statistics.quantiles(pings, n=100)[98] * 1e3, 3),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lookups", type=int, default=2000)
    print(json.dumps(uvloop.run(measure(parser.parse_args().lookups))))


if __name__ == "__main__":
    main()
