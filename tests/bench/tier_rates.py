"""What one connection to the second tier stores and fetches, SHA-256 on both sides included.

`python -m tests.bench.tier_rates [--blocks N] [--bytes B] [--disk]` runs the server in a process of its own
and prints a JSON line for each operation: wall MB/s (the best of three), and CPU time of each side. Blocks
of a round take the places of those of the round before. With `--disk` memory holds an eighth of a round: the
others go to disk and come back.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from services.kvstore.tier.arena import cost
from services.kvstore.tier.server import TierServer
from services.kvstore.tier.store import TierStore
from shared.tier.client import TierClient
from shared.wire import TierOffer

SECRET = "benchmark" * 4
ROUNDS = 3


def serve(pipe: Connection, memory: int, disk: int, folder: str) -> None:
    """Answers every message on the pipe with its CPU seconds, until None comes."""

    async def live() -> None:
        store = TierStore(memory, disk, Path(folder) if disk else None)
        await store.open()
        server = TierServer(store, "127.0.0.1", 0, SECRET)
        await server.start()
        pipe.send(server.port)
        over = asyncio.Event()

        def answer() -> None:
            if pipe.recv() is None:
                over.set()
            else:
                pipe.send(time.process_time())

        asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
        await over.wait()
        await server.close()
        await store.close()

    uvloop.run(live())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=400)
    parser.add_argument(
        "--bytes", type=int, default=368_640, help="of a block; the default model's at float16"
    )
    parser.add_argument("--disk", action="store_true")
    told = parser.parse_args()
    total = told.blocks * cost(told.bytes)
    here, there = multiprocessing.Pipe()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        memory = total // 8 if told.disk else total * 5 // 4
        disk = 2 * ROUNDS * total if told.disk else 0
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(there, memory, disk, folder)
        )
        process.start()
        port = here.recv()
        offer = TierOffer(
            instance="k0",
            host="127.0.0.1",
            port=port,
            secret=SECRET,
            born=1,
            memory_bytes=memory,
            disk_bytes=disk,
        )
        client = TierClient(offer, "m", 0, 1, told.bytes, timeout_s=30.0)
        contents = [os.urandom(told.bytes) for _ in range(8)]
        digests = [sha256(each).digest() for each in contents]
        into = memoryview(bytearray(2 * told.bytes))

        def cpu_there() -> float:
            here.send("")
            seconds: float = here.recv()
            return seconds

        def measure(name: str, work: Callable[[int], int]) -> None:
            best, blocks = float("inf"), ROUNDS * told.blocks
            mine, theirs = time.process_time(), cpu_there()
            for number in range(ROUNDS):
                began = time.perf_counter()
                moved = work(number)
                best = min(best, time.perf_counter() - began)
                assert moved == told.blocks, f"{name}: {moved} of {told.blocks} blocks"
            print(
                json.dumps(
                    {
                        "operation": name,
                        "block_bytes": told.bytes,
                        "mb_s": round(told.blocks * told.bytes / best / 1e6),
                        "ms_a_block": round(best / told.blocks * 1e3, 3),
                        "client_cpu_ms_a_block": round((time.process_time() - mine) / blocks * 1e3, 3),
                        "server_cpu_ms_a_block": round((cpu_there() - theirs) / blocks * 1e3, 3),
                    }
                )
            )

        def names(number: int) -> list[bytes]:
            return [sha256(b"%d %d" % (number, n)).digest() for n in range(told.blocks)]

        def put(number: int) -> int:
            return sum(
                client.put(name, memoryview(contents[n % 8]), digests[n % 8])
                for n, name in enumerate(names(number))
            )

        measure("put", put)
        measure("get", lambda number: sum(1 for _ in client.get(names(ROUNDS - 1), into)))
        measure("get one", lambda number: sum(len(list(client.get([n], into))) for n in names(ROUNDS - 1)))
        client.close()
        here.send(None)
        process.join()


if __name__ == "__main__":
    main()
