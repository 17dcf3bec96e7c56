"""`Collective` over the compiled transports: shared memory on one host, links to other hosts."""

import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from socket import socket

import numpy as np

from services.worker.collective import abi
from services.worker.collective.library import ALGORITHMS, Setup, library
from services.worker.collective.port import BYTES, F32, GroupLost

MOST_FLOATS = 1 << 20
"""Floats of one rank's messages in flight, if nothing is said: 4 MiB."""
SPIN_US = 20.0
LIMIT_S = 20.0
_TEXT_BYTES = 512


def region_bytes(size: int, most_floats: int = MOST_FLOATS) -> int:
    """Bytes of the memory that `size` ranks of one host share."""
    return int(library().hortator_region_bytes(size, most_floats))


def make_memory(size: int, most_floats: int = MOST_FLOATS) -> int:
    """A file descriptor of fresh memory for one group of `size` ranks, to be inherited by its processes.

    It has no name anywhere and is gone with the last process that has it.
    """
    fd = os.memfd_create("hortator-group", os.MFD_CLOEXEC)
    os.ftruncate(fd, region_bytes(size, most_floats))
    return fd


class NativeCollective:
    """One rank's end of a group. Raises `KernelsUnavailable`, and ValueError for what cannot be a group.

    `memory`: a descriptor of `make_memory`, for the same size and floats on all ranks; it may be closed
    afterwards. `peers`: a connected stream socket to every other rank, owned from now on; no other process may
    hold a copy of it, or the end of a rank goes unnoticed. At least one of the two; sums go by `set_table`,
    before that one-shot through memory, else directly.

    `spin_us`: how long to look before sleeping; 0 where there are more threads that compute than cores.
    `limit_s`: how long to wait for a rank that lives but does not come, before the group is lost.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        memory: int | None,
        peers: Mapping[int, socket] | None = None,
        most_floats: int = MOST_FLOATS,
        spin_us: float = SPIN_US,
        limit_s: float = LIMIT_S,
        cores: Sequence[int] = (),
    ) -> None:
        if not 0 <= rank < size <= abi.MOST_RANKS:
            raise ValueError(f"rank {rank} of {size}: ranks are 0 … size - 1, at most {abi.MOST_RANKS}")
        if memory is None:
            raise ValueError("a group needs memory")
        self.rank, self.size = rank, size
        self._library = library()
        self._text = ctypes.create_string_buffer(_TEXT_BYTES)
        setup = Setup(rank, size, memory, most_floats, spin_us * 1e-6, limit_s)
        self._group: int | None = self._library.hortator_open(setup, self._text, _TEXT_BYTES)
        if self._group is None:
            raise ValueError(f"rank {rank} cannot join: {self._text.value.decode()}")
        self._exchange = abi.Exchange()
        self._library.hortator_exchange(self._group, self._exchange)
        self._losing = threading.Lock()
        self._all_reduce = self._library.hortator_all_reduce

    def exchange(self) -> abi.Exchange:
        """For native passes; valid until `close`."""
        return self._exchange

    def algorithms(self) -> tuple[str, ...]:
        """By which sums can go here."""
        return ALGORITHMS[:2]

    def set_table(self, table: Sequence[tuple[int, str]]) -> None:
        """Sums of at most so many bytes go by that algorithm, ascending; longer ones by the last.

        The same on all ranks, at the same place in the order of messages.
        """
        known = self.algorithms()
        for _, algorithm in table:
            if algorithm not in known:
                raise ValueError(f"no sums by {algorithm!r} in this group, only by {', '.join(known)}")
        most = np.array([limit for limit, _ in table], np.int64)
        chosen = np.array([ALGORITHMS.index(algorithm) for _, algorithm in table], np.int64)
        self._library.hortator_table(self._open(), most.ctypes.data, chosen.ctypes.data, len(table))

    def all_reduce(self, values: F32) -> None:
        if values.dtype != np.float32 or not values.flags.c_contiguous or not values.flags.writeable:
            raise ValueError(f"sums are of contiguous writable float32, not of {values.dtype} {values.flags}")
        if not self._all_reduce(self._open(), values.ctypes.data, values.size):
            raise self._loss()

    def gather(self, mine: BYTES) -> BYTES:
        mine = np.ascontiguousarray(mine, np.uint8)
        every = np.empty((self.size, mine.size), np.uint8)
        into = every.ctypes.data
        if not self._library.hortator_gather(self._open(), mine.ctypes.data, mine.size, into):
            raise self._loss()
        return every

    def check(self) -> None:
        if not self._library.hortator_check(self._open()):
            raise self._loss()

    def abort(self, reason: str) -> None:
        with self._losing:
            if self._group is not None:
                self._library.hortator_lose(self._group, reason.encode()[: _TEXT_BYTES - 1])

    def close(self) -> None:
        """The others' next wait for this rank ends with `GroupLost`. No call of this rank may be under way."""
        with self._losing:
            group, self._group = self._group, None
            if group is not None:
                self._library.hortator_close(group)

    def _open(self) -> int:
        if self._group is None:
            raise GroupLost(f"rank {self.rank} has left its group")
        return self._group

    def _loss(self) -> GroupLost:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._library.hortator_reason(self._open(), text, _TEXT_BYTES)
        return GroupLost(text.value.decode(errors="replace"))
