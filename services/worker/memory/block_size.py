"""How many tokens a KV block holds, by what small and large blocks cost (design §6). Pure.

A block is what is shared, copied, fetched and accounted for. Large ones lose memory: half of a sequence's
last block holds nothing, and of a shared prefix the part behind its last whole block is computed and kept
again. Small ones cost work for each block: an entry of the table and of the index, a hash, a request when it
moves, and a jump where attention reads on. Both are expressed as a share of a sequence's KV, so that they can
be added: a sequence has `SEQUENCE_TOKENS`, and work for a block is worth as many bytes as could be moved in
that time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.engine.config import ModelConfig
from services.worker.memory.served import kv_block_bytes
from services.worker.parallel.split import ShardPlan

CANDIDATES = (8, 16, 32, 64, 128)
"""Powers of two: kernels find a token's block by shifting."""
SEQUENCE_TOKENS = 1024
"""Of a typical sequence; conversations of public traces have about that many (tests/data)."""
GRANULE = 4 << 10
"""Bytes that are moved at once: a page of memory, a block of a disk, what devices read from it directly."""
BLOCK_WORK_BYTES = 24 << 10
"""What is done for each block, as KV that a core could read in that time: hashes, tables and free lists were
measured to take 5 µs (tests/bench/block_size.py), and it reads 5 GB/s."""
RUN_BYTES = 64
"""The jump from one block to the next, as KV of a head that could be read in that time: a cache line. As
measured: decoding at 1,024 tokens is 4 % slower with blocks of 16 tokens than with 128, 2 % with 32."""
READ_TOGETHER, COPIED = 16, 0.2
"""Native kernels read so many tokens at once. Of smaller blocks they copy them together first, which takes
this share of a step more; measured with 8."""


@dataclass(frozen=True)
class BlockCosts:
    """Blocks of one size, and what they cost."""

    block_tokens: int
    block_bytes: int
    """On one rank."""
    table_entries: int
    """Blocks of the longest sequence that is served."""
    lost_share: float
    """Of a sequence's KV: half its last block, and half a block behind the prefix that it shares."""
    work_share: float
    """Of the time to move a sequence's KV: what is done for each of its blocks."""
    whole_granules: bool
    """A block is a multiple of what the device moves at once."""

    @property
    def cost(self) -> float:
        return self.lost_share + self.work_share


@dataclass(frozen=True)
class BlockChoice:
    """The size that costs least, and all that were looked at."""

    chosen: BlockCosts
    table: tuple[BlockCosts, ...]
    asked: bool = False
    """It was not chosen here but asked for."""

    def describe(self) -> str:
        """One line for people, with both costs."""
        c = self.chosen
        return (
            f"{c.block_tokens} tokens, {c.block_bytes:,} bytes{' as asked' * self.asked}: {c.lost_share:.1%} "
            f"of a sequence's KV lost at block ends, {c.work_share:.1%} more work for each block; tables of "
            f"up to {c.table_entries} entries"
        )


def choose_block_tokens(
    token_bytes: int,
    run_bytes: int,
    max_len: int,
    asked: int = 0,
    candidates: Sequence[int] = CANDIDATES,
) -> BlockChoice:
    """The block size for KV of `token_bytes` on a rank, of which `run_bytes` are one head's keys in a layer.

    Depends on the model and the split alone, not on what was measured: instances share prefixes only if their
    blocks are of one size. `asked` overrides it. Raises ValueError for sizes below one.
    """
    if token_bytes < 1 or run_bytes < 1 or max_len < 1 or asked < 0:
        raise ValueError(f"KV of {token_bytes} bytes a token, {run_bytes} in a row, {max_len} tokens")
    sizes = sorted({*candidates, asked} - {0})
    table = tuple(_costs(tokens, token_bytes, run_bytes, max_len) for tokens in sizes)
    if asked:
        chosen = next(c for c in table if c.block_tokens == asked)
        return BlockChoice(chosen, table, asked=True)
    # Where no size is a multiple of the granule, all are equally bad at it.
    whole = [c for c in table if c.whole_granules] or table
    return BlockChoice(min(whole, key=lambda c: c.cost), table)


def choose_for(config: ModelConfig, split: ShardPlan, kv_dtype: str, asked: int = 0) -> BlockChoice:
    """Tokens of a block of a served model, the same on all ranks; `asked` unless that is 0. ValueError."""
    narrowest = min(shard.kv_heads.size for shard in split.shards)
    token_bytes = kv_block_bytes(config, narrowest, kv_dtype, 1)
    run_bytes = token_bytes // (2 * config.layers * narrowest)
    return choose_block_tokens(token_bytes, run_bytes, config.max_len, asked)


def _costs(tokens: int, token_bytes: int, run_bytes: int, max_len: int) -> BlockCosts:
    sequence = min(SEQUENCE_TOKENS, max_len)
    size = tokens * token_bytes
    return BlockCosts(
        block_tokens=tokens,
        block_bytes=size,
        table_entries=-(-max_len // tokens),
        lost_share=tokens / sequence,  # half a block, twice
        work_share=BLOCK_WORK_BYTES / size
        + RUN_BYTES / (tokens * run_bytes)
        + (COPIED if tokens < READ_TOGETHER else 0.0),
        whole_granules=size % GRANULE == 0,
    )
