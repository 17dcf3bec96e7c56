"""KV blocks of a mock: small, but of a content that depends on every id before, as a real model's does.

So a test without a model sees at once when a block comes back with what belongs elsewhere.
"""

import numpy as np
from numpy.typing import NDArray

from services.worker.step import ExecutorInfo, SlotArrays, StepInput

BLOCK_BYTES = 64

_LANES = BLOCK_BYTES // 8


class WrongKv(RuntimeError):
    """A sequence was to go on from blocks that do not hold what its ids make of them."""


class MockKv:
    """`services.worker.tier.port.KvMemory`. Content of a full block: a checksum of all ids up to its end."""

    block_bytes = BLOCK_BYTES

    def __init__(self, info: ExecutorInfo, rank: int) -> None:
        self._size = info.block_tokens
        self._content = np.zeros((info.blocks_total, _LANES), np.int64)
        # Another rank holds other heads.
        weights = np.random.default_rng(rank).integers(1, 2**62, info.max_len, np.int64)
        self._weights: NDArray[np.int64] = weights | 1
        self._fresh: set[int] = set()
        # slots whose cached blocks were not looked at yet

    def view(self, block: int) -> memoryview:
        return memoryview(self._content[block].view(np.uint8))

    def write(self, block: int, data: memoryview) -> None:
        self._content[block] = np.frombuffer(data, np.int64)

    def expect(self, slots: list[int]) -> None:
        """These were admitted anew."""
        self._fresh.update(slots)

    def compute(self, step: StepInput, slots: SlotArrays) -> None:
        """Write the blocks that the step fills. Raises `WrongKv`."""
        for source, target in step.copies:
            self._content[target] = self._content[source]
        ends = step.starts + step.counts
        if self._fresh:
            for row in np.flatnonzero(np.isin(step.slots, list(self._fresh))).tolist():
                slot, start = int(step.slots[row]), int(step.starts[row])
                self._fresh.discard(slot)
                self._check(slots, slot, start // self._size)
        for row in (ends // self._size > step.starts // self._size).nonzero()[0].tolist():
            slot, first, last = int(step.slots[row]), int(step.starts[row]), int(ends[row])
            blocks = range(first // self._size, last // self._size)
            self._content[slots.block_table[slot, blocks.start : blocks.stop]] = self._of(slots, slot, blocks)

    def _of(self, slots: SlotArrays, slot: int, blocks: range) -> NDArray[np.int64]:
        """What these blocks of the slot's sequence hold [len(blocks), lanes]."""
        stop = blocks.stop * self._size
        sums = np.cumsum((slots.tokens[slot, :stop] + np.int64(1)) * self._weights[:stop])
        return np.repeat(sums[self._size - 1 :: self._size][blocks.start :], _LANES).reshape(-1, _LANES)

    def _check(self, slots: SlotArrays, slot: int, cached: int) -> None:
        table = slots.block_table[slot, :cached]
        wrong = (self._content[table] != self._of(slots, slot, range(cached))).any(axis=1)
        if wrong.any():
            index = int(wrong.argmax())
            raise WrongKv(f"slot {slot}: block {table[index]}, number {index} of its table, holds other KV")
