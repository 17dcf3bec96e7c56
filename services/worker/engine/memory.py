"""Large zeroed memory on huge pages: weights and KV are read from end to end every step, and with small pages
the walk through page tables costs 5-10 % of a decode step."""

import mmap

import torch

HUGE = 2 << 20
_ALIGN = 64


class Arena:
    """`size` bytes handed out in pieces, each aligned to a cache line. Untouched pages cost nothing."""

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        region = mmap.mmap(-1, size + HUGE, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                region.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # the kernel was built without them
        whole = torch.frombuffer(region, dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE
        self._bytes = whole[start : start + size]
        self._used = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` zeros. Raises ValueError when the arena was planned too small."""
        size = count * dtype.itemsize
        begin = self._used
        if begin + size > len(self._bytes):
            raise ValueError(f"arena of {len(self._bytes)} bytes: {size} more wanted, {begin} used")
        self._used = begin + -(-size // _ALIGN) * _ALIGN
        return self._bytes[begin : begin + size].view(dtype)


def room(sizes: list[int]) -> int:
    """Bytes of an arena that holds pieces of these sizes."""
    return sum(-(-size // _ALIGN) * _ALIGN for size in sizes)
