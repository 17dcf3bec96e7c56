"""What somebody wrote into the prefix index by hand costs a recompute, never a wrong token or an error.

Two instances of the real model at float32 and a second tier. Every lie gets a cache salt of its own, so that
nothing of the prompt is cached anywhere when it is told, and has to give the tokens of a request that nobody
lied about.
"""

import asyncio
import json
import random
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgpack
import pytest
import redis.asyncio

from deploy.rundir import RunDir
from shared.blocks import chain, root_hash
from shared.store import keys
from shared.store.index_table import decode_table
from shared.store.port import MAX_NUMBERS
from shared.store.records import decode_record
from shared.store.redis import RedisStore
from shared.subjects import TIER
from tests.support.mesh import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.model, pytest.mark.timeout(600)]

MODEL = "smollm2-135m-instruct"
GOLDEN = next(
    case
    for case in json.loads((Path(__file__).parents[1] / "data/golden.json").read_text())
    if len(case["ids"]) == 40
)
PROMPT = [random.Random(5).randrange(1000, 40000) for _ in range(300)]
TOKENS = 12


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    flags = ("--instances", "2", "--threads", "1", "--dtype", "float32", "--kv-memory", "128MiB")
    # A table that was overwritten is noticed when a sweep begins.
    flags += ("--tier-memory", "128MiB", "--set", "kvstore.sweep_every_s=1")
    with Mesh.start(tmp_path_factory.mktemp("mesh"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def reference(mesh: Mesh) -> list[int]:
    """What the model says to `PROMPT` when nobody lies."""
    return answer(mesh, PROMPT, "reference")[0]


def answer(mesh: Mesh, prompt: list[int], salt: str, tokens: int = TOKENS) -> tuple[list[int], int]:
    """Greedy tokens, and how many of the prompt's were found cached. Fails for anything but status 200."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
    request = urllib.request.Request(
        f"{mesh.base_url}/v1/completions",
        json.dumps({**body, "return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        whole = json.load(response)
    return whole["choices"][0]["token_ids"], whole["usage"]["prompt_tokens_details"]["cached_tokens"]


@dataclass
class Forger:
    """Somebody with kvstore's password for Redis. `blocks` are the keys of the prompt that will be asked."""

    redis: Any
    blocks: list[bytes]
    numbers: dict[str, int]
    """Of every row, instances and second tier."""

    async def claim(self, *names: str) -> None:
        """These hold every block of the prompt."""
        for block in self.blocks:
            for name in names:
                await self.redis.setbit(block, self.numbers[name], 1)
            await self.redis.expire(block, 60)


async def everybody_holds_everything(forger: Forger) -> None:
    await forger.claim(*forger.numbers)


async def one_instance_holds_everything(forger: Forger) -> None:
    await forger.claim("w1")


async def only_the_second_tier_holds_everything(forger: Forger) -> None:
    await forger.claim(*(name for name in forger.numbers if name.startswith(TIER)))


async def the_second_tier_holds_the_later_half(forger: Forger) -> None:
    forger.blocks = forger.blocks[len(forger.blocks) // 2 :]
    await forger.claim(*forger.numbers)


async def numbers_nobody_has(forger: Forger) -> None:
    for block in forger.blocks:
        for number in (MAX_NUMBERS - 1, 100_000):
            await forger.redis.setbit(block, number, 1)


async def bitmaps_are_garbage(forger: Forger) -> None:
    rng = random.Random(1)
    for block in forger.blocks:
        await forger.redis.set(block, rng.randbytes(rng.randrange(700)))


async def bitmaps_are_no_strings(forger: Forger) -> None:
    for block in forger.blocks:
        await forger.redis.sadd(block, "w0", "w1")


async def the_table_names_instances_and_tiers_there_are_not(forger: Forger) -> None:
    names = ["ghost", "w 1\n", "", f"{TIER}ghost-00000000", f"{TIER}", "w0"]
    table = [0, {name: [number, 1] for number, name in enumerate(names)}, []]
    await forger.redis.set(keys.index(MODEL), msgpack.packb(table))
    forger.numbers = dict(zip(names, range(len(names)), strict=True))
    await forger.claim(*names)


async def the_table_is_garbage(forger: Forger) -> None:
    await forger.claim("w0")
    await forger.redis.set(keys.index(MODEL), b"\x93\x00\x81\xa2w0\x92\xcf" + b"\xff" * 9)


async def the_table_is_no_string(forger: Forger) -> None:
    await forger.redis.delete(keys.index(MODEL))
    await forger.redis.lpush(keys.index(MODEL), "w0")


LIES: list[Callable[[Forger], Awaitable[None]]] = [
    everybody_holds_everything,
    one_instance_holds_everything,
    only_the_second_tier_holds_everything,
    the_second_tier_holds_the_later_half,
    numbers_nobody_has,
    bitmaps_are_garbage,
    bitmaps_are_no_strings,
    the_table_names_instances_and_tiers_there_are_not,
    the_table_is_garbage,
    the_table_is_no_string,
]


def redis_url(mesh: Mesh) -> str:
    run = RunDir(mesh.run_dir)
    state, credentials = run.read_state(), run.read_credentials()
    assert state
    assert credentials
    return f"redis://kvstore:{quote(credentials['redis']['kvstore'])}@127.0.0.1:{state['redis_port']}/0"


async def lie(mesh: Mesh, prompt: list[int], salt: str, tell: Callable[[Forger], Awaitable[None]]) -> None:
    store = RedisStore(redis_url(mesh))
    client = redis.asyncio.Redis.from_url(redis_url(mesh))
    try:
        # A lie told before may have cost rows; they are begun anew.
        async with asyncio.timeout(20):
            while not {"w0", "w1"} <= (await store.index_rows(MODEL)).keys():
                await asyncio.sleep(0.05)
        info = decode_record((await store.list_instances(MODEL))["w0"]).info  # type: ignore[union-attr]
        # The nameless tenant's salt, as the gateway makes it.
        root = root_hash(info.fingerprint, info.block_tokens, f"\0{salt}")
        hashes = chain(root, prompt, info.block_tokens)
        assert hashes
        assert await store.longest_prefix(MODEL, hashes) == {}
        blocks = [keys.block_prefix(MODEL) + block[: keys.HASH_BYTES] for block in hashes]
        table = decode_table(await client.get(keys.index(MODEL)))
        await tell(Forger(client, blocks, {name: number for number, name in table.owners().items()}))
    finally:
        await client.aclose()
        await store.close()


@pytest.mark.parametrize("tell", LIES, ids=lambda tell: tell.__name__)
def test_a_lie_in_the_index_changes_no_token_and_fails_no_request(
    mesh: Mesh, reference: list[int], tell: Callable[[Forger], Awaitable[None]]
) -> None:
    began = time.monotonic()
    asyncio.run(lie(mesh, PROMPT, tell.__name__, tell))
    assert answer(mesh, PROMPT, tell.__name__) == (reference, 0)
    # Nor does it make anybody wait for what is not there.
    assert time.monotonic() - began < 30
    assert answer(mesh, PROMPT, tell.__name__)[0] == reference


def test_golden_tokens_come_out_where_everybody_is_said_to_hold_the_prompt(mesh: Mesh) -> None:
    asyncio.run(lie(mesh, GOLDEN["ids"], "golden", everybody_holds_everything))
    tokens = GOLDEN["golden"]
    assert answer(mesh, GOLDEN["ids"], "golden", len(tokens)) == (tokens, 0)


def test_the_index_is_true_again_after_all_that(mesh: Mesh, reference: list[int]) -> None:
    assert answer(mesh, PROMPT, "honest") == (reference, 0)

    async def look() -> dict[str, int]:
        store = RedisStore(redis_url(mesh))
        info = decode_record((await store.list_instances(MODEL))["w0"]).info  # type: ignore[union-attr]
        hashes = chain(root_hash(info.fingerprint, info.block_tokens, "\0honest"), PROMPT, info.block_tokens)
        try:
            async with asyncio.timeout(20):
                while set(found := await store.longest_prefix(MODEL, hashes)).isdisjoint({"w0", "w1"}):
                    await asyncio.sleep(0.05)
            return found
        finally:
            await store.close()

    assert max(asyncio.run(look()).values()) >= 1
    assert all(row["state"] == "up" and row["restarts"] == 0 for row in mesh.status()["services"])
