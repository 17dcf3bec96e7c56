"""Memory between KV blocks and the network: its size is a setting, and a class of the ledger."""

import mmap

import numpy as np

FETCH_PLACES = 2
"""Blocks that a fetch needs room for: one arrives while the one before is copied."""


class Staging:
    """Places for whole blocks, for contents on their way to the tier; and room for those that arrive.

    Pages cost nothing until they are used. Raises ValueError if the size does not hold even three blocks.
    """

    def __init__(self, size: int, block_bytes: int) -> None:
        places = size // block_bytes - FETCH_PLACES
        if places < 1:
            raise ValueError(
                f"tier_staging of {size} bytes is too little: it has to hold {FETCH_PLACES + 1} blocks of "
                f"{block_bytes} bytes; set it to {(FETCH_PLACES + 1) * block_bytes} or more, or to 0 for no "
                "second tier"
            )
        self.places = places
        memory = mmap.mmap(-1, (places + FETCH_PLACES) * block_bytes)
        self._blocks = np.frombuffer(memory, np.uint8).reshape(-1, block_bytes)

    @property
    def arriving(self) -> memoryview:
        """Room of `FETCH_PLACES` blocks."""
        return self._blocks[self.places :].reshape(-1).data

    def view(self, place: int) -> memoryview:
        return self._blocks[place].data

    def put(self, place: int, content: memoryview) -> None:
        # Unlike an assignment to a view, this lets other threads go on.
        np.copyto(self._blocks[place], np.frombuffer(content, np.uint8))
