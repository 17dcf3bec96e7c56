"""Computing a token with the same bits whatever it is computed together with, using torch's operations.

torch picks another algorithm for another number of rows. So whatever is done token by token is done in tiles
of one shape, and what looks at a history looks at one history at a time. Native kernels need none of this.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from services.worker.engine.batch import RaggedBatch
from services.worker.engine.config import ModelConfig
from services.worker.engine.kvcache import KvCache

TILE = 16
"""Tokens of a tile."""

Rowwise = Callable[..., torch.Tensor]
"""Tensors [tokens, …] → [tokens, …], each token for itself."""


def by_tiles(work: Rowwise, *inputs: torch.Tensor) -> torch.Tensor:
    """`work` of the inputs, `TILE` tokens at a time in memory laid out alike; the last tile is filled up."""
    tokens = len(inputs[0])
    done = []
    for first in range(0, tokens, TILE):
        tiles = []
        for each in inputs:
            part = each[first : first + TILE]
            tile = part.new_zeros(TILE, *part.shape[1:])
            tile[: len(part)] = part
            tiles.append(tile)
        done.append(work(*tiles)[: tokens - first])
    return torch.cat(done) if done else work(*inputs)


def at_once(work: Rowwise, *inputs: torch.Tensor) -> torch.Tensor:
    """`work` of all tokens, fast and free to differ in the last bits."""
    return work(*inputs)


class EachTokenAlone:
    """Attention of a batch, one token at a time over its own history."""

    def __init__(self, config: ModelConfig, kv: KvCache, batch: RaggedBatch) -> None:
        self._config, self._kv = config, kv
        heads = torch.arange(config.kv_heads)
        self._rows = []
        for row in range(batch.rows):
            length = int(batch.kv_len[row])
            held = batch.block_table[row, : -(-length // kv.block_tokens)]
            blocks = torch.from_numpy(held.astype(np.int64))
            index = blocks * (config.layers * 2 * config.kv_heads) + heads[:, None]
            tokens = range(int(batch.row_start[row]), int(batch.row_start[row + 1]))
            self._rows.append((index.reshape(-1), tokens, length))

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [tokens, heads, head_dim] → the same shape."""
        c = self._config
        result = torch.empty_like(q)
        queries = q.view(-1, c.kv_heads, c.group, c.head_dim)
        for index, tokens, length in self._rows:
            base = index + layer * 2 * c.kv_heads
            shape = (1, c.kv_heads, -1, c.head_dim)
            keys = self._kv.rows.index_select(0, base).view(shape).float()
            values = self._kv.rows.index_select(0, base + c.kv_heads).view(shape).float()
            for token in tokens:
                seen = length - (tokens.stop - 1 - token)
                out = F.scaled_dot_product_attention(
                    queries[token][None],
                    keys[:, :, :seen],
                    values[:, :, :seen],
                    scale=1 / math.sqrt(c.head_dim),
                )
                result[token] = out.view(c.heads, c.head_dim)
        return result


def check_places(forward: Callable[[RaggedBatch], torch.Tensor], kv: KvCache) -> None:
    """Raise ValueError if a token's logits depend on its place among others on this machine.

    Writes into block 0: no sequence may exist.
    """
    with torch.inference_mode():
        alone = forward(_same_token(1)).clone()
        together = forward(_same_token(TILE + 3))
    if not bool((together == alone).all()):
        raise ValueError(
            "--deterministic: torch computes a token differently by its place in a matrix on this machine, "
            "so it needs the native kernels; install a C++ compiler, or see kernels_reason in the log"
        )


def _same_token(rows: int) -> RaggedBatch:
    """`rows` sequences of one and the same token, all in block 0."""
    zeros, ones = np.zeros(rows, np.int32), np.ones(rows, np.int32)
    return RaggedBatch(
        tokens=zeros,
        positions=zeros,
        row_start=np.arange(rows + 1, dtype=np.int32),
        kv_len=ones,
        block_table=zeros[:, None],
        write_block=zeros,
        write_offset=zeros,
        logit_tokens=np.arange(rows, dtype=np.int32),
    )
