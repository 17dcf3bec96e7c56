"""What services need of the shared store. Two implementations: `memory` (tests) and `redis`.

Everything here may be forgotten at any moment; nothing may depend on it but speed (design §2). Every call
raises `StoreDown` quickly while the store is away.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_NUMBERS = 4096
"""Instance numbers per model, live and not yet swept ones together; a bitmap has at most 512 bytes."""


def row_of(number: int, token: int) -> int:
    """A row of the index: its number in the bitmaps, and a token by which nobody else's row with the same
    number (after a flush, or a sweep) is taken for it."""
    return token * MAX_NUMBERS + number


def number_of(row: int) -> int:
    return row % MAX_NUMBERS


class StoreDown(ConnectionError):
    """The store cannot be used now; what was asked may or may not have happened."""


class StoreDenied(StoreDown):
    """The store's access list refuses the command: a deployment fault, not an outage."""


class IndexFull(RuntimeError):
    """No instance number is free until a sweep has finished."""


@dataclass(frozen=True)
class LeaseState:
    """Leadership as the store knows it. `holder` is None once the lease has lapsed or was released."""

    highest_epoch: int
    """Highest epoch ever written, 0 when none is known (or the store was flushed)."""
    holder: tuple[int, str] | None
    """(epoch, owner) of the live lease."""


@dataclass(frozen=True)
class SweepSlice:
    """One slice of a sweep. `cursor` goes into the next call; 0: the sweep is complete."""

    cursor: int
    kept: int
    deleted: int


class Store(Protocol):
    async def ping(self) -> None: ...

    async def close(self) -> None: ...

    # --- leadership of the scheduler -----------------------------------------------------------------

    async def read_lease(self, model: str) -> LeaseState: ...

    async def write_lease(self, model: str, epoch: int, owner: str, ttl_s: float) -> bool:
        """Take or renew. False, and nothing changes, when (epoch, owner) ranks below the highest ever written
        (lower epoch; or equal epoch and the other owner is the smaller string)."""

    async def release_lease(self, model: str, epoch: int, owner: str) -> None:
        """Give up the lease if it is ours; the highest epoch stays."""

    # --- duties that one process of a service has at a time ------------------------------------------------

    async def hold(self, name: str, owner: str, ttl_s: float) -> bool:
        """Take or renew duty `name`; False while another owner has it."""

    async def let_go(self, name: str, owner: str) -> None: ...

    # --- health of instances --------------------------------------------------------------------------------

    async def put_instance(self, model: str, instance: str, record: bytes, ttl_s: float) -> None: ...

    async def list_instances(self, model: str) -> dict[str, bytes]:
        """Records that have not expired, by instance."""

    async def drop_instance(self, model: str, instance: str) -> None: ...

    # --- prefix index: which instance holds which block -----------------------------------------------------

    async def index_begin(self, model: str, instance: str, born: int) -> int:
        """An empty row for (instance, born) under a fresh number; what was known of the instance is forgotten
        at once. Returns what the row is named by when it is changed (`row_of`). Raises `IndexFull`."""

    async def index_retire(self, model: str, instance: str) -> None:
        """Forget the instance at once. Idempotent."""

    async def index_rows(self, model: str) -> dict[str, int]:
        """Number in the bitmaps of each instance that has a row, as lookups see them."""

    async def index_add(self, model: str, row: int, hashes: Sequence[bytes]) -> bool:
        """False, and nothing is kept, when there is no such row (any more): the store was flushed, or the row
        retired. The caller then begins anew. No hashes: only asks whether it is there."""

    async def index_remove(self, model: str, row: int, hashes: Sequence[bytes]) -> bool: ...

    async def index_sweep(self, model: str, cursor: int) -> SweepSlice:
        """Clear retired numbers from a slice of the bitmaps and extend the lives of the rest. Cursor 0 begins
        a sweep; when one is complete, numbers retired before it began may be given anew. One sweeper at a
        time."""

    async def longest_prefix(self, model: str, hashes: Sequence[bytes]) -> dict[str, int]:
        """Of a chain of block hashes, how many leading blocks each instance holds; those with none are left
        out. One round trip."""
