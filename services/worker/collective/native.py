"""`Collective` over the compiled transports: shared memory on one host, links to other hosts."""

import ctypes
import math
import os
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from socket import socket

import numpy as np

from services.worker.collective import abi
from services.worker.collective.library import ALGORITHMS, Count, Setup, library
from services.worker.collective.port import BYTES, F32, GroupLost

MOST_FLOATS = 1 << 20
"""Floats of one rank's messages in flight, if nothing is said: 4 MiB."""
SPIN_US = 20.0
LIMIT_S = 20.0
_IN_MEMORY, _OVER_LINKS = ALGORITHMS[:2], ALGORITHMS[2:]
_TEXT_BYTES = 512


@dataclass(frozen=True)
class Carried:
    """What went by one algorithm so far."""

    messages: int
    bytes: int
    """Of this rank's own parts."""
    exposed_s: float
    """Seconds this rank waited for messages to land."""


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
    afterwards. `peers`: a connected stream socket to every other rank, owned from now on; no other process
    may hold a copy of its own end, or that the rank has ended goes unnoticed. One of the two is enough; sums
    go by `set_table`, before that one-shot through memory, else directly.

    `most_floats`: of a message, and of all in flight at once. `spin_us`: how long to look before sleeping; 0
    where there are more threads that compute than cores. `limit_s`: how long to wait for a rank that lives
    but does not come, before the group is lost. `cores`: that the links' threads run on; anywhere if empty.
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
        if not 0 <= rank < size or not 2 <= size <= abi.MOST_RANKS:
            raise ValueError(
                f"rank {rank} of {size}: a group has 2 to {abi.MOST_RANKS} ranks, numbered from 0"
            )
        if most_floats < 1:
            raise ValueError(f"{most_floats} floats in flight: at least one is needed")
        peers = peers or {}
        others = set(range(size)) - {rank}
        if peers and set(peers) != others:
            raise ValueError(f"rank {rank} of {size} needs a socket to each of {others}, not to {set(peers)}")
        if memory is None and not peers:
            raise ValueError(f"rank {rank} of {size} has neither memory nor sockets to reach the others")
        self.rank, self.size = rank, size
        self._algorithms = (_IN_MEMORY if memory is not None else ()) + (_OVER_LINKS if peers else ())
        self._library = library()
        self._losing = threading.Lock()
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        sockets = (ctypes.c_int32 * size)(*(peers[r].detach() if r in peers else -1 for r in range(size)))
        setup = Setup(
            rank=rank,
            size=size,
            memory=-1 if memory is None else memory,
            peer=sockets if peers else None,
            most_floats=most_floats,
            spin_s=spin_us * 1e-6,
            limit_s=limit_s,
            core=(ctypes.c_int32 * len(cores))(*cores),
            cores=len(cores),
        )
        self._group: int | None = self._library.hortator_open(setup, text, _TEXT_BYTES)
        if self._group is None:
            raise ValueError(f"rank {rank} cannot join its group: {text.value.decode(errors='replace')}")
        self._exchange = abi.Exchange()
        self._library.hortator_exchange(self._group, self._exchange)
        self._all_reduce = self._library.hortator_all_reduce

    def exchange(self) -> abi.Exchange:
        """For native passes; valid until `close`."""
        return self._exchange

    def algorithms(self) -> tuple[str, ...]:
        """By which sums can go here: the same on all ranks."""
        return self._algorithms

    def set_table(self, table: Sequence[tuple[int, str]]) -> None:
        """Sums of at most so many bytes go by that algorithm, ascending; longer ones by the last.

        Given to all ranks at the same place in the order of messages.
        """
        codes = [self._code(algorithm) for _, algorithm in table]
        most = np.array([limit for limit, _ in table], np.int64)
        chosen = np.array(codes, np.int64)
        self._library.hortator_table(self._open(), most.ctypes.data, chosen.ctypes.data, len(table))

    def set_limit(self, limit_s: float) -> None:
        """How long to wait, from now on, for a rank that lives but does not come: ranks may differ in it."""
        self._library.hortator_limit(self._open(), limit_s)

    def time(self, algorithm: str, floats: int, repeats: int) -> tuple[float, float]:
        """(least, median) seconds of a sum, adding included, each of `repeats` the mean of eight in a row.

        All ranks call it alike, with nothing in flight.
        """
        took_s = np.empty(repeats)
        code = self._code(algorithm)
        if not self._library.hortator_time(self._open(), code, floats, repeats, took_s.ctypes.data):
            raise self._loss()
        return float(took_s.min()), statistics.median(took_s.tolist())

    def carried(self) -> dict[str, Carried]:
        """By algorithm, of those that carried anything."""
        return {
            algorithm: Carried(count.messages, count.bytes, count.exposed_s)
            for algorithm, count in zip(ALGORITHMS, self._counts(anew=False))
            if count.messages
        }

    def busy_s(self) -> float:
        """Seconds in which at least one message was under way on the links."""
        return float(self._library.hortator_busy(self._open()))

    def drift(self) -> dict[str, dict[int, float]]:
        """By algorithm: c → least seconds that messages of 2^c … 2^(c+1) - 1 bytes took, since the last call.

        From when the last rank began one until it was here; the last rank itself does not count it, as it
        finds the others' parts waiting. When ranks on other hosts began is not known: so believe the greatest
        of all ranks' figures.
        """
        return {
            algorithm: {c: s for c, s in enumerate(count.fastest_s) if math.isfinite(s)}
            for algorithm, count in zip(ALGORITHMS, self._counts(anew=True))
            if count.messages
        }

    def all_reduce(self, values: F32) -> None:
        flags = values.flags
        if values.dtype != np.float32 or not flags.c_contiguous or not flags.writeable:
            raise ValueError(f"sums are of contiguous writable float32, not of {values.dtype} with {flags}")
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
                self._library.hortator_lose(self._group, reason.encode())

    def close(self) -> None:
        """The others lose the group when they next wait for this rank. No call may be under way here."""
        with self._losing:
            group, self._group = self._group, None
            if group is not None:
                self._library.hortator_close(group)

    def _code(self, algorithm: str) -> int:
        if algorithm not in self._algorithms:
            raise ValueError(f"no sums by {algorithm!r} in this group, only by {', '.join(self._algorithms)}")
        return ALGORITHMS.index(algorithm)

    def _counts(self, anew: bool) -> Sequence[Count]:
        counts = (Count * len(ALGORITHMS))()
        self._library.hortator_counts(self._open(), counts, anew)
        return list(counts)

    def _open(self) -> int:
        if self._group is None:
            raise GroupLost(f"rank {self.rank} has left its group")
        return self._group

    def _loss(self) -> GroupLost:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._library.hortator_reason(self._open(), text, _TEXT_BYTES)
        return GroupLost(text.value.decode(errors="replace"))
