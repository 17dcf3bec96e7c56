"""The widest steps a rank may be told to compute, made up to see what memory they take."""

from collections.abc import Sequence

import numpy as np

from services.worker.engine.batch import RaggedBatch
from services.worker.engine.sampler import SampleRow
from services.worker.step import I32
from shared.wire import Sampling


def widest_batch(tokens: int, slots: int, max_len: int, block_tokens: int) -> RaggedBatch:
    """`tokens` tokens, or as many as `slots` sequences of `max_len` have: one of each slot and the rest of
    prompts, the last of every row wanted. All keys and values go to block 0.
    """
    rows = min(slots, tokens)
    left = min(tokens, rows * max_len) - rows
    counts = [1] * rows
    for row in reversed(range(rows)):
        more = min(left, max_len - 1)
        counts[row] += more
        left -= more
    return _batch(counts, [0] * rows, block_tokens)


def longest_batch(tokens: int, max_len: int, block_tokens: int) -> RaggedBatch:
    """The last `tokens` tokens of a sequence of `max_len`, all of whose blocks are block 0."""
    return _batch([tokens], [max_len - tokens], block_tokens)


def widest_sampling(rows: int) -> list[SampleRow]:
    """Rows that ask for all there is: filters, a draw, log-probabilities."""
    sampling = Sampling(max_tokens=1, temperature=1.0, top_p=0.95, logprobs=5)
    return [SampleRow(sampling, 0, np.zeros(2, np.int32), 1) for _ in range(rows)]


def _batch(counts: Sequence[int], starts: Sequence[int], block_tokens: int) -> RaggedBatch:
    row_start = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=row_start[1:])
    positions: I32 = np.concatenate(
        [np.arange(start, start + count, dtype=np.int32) for start, count in zip(starts, counts)]
    )
    kv_len = np.array([start + count for start, count in zip(starts, counts)], np.int32)
    return RaggedBatch(
        tokens=np.zeros(len(positions), np.int32),
        positions=positions,
        row_start=row_start,
        kv_len=kv_len,
        block_table=np.zeros((len(counts), -(-int(kv_len.max()) // block_tokens)), np.int32),
        write_block=np.zeros(len(positions), np.int32),
        write_offset=positions % block_tokens,
        logit_tokens=row_start[1:] - 1,
    )
