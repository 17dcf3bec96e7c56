"""The tier's memory: slabs of equal blocks, given out and taken back, within one budget. Pure.

Ranks differ in the size of their blocks, and a heap would fragment under them. A slab belongs to one size;
empty, it goes back to the system as soon as another size needs the room.
"""

import mmap
from dataclasses import dataclass, field

SLAB_BYTES = 32 << 20
SLABS_LEAST = 16
"""A size that comes anew takes a slab from the others: this part of a small budget at most."""
SLABS_MOST = 256
ACCOUNT_BYTES = 1024
"""What is kept in mind of a block, measured. It counts, too: the blocks of a mock are 64 bytes."""


def cost(size: int) -> int:
    """Bytes of the budget that a block of `size` takes."""
    return size + ACCOUNT_BYTES


@dataclass(eq=False, slots=True)
class Slab:
    """Room for `len(free) + taken` blocks of `size` bytes."""

    size: int
    memory: memoryview
    free: list[int]
    blocks: set["Block"] = field(default_factory=set)
    """Those taken."""

    @property
    def cost(self) -> int:
        return len(self.memory) // self.size * cost(self.size)


@dataclass(eq=False, slots=True)
class Block:
    """One block's place in memory; `view` has the size it was taken for."""

    slab: Slab
    number: int
    view: memoryview
    owner: object = None
    """Whoever holds it, for who wants it back; None while its content is still arriving."""


class Arena:
    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.reserved = 0
        """What all slabs cost."""
        self.used = 0
        """What the blocks taken cost."""
        self._slabs: dict[int, list[Slab]] = {}
        # size → slabs, those with free blocks last

    @property
    def free(self) -> int:
        return self.budget - self.used

    def slab_bytes(self, size: int) -> int:
        """What a slab for blocks of this size usually costs."""
        usual = max(self.budget // SLABS_MOST, min(self.budget // SLABS_LEAST, SLAB_BYTES))
        return max(1, usual // cost(size)) * cost(size)

    def take(self, size: int) -> Block | None:
        """None: no slab of this size has room, and the budget has none for a further slab."""
        slabs = self._slabs.setdefault(size, [])
        if (not slabs or not slabs[-1].free) and not self._grow(size, slabs):
            return None
        slab = slabs[-1]
        number = slab.free.pop()
        block = Block(slab, number, slab.memory[number * size : (number + 1) * size])
        slab.blocks.add(block)
        self.used += cost(size)
        if not slab.free:
            # Full ones first, so that looking at the last is enough.
            slabs.insert(0, slabs.pop())
        return block

    def give(self, block: Block) -> None:
        slab = block.slab
        slab.blocks.remove(block)
        self.used -= cost(slab.size)
        slabs = self._slabs[slab.size]
        if not slab.free:
            slabs.remove(slab)
            slabs.append(slab)
        slab.free.append(block.number)
        block.owner = None

    def _grow(self, size: int, slabs: list[Slab]) -> bool:
        wanted = self.slab_bytes(size)
        if self.reserved + wanted > self.budget:
            self._drop_empty()
        # The last slab of all is as large as what is left.
        blocks = min(wanted, self.budget - self.reserved) // cost(size)
        if not blocks:
            return False
        memory = memoryview(mmap.mmap(-1, blocks * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        slabs.append(Slab(size, memory, list(range(blocks))))
        self.reserved += blocks * cost(size)
        return True

    def _drop_empty(self) -> None:
        for slabs in self._slabs.values():
            self.reserved -= sum(slab.cost for slab in slabs if not slab.blocks)
            slabs[:] = [slab for slab in slabs if slab.blocks]
