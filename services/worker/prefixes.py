"""The chain of block hashes of each slot: what of it is confirmed, and what comes next (design §6)."""

import numpy as np

from services.worker.faults import FrameFault
from services.worker.hashes import BlockHashes
from services.worker.shape import BatchShape
from services.worker.step import I32
from services.worker.tables import Rows
from shared.blocks import extend_packed, root_hash
from shared.ids import BlockHash
from shared.tier.frames import Link
from shared.wire import Admit, Stored

NEVER = np.iinfo(np.int32).max

ROOTS_KEPT = 1024
"""Root hashes cached by salt; salts come from outside, so their number has a bound."""


class Prefixes:
    """Confirms full blocks, and that a block said to be cached holds what it should."""

    def __init__(self, shape: BatchShape, fingerprint: str, hashes: BlockHashes) -> None:
        self._size = shape.block_tokens
        self._fingerprint = fingerprint
        self._hashes = hashes
        self._roots: dict[str, BlockHash] = {}
        self._full_at = np.zeros(shape.max_slots, np.int32)
        # the slot's next block is confirmed when this many ids are computed; `_parent` names the one before
        self._parent: list[BlockHash] = [BlockHash(b"")] * shape.max_slots

    def check(self, admit: Admit, ids: I32, cached: int) -> BlockHash:
        """Hash of the last cached block. A hit is a belief of the scheduler; what our blocks hold decides."""
        root = self._roots.get(admit.salt)
        if root is None:
            root = root_hash(self._fingerprint, self._size, admit.salt)
            if len(self._roots) < ROOTS_KEPT:
                self._roots[admit.salt] = root
        parent, size = root, self._size
        for index, block in enumerate(admit.blocks[:cached]):
            link = Link(parent, index)
            parent = extend_packed(parent, ids[index * size : (index + 1) * size].tobytes())
            if self._hashes.of(block) != parent:
                raise FrameFault(
                    "cached block",
                    got=f"{block}, which holds something else",
                    allowed="the block of this prefix",
                    slot=admit.slot,
                )
            self._hashes.place(block, link)
        return parent

    def begin(self, slot: int, cached: int, parent: BlockHash) -> None:
        """The slot's first `cached` blocks are confirmed, the last of them under `parent`."""
        self._full_at[slot] = (cached + 1) * self._size
        self._parent[slot] = parent

    def spoil(self, slot: int) -> None:
        """What the slot computed is not fit to be shared, nor what would follow."""
        self._full_at[slot] = NEVER

    def confirm(self, rows: Rows, ends: I32, tokens: I32, tables: I32) -> list[Stored]:
        """Hash every block whose last token was written now: ids below `ends` of these slots are computed.

        `tokens` [max_slots, max_len] ids, `tables` [max_slots, max_blocks] blocks of the slots.
        """
        stored: list[Stored] = []
        filled = (ends >= self._full_at[rows]).nonzero()[0]
        if not len(filled):
            return stored
        size, width, store = self._size, 4 * self._size, self._hashes.store
        for slot, end in zip(rows[filled].tolist(), ends[filled].tolist(), strict=True):
            first, last = int(self._full_at[slot]) // size - 1, end // size
            self._full_at[slot] = (last + 1) * size
            parent = self._parent[slot]
            packed = tokens[slot, first * size : last * size].tobytes()
            for index, block in enumerate(tables[slot, first:last].tolist()):
                link = Link(parent, first + index)
                parent = extend_packed(parent, packed[index * width : (index + 1) * width])
                store(block, parent, link)
                stored.append(Stored(block, parent))
            self._parent[slot] = parent
        return stored
