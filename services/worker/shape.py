"""Bounds of an instance's batch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchShape:
    max_slots: int
    max_len: int
    """Ids a sequence may have."""
    block_tokens: int
    blocks_total: int
    vocab_size: int

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_len // self.block_tokens)
