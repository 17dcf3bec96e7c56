"""A step's integers: padded to a fixed number of rows for captured graphs, packed for one copy."""

from dataclasses import dataclass

import numpy as np
import torch

from services.worker.engine.batch import RaggedBatch
from services.worker.step import I32

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows of captured decode steps; a step is padded to the next one."""

_FIELDS = ("tokens", "positions", "write_block", "write_offset", "logit_tokens", "kv_len", "block_table")


def bucket_of(batch: RaggedBatch) -> int | None:
    """Rows of the graph for this step; None if a row computes several tokens, or there are too many."""
    if batch.size != batch.rows or batch.rows > BUCKETS[-1]:
        return None
    return next(bucket for bucket in BUCKETS if bucket >= batch.rows)


def pad_decode(batch: RaggedBatch, rows: int, width: int, scratch: int) -> RaggedBatch:
    """A decode step (one token a row) of exactly `rows` rows and `width` table columns, logits of every row.

    Rows beyond the batch's are token 0 at position 0 of block `scratch`, which no sequence owns; so is the
    table beyond a row's end. `width` is at least that of the longest row.
    """
    count = batch.rows

    def padded(values: I32, fill: int) -> I32:
        result = np.full(rows, fill, np.int32)
        result[:count] = values
        return result

    table = np.full((rows, width), scratch, np.int32)
    held = min(width, batch.block_table.shape[1])
    table[:count, :held] = np.where(batch.block_table[:, :held] < 0, scratch, batch.block_table[:, :held])
    return RaggedBatch(
        tokens=padded(batch.tokens, 0),
        positions=padded(batch.positions, 0),
        row_start=np.arange(rows + 1, dtype=np.int32),
        kv_len=padded(batch.kv_len, 1),
        block_table=table,
        write_block=padded(batch.write_block, scratch),
        write_offset=padded(batch.write_offset, 0),
        logit_tokens=np.arange(rows, dtype=np.int32),
    )


def idle_decode(rows: int, width: int, scratch: int) -> RaggedBatch:
    """A decode step of rows that all only fill up: what graphs are captured with."""
    none, no_table = np.zeros(0, np.int32), np.zeros((0, width), np.int32)
    nobody = RaggedBatch(none, none, np.zeros(1, np.int32), none, no_table, none, none, none)
    return pad_decode(nobody, rows, width, scratch)


def page_lists(batch: RaggedBatch, block_tokens: int) -> tuple[I32, I32, I32]:
    """(first page of each row then their number [R + 1], pages of all rows, tokens in each last page [R])."""
    pages = -(-batch.kv_len // block_tokens)
    starts = np.zeros(batch.rows + 1, np.int32)
    np.cumsum(pages, out=starts[1:])
    used = np.arange(batch.block_table.shape[1]) < pages[:, None]
    return starts, batch.block_table[used], (batch.kv_len - (pages - 1) * block_tokens).astype(np.int32)


@dataclass(frozen=True)
class StepInputs:
    """The fields of a `RaggedBatch` that a pass reads on the device, int64."""

    tokens: torch.Tensor
    positions: torch.Tensor
    write_block: torch.Tensor
    write_offset: torch.Tensor
    logit_tokens: torch.Tensor
    kv_len: torch.Tensor
    block_table: torch.Tensor


def packed_size(rows: int, width: int) -> int:
    """Integers of a packed decode step."""
    return rows * (len(_FIELDS) - 1 + width)


def pack(batch: RaggedBatch, pinned: bool) -> torch.Tensor:
    """All fields in one int32 tensor in host memory. Pinned, it can be copied without waiting: torch reuses
    such memory only when the copies from it have been made."""
    parts = [getattr(batch, name).reshape(-1) for name in _FIELDS]
    host = torch.empty(sum(map(len, parts)), dtype=torch.int32, pin_memory=pinned)
    np.concatenate(parts, out=host.numpy())
    return host


def unpack(flat: torch.Tensor, batch: RaggedBatch) -> StepInputs:
    """`flat`, where `pack(batch)` went, as fields; only the batch's sizes are looked at."""
    shapes = [getattr(batch, name).shape for name in _FIELDS]
    wide = flat.to(torch.int64)
    parts = wide.split([int(np.prod(shape)) for shape in shapes])
    return StepInputs(*(part.view(shape) for part, shape in zip(parts, shapes)))
