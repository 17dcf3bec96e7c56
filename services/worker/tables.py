"""Block tables of the slots, and the guard that no two running slots write the same block."""

import numpy as np
from numpy.typing import NDArray

from services.worker.faults import FrameFault
from services.worker.shape import BatchShape
from services.worker.step import I32

Rows = NDArray[np.intp]
"""Slots as numpy indexes them fastest."""


class BlockTables:
    """`rows` [max_slots, max_blocks]: block numbers, -1 beyond a slot's table. Errors are `FrameFault`."""

    def __init__(self, shape: BatchShape) -> None:
        self._shape = shape
        self.rows: I32 = np.full((shape.max_slots, shape.max_blocks), -1, np.int32)
        self._lengths = np.zeros(shape.max_slots, np.int32)
        self._room = np.zeros(shape.max_slots, np.int32)
        # ids that the slot's table has room for
        self._users = np.zeros(shape.blocks_total, np.int32)
        # tables of running slots that hold the block

    def read(self, blocks: list[int], slot: int | None = None) -> I32:
        """Block numbers from the wire: each exists, and none is named twice."""
        total = self._shape.blocks_total
        if blocks and not 0 <= min(blocks) <= max(blocks) < total:
            wrong = next(block for block in blocks if not 0 <= block < total)
            raise FrameFault("block", got=wrong, allowed=f"0 to {total - 1}", slot=slot)
        if len(set(blocks)) != len(blocks):
            raise FrameFault("list of blocks", got="naming one twice", allowed="distinct blocks", slot=slot)
        return np.array(blocks, np.int32)

    def share(self, slot: int, blocks: I32) -> None:
        """Append blocks that are only read."""
        self._users[blocks] += 1
        self._append(slot, blocks)

    def hand_out(self, slot: int, blocks: I32) -> None:
        """Append blocks that the slot will write."""
        users = self._users[blocks]
        if users.any():
            taken = blocks[users.argmax()]
            raise FrameFault("block handed out", got=f"{taken}, in use", allowed="one not in use", slot=slot)
        self._users[blocks] = 1
        self._append(slot, blocks)

    def hand_out_one(self, slot: int, block: int) -> None:
        """`hand_out` of the one block that most frames bring a slot: scalars are quicker than arrays here."""
        if not 0 <= block < self._shape.blocks_total:
            self.read([block], slot)
        if self._users[block] or self._lengths[slot] >= self._shape.max_blocks:
            return self.hand_out(slot, np.array([block], np.int32))
        self._users[block] = 1
        length = self._lengths[slot]
        self.rows[slot, length] = block
        self._lengths[slot] = length + 1
        self._room[slot] += self._shape.block_tokens

    def hold(self, blocks: I32) -> None:
        """Blocks that something else than a slot will write."""
        users = self._users[blocks]
        if users.any():
            taken = blocks[users.argmax()]
            raise FrameFault("block to fetch into", got=f"{taken}, in use", allowed="one not in use")
        self._users[blocks] = 1

    def let_go(self, blocks: I32) -> None:
        """What was held; nobody writes it any more."""
        self._users[blocks] -= 1

    def check_writable(self, block: int) -> None:
        if self._users[block] > 1:
            raise FrameFault("block to copy into", got=f"{block}, shared", allowed="one that nobody shares")

    def check_room(self, rows: Rows, ends: I32) -> None:
        """Positions below `ends` of these slots lie within their tables."""
        short = ends > self._room[rows]
        if short.any():
            row = short.argmax()
            slot = int(rows[row])
            raise FrameFault(
                "table", got=f"{self._lengths[slot]} blocks", allowed=f"{ends[row]} ids long", slot=slot
            )

    def leave(self, slot: int) -> None:
        """The slot writes nothing any more; its blocks may be handed out while it still names them."""
        self._users[self.rows[slot, : self._lengths[slot]]] -= 1

    def clear(self, slot: int) -> None:
        """Empty the table of a slot that has left."""
        self.rows[slot, : self._lengths[slot]] = -1
        self._lengths[slot] = self._room[slot] = 0

    def reset(self) -> None:
        self.rows.fill(-1)
        self._lengths.fill(0)
        self._room.fill(0)
        self._users.fill(0)

    def _append(self, slot: int, blocks: I32) -> None:
        before = int(self._lengths[slot])
        after = before + len(blocks)
        most = self._shape.max_blocks
        if after > most:
            raise FrameFault("table", got=f"{after} blocks", allowed=f"up to {most}", slot=slot)
        self.rows[slot, before:after] = blocks
        self._lengths[slot] = after
        self._room[slot] = after * self._shape.block_tokens
