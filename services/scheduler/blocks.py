"""The scheduler's account of one instance's KV blocks: who holds them, what they contain, which go next.

A block is held (references > 0) or free. A free block keeps its hash, so its content can be shared again,
until it is handed out anew; that very act takes the hash away, here and on the instance. Blocks without a
hash are handed out first, then the least recently freed; a sequence's tail is freed before its head, so
what many could share lives longest.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from shared.ids import BlockHash


class BlockPool:
    """References, hashes and the free list of `size` blocks. Scarcity is a value: `take` returns None."""

    __slots__ = ("_cached", "_hash", "_of_hash", "_plain", "_refs", "size")

    def __init__(self, size: int, inventory: Iterable[tuple[int, BlockHash]] = ()) -> None:
        self.size = size
        self._refs = [0] * size
        self._hash: list[BlockHash | None] = [None] * size
        self._of_hash: dict[BlockHash, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free blocks whose hash others can find, least recently freed first."""
        for block, block_hash in inventory:
            if 0 <= block < size and self._hash[block] is None and block_hash not in self._of_hash:
                self._hash[block] = block_hash
                self._of_hash[block_hash] = block
                self._cached[block] = None
        self._plain = [block for block in range(size - 1, -1, -1) if self._hash[block] is None]
        """Free blocks with nothing in them, used as a stack."""

    @property
    def free(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return len(self._plain) + len(self._cached)

    @property
    def plain(self) -> int:
        """Free blocks whose content nobody can find: handing them out costs nothing."""
        return len(self._plain)

    @property
    def cached(self) -> int:
        """Blocks that can be found by their hash, held or free."""
        return len(self._of_hash)

    def find(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest known prefix of `hashes`."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._of_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody holds: sharing these makes `free` smaller."""
        refs = self._refs
        return sum(1 for block in blocks if not refs[block])

    def holders(self, block: int) -> int:
        """How many hold it."""
        return self._refs[block]

    def is_hashed(self, block: int) -> bool:
        """Whether it can be found by a hash."""
        return self._hash[block] is not None

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each; they must have a hash or a holder."""
        for block in blocks:
            if not self._refs[block]:
                del self._cached[block]
            self._refs[block] += 1

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one holder each and no hash, or None if there are not enough."""
        if count > self.free:
            return None
        taken: list[int] = []
        for _ in range(count):
            if self._plain:
                block = self._plain.pop()
            else:
                block, _none = self._cached.popitem(last=False)
                self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each, tail first, so that the head of a sequence is evicted last."""
        for block in reversed(blocks):
            refs = self._refs[block] - 1
            if refs < 0:
                raise RuntimeError(f"block {block} was released more often than it was held")
            self._refs[block] = refs
            if not refs:
                if self._hash[block] is None:
                    self._plain.append(block)
                else:
                    self._cached[block] = None

    def confirm(self, block: int, block_hash: BlockHash) -> None:
        """`block` is full, and the instance named it `block_hash`. Of equal blocks the first is found."""
        if not 0 <= block < self.size or not self._refs[block]:
            return
        if block_hash not in self._of_hash:
            self._forget(block)
            self._hash[block] = block_hash
            self._of_hash[block_hash] = block

    def references(self) -> list[int]:
        """Holders of each block."""
        return list(self._refs)

    def _forget(self, block: int) -> None:
        known = self._hash[block]
        if known is not None:
            self._hash[block] = None
            del self._of_hash[known]

    def check(self) -> None:
        """Raises AssertionError where the account contradicts itself."""
        free = set(self._plain) | set(self._cached)
        assert len(free) == len(self._plain) + len(self._cached), "a block is in the free lists twice"
        for block in range(self.size):
            held = self._refs[block] > 0
            assert held != (block in free), (
                f"block {block}: {self._refs[block]} holders, free={block in free}"
            )
            known = self._hash[block]
            if known is not None:
                assert self._of_hash[known] == block, f"block {block} is not found by its hash"
        assert all(self._hash[block] is not None for block in self._cached), "a cached block without a hash"
        assert all(self._hash[block] is None for block in self._plain), "a plain block with a hash"
        assert len(self._of_hash) == sum(known is not None for known in self._hash), "a hash without a block"
