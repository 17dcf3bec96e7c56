"""Who holds a prompt's blocks, as the prefix index of a running mesh tells a scheduler."""

import asyncio
import time
from collections.abc import Callable, Sequence
from urllib.parse import quote

from deploy.rundir import RunDir
from shared.blocks import chain, root_hash
from shared.store.records import decode_record
from shared.store.redis import RedisStore
from shared.subjects import TIER
from tests.bench.common import MODEL
from tests.support.mesh import Mesh


def holders(running: Mesh, prompt: Sequence[int], salt: str = "") -> tuple[dict[str, int], int]:
    """Leading blocks of the prompt in each row of the index, instances and tiers; and its full blocks in all.

    `salt`: as it stands in a `Submit`. Before any instance has told of itself there are no rows.
    """

    async def ask() -> tuple[dict[str, int], int]:
        store = RedisStore(_redis_url(running))
        try:
            for raw in (await store.list_instances(MODEL)).values():
                if (record := decode_record(raw)) is not None:
                    info = record.info
                    root = root_hash(info.fingerprint, info.block_tokens, salt)
                    hashes = chain(root, prompt, info.block_tokens)
                    return await store.longest_prefix(MODEL, hashes), len(hashes)
            return {}, 0
        finally:
            await store.close()

    return asyncio.run(ask())


def wait_for(
    running: Mesh, prompt: Sequence[int], right: Callable[[dict[str, int], int], bool], salt: str = ""
) -> None:
    """Until the index says so of the prompt. Raises TimeoutError after 60 s."""
    deadline = time.monotonic() + 60
    while not right(*(last := holders(running, prompt, salt))):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the prefix index still says {last}\n{running.logs()}")
        time.sleep(0.05)


def in_tier(rows: dict[str, int]) -> int:
    """The leading blocks that a second tier has."""
    return max((depth for name, depth in rows.items() if name.startswith(TIER)), default=0)


def _redis_url(running: Mesh) -> str:
    run = RunDir(running.run_dir)
    state, credentials = run.read_state(), run.read_credentials()
    if state is None or credentials is None:
        raise RuntimeError(f"no mesh runs in {running.run_dir}")
    return f"redis://kvstore:{quote(credentials['redis']['kvstore'])}@127.0.0.1:{state['redis_port']}/0"
