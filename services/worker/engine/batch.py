"""The ragged batch of one step: tokens of all rows side by side, nothing padded. Pure numpy."""

from dataclasses import dataclass

import numpy as np

from services.worker.step import I32, SlotArrays, StepInput


@dataclass(frozen=True)
class RaggedBatch:
    """T tokens of R rows, row after row. Row r owns tokens [row_start[r], row_start[r + 1])."""

    tokens: I32
    """[T] token ids; -1 - slot for an id that is not known here yet, but was drawn last for that slot."""
    positions: I32
    """[T] position of each token in its sequence."""
    row_start: I32
    """[R + 1] first token of each row, then T."""
    kv_len: I32
    """[R] tokens in the KV of the row once this step has written its own."""
    block_table: I32
    """[R, blocks of the longest row] physical blocks."""
    write_block: I32
    """[T] physical block each token's KV goes to."""
    write_offset: I32
    """[T] its place in that block."""
    logit_tokens: I32
    """[L] tokens whose logits are wanted, ascending."""

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def rows(self) -> int:
        return len(self.kv_len)


def check_step(step: StepInput, slots: SlotArrays, blocks: int, max_len: int) -> None:
    """Raise ValueError if `step` names slots, positions or blocks to copy that do not exist.

    The worker's bookkeeping never does; kernels would read or write wherever such numbers point.
    """
    for place, block in (
        (place, block) for copy in step.copies for place, block in zip(("from", "to"), copy)
    ):
        if not 0 <= block < blocks:
            raise ValueError(f"a copy {place} block {block} of {blocks}")
    if not len(step.slots):
        return
    most, length = len(slots.tokens), min(slots.tokens.shape[1], max_len)
    ends = step.starts.astype(np.int64) + step.counts
    for what, numbers, low, high in (
        ("slot", step.slots, 0, most - 1),
        ("start", step.starts, 0, length - 1),
        ("count", step.counts, 1, length),
        ("end", ends, 1, length),
    ):
        if numbers.min() < low or numbers.max() > high:
            row = int(((numbers < low) | (numbers > high)).argmax())
            raise ValueError(f"row {row}: {what} {numbers[row]}, allowed are {low} to {high}")


def build_batch(step: StepInput, slots: SlotArrays, block_tokens: int) -> RaggedBatch:
    """Lay the rows of `step` out as one ragged batch.

    Logits are wanted of every row's last token if it samples, and of all tokens of a row whose sampling asks
    for prompt logprobs as long as they predict prompt tokens.
    """
    counts = step.counts
    row_start = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=row_start[1:])
    total = int(row_start[-1])
    row_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    positions = np.arange(total, dtype=np.int32) - (row_start[:-1] - step.starts)[row_of]
    slot_of = step.slots[row_of]
    kv_len = (step.starts + counts).astype(np.int32)
    logical = positions // block_tokens
    width = int(-(-int(kv_len.max(initial=1)) // block_tokens))
    table = np.ascontiguousarray(slots.block_table[step.slots, :width], dtype=np.int32)
    used = np.arange(width) < -(-kv_len[:, None] // block_tokens)
    unbacked = ((table < 0) & used).any(axis=1)
    if unbacked.any():
        row = int(unbacked.argmax())
        held = int((table[row] >= 0).sum())
        raise ValueError(f"slot {step.slots[row]}: {kv_len[row]} tokens of KV, but only {held} blocks")
    wanted = np.zeros(total, np.bool_)
    wanted[row_start[1:][step.samples] - 1] = True
    for row in prompt_rows(step, slots):
        first, stop = prompt_logprob_span(step, slots, row)
        if stop > first:
            wanted[row_start[row] : row_start[row] + (stop - first)] = True
    tokens = slots.tokens[slot_of, positions].astype(np.int32)
    unknown = kv_len > slots.known[step.slots]
    if unknown.any():
        tokens[row_start[1:][unknown] - 1] = -1 - step.slots[unknown]
    return RaggedBatch(
        tokens=tokens,
        positions=positions.astype(np.int32),
        row_start=row_start,
        kv_len=kv_len,
        block_table=table,
        write_block=slots.block_table[slot_of, logical].astype(np.int32),
        write_offset=(positions - logical * block_tokens).astype(np.int32),
        logit_tokens=np.flatnonzero(wanted).astype(np.int32),
    )


def prompt_rows(step: StepInput, slots: SlotArrays) -> list[int]:
    """Rows whose tokens predict prompt tokens: only they may have a `prompt_logprob_span`."""
    return np.flatnonzero(step.starts + 1 < slots.prompt_len[step.slots]).tolist()


def prompt_logprob_span(step: StepInput, slots: SlotArrays, row: int) -> tuple[int, int]:
    """Prompt positions [first, stop) predicted by the tokens row `row` computes; empty if not asked for.

    The token at position p predicts p + 1, so the row's token i predicts first + i.
    """
    slot, start = int(step.slots[row]), int(step.starts[row])
    sampling = slots.sampling[slot]
    if sampling is None or sampling.prompt_logprobs is None:
        return 0, 0
    stop = min(start + int(step.counts[row]) + 1, int(slots.prompt_len[slot]))
    return (start + 1, stop) if stop > start + 1 else (0, 0)


@dataclass(frozen=True)
class PromptSpan:
    """Prompt positions [first, stop) of a row that the batch predicts, at logits `at` onwards."""

    row: int
    slot: int
    first: int
    stop: int
    at: int
    count: int
    """Alternatives asked for."""


def prompt_spans(batch: RaggedBatch, step: StepInput, slots: SlotArrays) -> list[PromptSpan]:
    """The spans of all rows whose sampling asks for prompt logprobs and that have any in this step."""
    found = []
    for row in prompt_rows(step, slots):
        first, stop = prompt_logprob_span(step, slots, row)
        if stop <= first:
            continue
        slot = int(step.slots[row])
        sampling = slots.sampling[slot]
        assert sampling is not None
        assert sampling.prompt_logprobs is not None
        at = int(np.searchsorted(batch.logit_tokens, batch.row_start[row]))
        found.append(PromptSpan(row, slot, first, stop, at, sampling.prompt_logprobs))
    return found


def one_sequence(start: int, count: int, block_tokens: int, tokens: I32 | None = None) -> RaggedBatch:
    """Tokens [start, start + count) of one sequence in blocks 0 onwards, the last one's logits wanted.

    For measurements while there are no sequences; all ids are 0 unless `tokens` are given.
    """
    positions = np.arange(start, start + count, dtype=np.int32)
    return RaggedBatch(
        tokens=np.zeros(count, np.int32) if tokens is None else tokens,
        positions=positions,
        row_start=np.array([0, count], np.int32),
        kv_len=np.array([start + count], np.int32),
        block_table=np.arange(-(-(start + count) // block_tokens), dtype=np.int32)[None],
        write_block=positions // block_tokens,
        write_offset=positions % block_tokens,
        logit_tokens=np.array([count - 1], np.int32),
    )
