"""Batches for a decoder that a benchmark has to itself: rows of equal length, each with KV of its own."""

import numpy as np

from services.worker.engine.batch import RaggedBatch
from services.worker.step import I32
from tests.bench.tp_rig import BLOCK


def alike(ids: I32, first: int, room: int) -> RaggedBatch:
    """Rows `ids` [R, n] at positions `first` onwards, whose last tokens' logits are wanted.

    `room`: tokens of KV that each row has, a multiple of the block's; row r has those from r · room on.
    """
    rows, count = ids.shape
    positions = np.tile(np.arange(first, first + count, dtype=np.int32), rows)
    blocks = room // BLOCK
    row_of = np.repeat(np.arange(rows, dtype=np.int32), count)
    return RaggedBatch(
        tokens=np.ascontiguousarray(ids.reshape(-1), np.int32),
        positions=positions,
        row_start=np.arange(rows + 1, dtype=np.int32) * count,
        kv_len=np.full(rows, first + count, np.int32),
        block_table=np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks),
        write_block=row_of * blocks + positions // BLOCK,
        write_offset=positions % BLOCK,
        logit_tokens=np.arange(1, rows + 1, dtype=np.int32) * count - 1,
    )
