"""Large zeroed memory on huge pages: weights and KV are read from end to end every step, and with small pages
the walk through page tables costs 5-10 % of a decode step."""

import ctypes
import errno
import mmap
import os
from ctypes import c_size_t, c_void_p

import torch

from services.worker.engine.resident import resident_in
from services.worker.memory.served import ALIGN

HUGE = 2 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)  # its calls let other threads go on, those of `mmap` do not
_POPULATE_WRITE = 23
# MADV_POPULATE_WRITE, which Python's mmap does not name before 3.13.


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
        self._used = begin + -(-size // ALIGN) * ALIGN
        return self._bytes[begin : begin + size].view(dtype)

    @property
    def resident_bytes(self) -> int:
        """Of the bytes that were asked for, those that the system has given a page by now."""
        return resident_in(self._bytes.data_ptr(), len(self._bytes))

    def populate(self) -> None:
        """Have every page now; what is written stays. Raises ValueError where the system has not so many.

        Other threads go on meanwhile: large memories take seconds.
        """
        page = mmap.PAGESIZE
        size = -(-len(self._bytes) // page) * page
        if _LIBC.madvise(c_void_p(self._bytes.data_ptr()), c_size_t(size), _POPULATE_WRITE) == 0:
            return
        code = ctypes.get_errno()
        if code in (errno.ENOMEM, errno.EFAULT):
            raise ValueError(f"{len(self._bytes)} bytes of memory cannot be had ({os.strerror(code)})")
        self._bytes[::page].add_(0)  # kernels before 5.14 have no such advice
