"""Fetches from the second tier as the batch knows them: whose blocks they hold, and how they end.

A fetch holds its blocks as a running slot does, so that nobody else is handed them, until it has ended on
this instance. Only then do they get hashes, all at once and between two frames.
"""

import numpy as np

from services.worker.faults import FrameFault
from services.worker.hashes import BlockHashes
from services.worker.step import I32
from services.worker.tables import BlockTables
from shared.blocks import HASH_BYTES
from shared.ids import BlockHash
from shared.wire import Fetch


class Fetches:
    """Of one session: op → its fetch."""

    def __init__(self, tables: BlockTables, hashes: BlockHashes) -> None:
        self._tables = tables
        self._hashes = hashes
        self._open: dict[int, Fetch] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, fetch: Fetch) -> I32:
        """Hold its blocks, which are handed out by it. Raises `FrameFault` before anything is changed."""
        if fetch.op in self._open:
            raise FrameFault("op of a fetch", got=f"{fetch.op}, under way", allowed="a new one")
        if not fetch.blocks or len(fetch.blocks) != len(fetch.hashes):
            raise FrameFault(
                "fetch",
                got=f"{len(fetch.blocks)} blocks for {len(fetch.hashes)} hashes",
                allowed="as many, and at least one",
            )
        wrong = next((each for each in fetch.hashes if len(each) != HASH_BYTES), None)
        if wrong is not None:
            raise FrameFault("hash of a fetch", got=f"{len(wrong)} bytes long", allowed=f"{HASH_BYTES} bytes")
        blocks = self._tables.read(fetch.blocks)
        self._tables.hold(blocks)
        self._open[fetch.op] = fetch
        return blocks

    def end(self, op: int, count: int) -> bool:
        """Its first `count` blocks hold what was asked for. False: it is none of this session."""
        fetch = self._open.pop(op, None)
        if fetch is None:
            return False
        if not 0 <= count <= len(fetch.blocks):
            raise ValueError(f"fetch {op} of {len(fetch.blocks)} blocks ended with {count}")
        for block, block_hash in zip(fetch.blocks[:count], fetch.hashes, strict=False):
            self._hashes.store(block, BlockHash(block_hash))
        self._tables.let_go(np.array(fetch.blocks, np.int32))
        return True

    def reset(self) -> None:
        """The session is over: none of them ends any more."""
        self._open.clear()
