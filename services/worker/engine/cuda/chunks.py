"""A step cut into chunks of its tokens, so that one chunk's sums travel while the next is computed."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from services.worker.engine.batch import RaggedBatch
from services.worker.step import I32


def cut_batch(batch: RaggedBatch, plan: Sequence[int] | I32) -> list[RaggedBatch]:
    """`batch` as batches of tokens [plan[i], plan[i + 1]), to be computed in this order in each layer.

    A row that is cut goes on in the next chunk, behind what it has written so far. Raises ValueError if the
    plan does not ascend from 0 to the batch's tokens.
    """
    bounds = [int(token) for token in plan]
    if bounds[0] != 0 or bounds[-1] != batch.size or any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(f"chunk plan {bounds} of {batch.size} tokens")
    if len(bounds) == 2:
        return [batch]
    return [_part(batch, start, stop) for start, stop in pairwise(bounds)]


def _part(batch: RaggedBatch, start: int, stop: int) -> RaggedBatch:
    first = int(np.searchsorted(batch.row_start, start, side="right")) - 1
    last = int(np.searchsorted(batch.row_start, stop, side="left"))
    row_start = batch.row_start[first : last + 1].clip(start, stop)
    wanted = batch.logit_tokens[(batch.logit_tokens >= start) & (batch.logit_tokens < stop)]
    return RaggedBatch(
        tokens=batch.tokens[start:stop],
        positions=batch.positions[start:stop],
        row_start=(row_start - start).astype(np.int32),
        kv_len=batch.positions[row_start[1:] - 1] + 1,
        block_table=batch.block_table[first:last],
        write_block=batch.write_block[start:stop],
        write_offset=batch.write_offset[start:stop],
        logit_tokens=(wanted - start).astype(np.int32),
    )
