"""Which block holds which hash: the instance's own truth about shareable KV (docs/protocol.md §3).

Several blocks may hold equal content (two sequences computed the same prefix at the same time), so a hash
vanishes only with its last copy. Net changes are collected for the kvstore's events.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shared.ids import BlockHash
from shared.kv_events import PAGE
from shared.tier.frames import NO_LINK, Link
from shared.wire import Stored


class BlockHashes:
    """block → hash and hash → number of copies, over blocks [0, blocks_total)."""

    def __init__(self, blocks_total: int) -> None:
        self._of_block: list[BlockHash | None] = [None] * blocks_total
        self._links = [NO_LINK] * blocks_total
        self._hashed: NDArray[np.bool_] = np.zeros(blocks_total, np.bool_)
        self._copies: dict[BlockHash, int] = {}
        self._before: dict[BlockHash, bool] = {}
        # hash touched since the last `take_changes` → whether a copy existed then

    def __len__(self) -> int:
        """Distinct hashes held."""
        return len(self._copies)

    def of(self, block: int) -> BlockHash | None:
        return self._of_block[block]

    def link(self, block: int) -> Link:
        """Where in its chain the block is or was, until it is confirmed anew."""
        return self._links[block]

    def place(self, block: int, link: Link) -> None:
        """Where in its chain a hashed block is, for one that was stored without."""
        self._links[block] = link

    def store(self, block: int, block_hash: BlockHash, link: Link = NO_LINK) -> None:
        """The block's content is confirmed and shareable under this hash."""
        self._links[block] = link
        if self._of_block[block] is not None:
            self.forget(block)
        self._touch(block_hash)
        self._of_block[block] = block_hash
        self._hashed[block] = True
        self._copies[block_hash] = self._copies.get(block_hash, 0) + 1

    def held(self, blocks: Iterable[int]) -> list[tuple[int, BlockHash]]:
        """Those of `blocks` that hold a hash, with it."""
        of_block = self._of_block
        return [(block, held) for block in blocks if (held := of_block[block]) is not None]

    def held_of(self, blocks: NDArray[np.int32]) -> list[tuple[int, BlockHash]]:
        """`held` for many; most blocks handed out held nothing that anybody could find."""
        return self.held(blocks[self._hashed[blocks]].tolist())

    def all_blocks(self) -> list[tuple[int, BlockHash]]:
        """Every hashed block, with its hash."""
        return self.held(np.flatnonzero(self._hashed).tolist())

    def forget(self, block: int) -> None:
        """The block was handed out again: what it held is gone by that very act."""
        block_hash = self._of_block[block]
        if block_hash is None:
            return
        self._touch(block_hash)
        self._of_block[block] = None
        self._hashed[block] = False
        left = self._copies[block_hash] - 1
        if left:
            self._copies[block_hash] = left
        else:
            del self._copies[block_hash]

    def forget_each(self, blocks: list[int]) -> None:
        """`forget` for a few."""
        of_block = self._of_block
        for block in blocks:
            if of_block[block] is not None:
                self.forget(block)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) hashes, net since the last call; a hash that came and went is in neither."""
        stored: list[bytes] = []
        removed: list[bytes] = []
        for block_hash, was in self._before.items():
            if (block_hash in self._copies) != was:
                (removed if was else stored).append(block_hash)
        self._before.clear()
        return stored, removed

    def all_hashes(self) -> list[bytes]:
        """Every distinct hash, for a restate. Changes before it are part of it and need no event."""
        self._before.clear()
        return list(self._copies)

    def page(self, offset: int) -> tuple[list[Stored], int]:
        """Up to `PAGE` hashed blocks with numbers from `offset` on, and the next offset (0: no more).

        Offsets are block numbers, so pages stay right while blocks come and go between them.
        """
        blocks = (np.flatnonzero(self._hashed[offset:]) + offset).tolist() if offset >= 0 else []
        rows = [Stored(block, self._of_block[block] or b"") for block in blocks[:PAGE]]
        return rows, rows[-1].block + 1 if len(blocks) > PAGE else 0

    def _touch(self, block_hash: BlockHash) -> None:
        if block_hash not in self._before:
            self._before[block_hash] = block_hash in self._copies
