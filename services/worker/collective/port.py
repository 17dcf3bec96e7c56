"""The protocol every transport speaks, and the group of one rank."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.worker.collective import abi

F32 = NDArray[np.float32]
BYTES = NDArray[np.uint8]


class GroupLost(RuntimeError):
    """A rank has ended or cannot be reached, so that nothing can be computed any more; it is named."""


class Collective(Protocol):
    """One rank's end of a group.

    Called by one thread at a time, and in the same order with the same sizes by every rank. Every call may
    raise `GroupLost`: within a second of another rank's death, never later.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self) -> abi.Exchange | None:
        """For native passes; None of a group of one. Valid as long as this object is open."""

    def all_reduce(self, values: F32) -> None:
        """Replace `values`, contiguous, by the sum over all ranks: the same bits everywhere."""

    def gather(self, mine: BYTES) -> BYTES:
        """[size, len(mine)]: what every rank gave, by rank. `mine` is equally long on all of them."""

    def check(self) -> None:
        """Raise `GroupLost` if the group is."""

    def abort(self, reason: str) -> None:
        """From any thread: the group is lost, for `reason`; whoever waits in it stops waiting."""

    def close(self) -> None: ...


class Loopback:
    """`Collective` of a group of one rank."""

    rank, size = 0, 1

    def exchange(self) -> abi.Exchange | None:
        return None

    def all_reduce(self, values: F32) -> None:
        pass

    def gather(self, mine: BYTES) -> BYTES:
        return mine[None].copy()

    def check(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


LOOPBACK = Loopback()
