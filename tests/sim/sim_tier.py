"""A second tier of KV in virtual time: what workers leave there, and how their fetches go wrong.

Blocks hold what was really in KV memory when they were left, and come back into it; so a block that was
written too late, or belongs to somebody else by now, shows as a wrong token.
"""

import random
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

ROW = "tier-sim"
GIVES_UP_S = 10.0
"""A worker ends a fetch that goes nowhere."""


@dataclass
class Ill:
    """Shares of fetches and lookups that do not go well."""

    late: float = 0.0
    """Takes seconds."""
    short: float = 0.0
    """A block is missing or corrupt: the rest does not come."""
    lost: float = 0.0
    """Nothing comes: the worker gives up after `GIVES_UP_S`."""
    forged: float = 0.0
    """The index says more than there is."""
    deaf: float = 0.0
    """A lookup is not answered in time."""


@dataclass
class Tier:
    """Of one model."""

    rng: random.Random
    ill: Ill = field(default_factory=Ill)
    up: bool = True
    blocks: dict[bytes, NDArray[np.int32]] = field(default_factory=dict)
    kept: int = 0
    served: int = 0
    """Blocks that came back."""

    def keep(self, block_hash: bytes, content: NDArray[np.int32]) -> None:
        if self.up and block_hash not in self.blocks:
            self.blocks[block_hash] = content.copy()
            self.kept += 1

    def depth(self, hashes: list[bytes]) -> int:
        """What the index says of a chain."""
        held = next((n for n, each in enumerate(hashes) if each not in self.blocks), len(hashes))
        if self.rng.random() < self.ill.forged:
            return self.rng.randint(held, len(hashes))
        return held

    def answer(self, hashes: list[bytes]) -> tuple[float, list[NDArray[np.int32]]]:
        """(seconds it takes beyond the usual, contents of the leading blocks that come)."""
        rng, ill = self.rng, self.ill
        if not self.up or rng.random() < ill.lost:
            return GIVES_UP_S, []
        found = [self.blocks[each].copy() for each in hashes[: self.depth_held(hashes)]]
        if found and rng.random() < ill.short:
            found = found[: rng.randrange(len(found))]
        self.served += len(found)
        return (rng.uniform(0.05, 6.0) if rng.random() < ill.late else 0.0), found

    def depth_held(self, hashes: list[bytes]) -> int:
        return next((n for n, each in enumerate(hashes) if each not in self.blocks), len(hashes))
