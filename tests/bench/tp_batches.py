"""Batches for a decoder that a benchmark has to itself: rows of equal length, each with KV of its own."""

import numpy as np

from services.worker.engine.batch import RaggedBatch
from services.worker.step import I32
from tests.bench.tp_rig import BLOCK


def alike(ids: I32, first: int | I32, room: int, rows: I32 | None = None) -> RaggedBatch:
    """Rows `ids` [R, n] at positions `first` ([R], or one for all) onwards, the last tokens' logits wanted.

    `room`: tokens of KV that each row has, a multiple of the block's; row r has those from r · room on.
    `rows`: [R] their numbers, if not 0 to R - 1.
    """
    many, count = ids.shape
    numbers = np.arange(many, dtype=np.int32) if rows is None else rows
    starts = np.broadcast_to(np.asarray(first, np.int32), many)
    positions: I32 = np.add.outer(starts, np.arange(count)).reshape(-1).astype(np.int32)
    table = numbers[:, None] * (room // BLOCK) + np.arange(room // BLOCK, dtype=np.int32)
    return RaggedBatch(
        tokens=np.ascontiguousarray(ids.reshape(-1), np.int32),
        positions=positions,
        row_start=np.arange(many + 1, dtype=np.int32) * count,
        kv_len=starts + np.int32(count),
        block_table=np.ascontiguousarray(table, np.int32),
        write_block=table[np.repeat(np.arange(many), count), positions // BLOCK].astype(np.int32),
        write_offset=positions % BLOCK,
        logit_tokens=np.arange(1, many + 1, dtype=np.int32) * count - 1,
    )
