"""The store in memory, for tests and simulated meshes: time is given, `down` plays the outage."""

import time
from collections.abc import Callable, Sequence

from shared.store.index_table import IndexTable
from shared.store.keys import HASH_BYTES
from shared.store.port import LeaseState, StoreDown, SweepSlice, number_of, row_of

SLICE_BLOCKS = 500


class MemoryStore:
    """`Store` for one process. `clock` returns seconds; `flush` is FLUSHALL."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.down = False
        self._begun = 0
        self.flush()

    def flush(self) -> None:
        """Forget everything, as a restarted Redis without persistence does."""
        self._epochs: dict[str, tuple[int, str]] = {}
        self._leases: dict[str, tuple[float, tuple[int, str]]] = {}
        self._holds: dict[str, tuple[float, str]] = {}
        self._records: dict[tuple[str, str], tuple[float, bytes]] = {}
        self._tables: dict[str, IndexTable] = {}
        self._rows: dict[tuple[str, int], int] = {}
        # (model, number) → the row that has it, or had it last
        self._blocks: dict[str, dict[bytes, set[int]]] = {}
        self._to_sweep: dict[str, list[bytes]] = {}

    async def ping(self) -> None:
        self._reach()

    async def close(self) -> None:
        pass

    async def read_lease(self, model: str) -> LeaseState:
        self._reach()
        expires, holder = self._leases.get(model, (0.0, None))
        alive = holder if holder is not None and self._clock() < expires else None
        return LeaseState(self._epochs.get(model, (0, ""))[0], alive)

    async def write_lease(self, model: str, epoch: int, owner: str, ttl_s: float) -> bool:
        self._reach()
        highest, by = self._epochs.get(model, (0, ""))
        if epoch < highest or (epoch == highest and by and owner > by):
            return False
        self._epochs[model] = (epoch, owner)
        self._leases[model] = (self._clock() + ttl_s, (epoch, owner))
        return True

    async def release_lease(self, model: str, epoch: int, owner: str) -> None:
        self._reach()
        if self._leases.get(model, (0.0, None))[1] == (epoch, owner):
            del self._leases[model]

    async def hold(self, name: str, owner: str, ttl_s: float) -> bool:
        self._reach()
        expires, holder = self._holds.get(name, (0.0, ""))
        if holder != owner and self._clock() < expires:
            return False
        self._holds[name] = (self._clock() + ttl_s, owner)
        return True

    async def let_go(self, name: str, owner: str) -> None:
        self._reach()
        if self._holds.get(name, (0.0, ""))[1] == owner:
            del self._holds[name]

    async def put_instance(self, model: str, instance: str, record: bytes, ttl_s: float) -> None:
        self._reach()
        self._records[(model, instance)] = (self._clock() + ttl_s, record)

    async def list_instances(self, model: str) -> dict[str, bytes]:
        self._reach()
        now = self._clock()
        return {
            i: record for (m, i), (expires, record) in self._records.items() if m == model and now < expires
        }

    async def drop_instance(self, model: str, instance: str) -> None:
        self._reach()
        self._records.pop((model, instance), None)

    async def index_begin(self, model: str, instance: str, born: int) -> int:
        self._reach()
        self._tables[model], number = self._table(model).begin(instance, born)
        self._begun += 1
        row = self._rows[model, number] = row_of(number, self._begun)
        return row

    async def index_retire(self, model: str, instance: str) -> None:
        self._reach()
        self._tables[model] = self._table(model).retire(instance)

    async def index_rows(self, model: str) -> dict[str, int]:
        self._reach()
        return self._table(model).numbers()

    async def index_add(self, model: str, row: int, hashes: Sequence[bytes]) -> bool:
        if not self._is_row(model, row):
            return False
        blocks = self._blocks.setdefault(model, {})
        for block in _cut(hashes):
            blocks.setdefault(block, set()).add(number_of(row))
        return True

    async def index_remove(self, model: str, row: int, hashes: Sequence[bytes]) -> bool:
        if not self._is_row(model, row):
            return False
        number = number_of(row)
        blocks = self._blocks.setdefault(model, {})
        for block in _cut(hashes):
            if (holders := blocks.get(block)) is not None:
                holders.discard(number)
                if not holders:
                    del blocks[block]
        return True

    async def index_sweep(self, model: str, cursor: int) -> SweepSlice:
        self._reach()
        blocks = self._blocks.setdefault(model, {})
        if cursor == 0:
            self._tables[model] = self._table(model).sweep_begins()
            self._to_sweep[model] = list(blocks)
        live = set(self._table(model).owners())
        waiting = self._to_sweep.get(model, [])
        names, self._to_sweep[model] = waiting[:SLICE_BLOCKS], waiting[SLICE_BLOCKS:]
        deleted = 0
        for name in names:
            if name in blocks:
                blocks[name] &= live
                if not blocks[name]:
                    del blocks[name]
                    deleted += 1
        if not self._to_sweep[model]:
            self._tables[model] = self._table(model).sweep_ends()
        return SweepSlice(len(self._to_sweep[model]), len(names) - deleted, deleted)

    async def longest_prefix(self, model: str, hashes: Sequence[bytes]) -> dict[str, int]:
        self._reach()
        depths: dict[str, int] = {}
        hashes, blocks = _cut(hashes), self._blocks.get(model, {})
        for number, instance in self._table(model).owners().items():
            depth = 0
            while depth < len(hashes) and number in blocks.get(hashes[depth], ()):
                depth += 1
            if depth:
                depths[instance] = depth
        return depths

    def _is_row(self, model: str, row: int) -> bool:
        self._reach()
        number = number_of(row)
        return number in self._table(model).owners() and self._rows.get((model, number)) == row

    def _table(self, model: str) -> IndexTable:
        return self._tables.get(model, IndexTable())

    def _reach(self) -> None:
        if self.down:
            raise StoreDown("the store was told to be down")


def _cut(hashes: Sequence[bytes]) -> list[bytes]:
    return [block[:HASH_BYTES] for block in hashes]
