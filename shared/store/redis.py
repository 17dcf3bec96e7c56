"""The store on Redis or Valkey. The only module of the project that knows redis-py.

No retries inside the client (its defaults cost 3.8 s a call when the server is down); a failure opens a short
break in which calls fail at once, so that a black-holed server costs one time-out and not one per call.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
import redis.exceptions
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from shared.store import keys, scripts
from shared.store.index_table import IndexTable, decode_table, encode_table, prefix_depths
from shared.store.port import MAX_NUMBERS, LeaseState, StoreDenied, StoreDown, SweepSlice, number_of, row_of

log = structlog.get_logger()

BREAK_S = 0.25
MAX_CONNECTIONS = 8
WRITE_SLICE = 256
"""Blocks per script call: the server serves nobody else meanwhile, so a slice stays well below 1 ms."""
SWEEP_SLICE = 200
_SWAP_ATTEMPTS = 20
_TOKEN_BITS = 40
"""A row stays below 2^53, which every language's numbers hold."""


class RedisStore:
    """`Store` on `url` (redis://[user:password@]host:port/db or unix://path). Connects on first use."""

    def __init__(self, url: str, *, timeout_s: float = 0.5) -> None:
        # Callers beyond `MAX_CONNECTIONS` wait their turn instead of failing.
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            max_connections=MAX_CONNECTIONS,
            client_name="hortator",
        )
        self._client: Any = redis.asyncio.Redis.from_pool(pool)
        script = self._client.register_script
        self._write_lease = script(scripts.WRITE_LEASE)
        self._release = script(scripts.RELEASE)
        self._hold = script(scripts.HOLD)
        self._swap = script(scripts.SWAP_TABLE)
        self._add = script(scripts.ADD)
        self._remove = script(scripts.REMOVE)
        self._sweep = script(scripts.SWEEP)
        self._down_until = 0.0
        self._down_reason = ""
        self._owners: dict[str, tuple[bytes | None, dict[int, str]]] = {}

    async def ping(self) -> None:
        async with self._reach():
            await self._client.ping()

    async def close(self) -> None:
        await self._client.aclose()

    async def read_lease(self, model: str) -> LeaseState:
        async with self._reach():
            highest, lease = await self._client.mget(keys.epoch(model), keys.lease(model))
        highest_epoch, _ = _fence(highest) or (0, "")
        return LeaseState(highest_epoch, _fence(lease))

    async def write_lease(self, model: str, epoch: int, owner: str, ttl_s: float) -> bool:
        async with self._reach():
            return bool(
                await self._write_lease(
                    keys=[keys.lease(model), keys.epoch(model)],
                    args=[epoch, owner, _ms(ttl_s), keys.EPOCH_TTL_S],
                )
            )

    async def release_lease(self, model: str, epoch: int, owner: str) -> None:
        async with self._reach():
            await self._release(keys=[keys.lease(model)], args=[f"{epoch} {owner}"])

    async def hold(self, name: str, owner: str, ttl_s: float) -> bool:
        async with self._reach():
            return bool(await self._hold(keys=[keys.hold(name)], args=[owner, _ms(ttl_s)]))

    async def let_go(self, name: str, owner: str) -> None:
        async with self._reach():
            await self._release(keys=[keys.hold(name)], args=[owner])

    async def put_instance(self, model: str, instance: str, record: bytes, ttl_s: float) -> None:
        async with self._reach(), self._client.pipeline(transaction=False) as pipe:
            pipe.set(keys.instance(model, instance), record, px=_ms(ttl_s))
            pipe.sadd(keys.instances(model), instance)
            pipe.expire(keys.instances(model), keys.TABLE_TTL_S)
            await pipe.execute()

    async def list_instances(self, model: str) -> dict[str, bytes]:
        async with self._reach():
            found = await self._client.smembers(keys.instances(model))
            names = sorted(name.decode() for name in found if name.isascii())
            if not names:
                return {}
            records = await self._client.mget([keys.instance(model, name) for name in names])
            gone = [name for name, record in zip(names, records, strict=True) if record is None]
            if gone:
                await self._client.srem(keys.instances(model), *gone)
        return {name: record for name, record in zip(names, records, strict=True) if record is not None}

    async def drop_instance(self, model: str, instance: str) -> None:
        async with self._reach(), self._client.pipeline(transaction=False) as pipe:
            pipe.delete(keys.instance(model, instance))
            pipe.srem(keys.instances(model), instance)
            await pipe.execute()

    async def index_begin(self, model: str, instance: str, born: int) -> int:
        token = secrets.randbits(_TOKEN_BITS)
        numbers: list[int] = []

        def begin(table: IndexTable) -> IndexTable:
            changed, number = table.begin(instance, born)
            numbers[:] = [number]
            return changed

        await self._change_table(model, begin, lambda: [numbers[0], token])
        return row_of(numbers[0], token)

    async def index_retire(self, model: str, instance: str) -> None:
        await self._change_table(model, lambda table: table.retire(instance))

    async def index_rows(self, model: str) -> dict[str, int]:
        async with self._reach():
            return decode_table(await self._table(model)).numbers()

    async def index_add(self, model: str, row: int, hashes: Sequence[bytes]) -> bool:
        return await self._write_blocks(self._add, model, hashes, [*_number_token(row), keys.BLOCK_TTL_S])

    async def index_remove(self, model: str, row: int, hashes: Sequence[bytes]) -> bool:
        return await self._write_blocks(self._remove, model, hashes, _number_token(row))

    async def index_sweep(self, model: str, cursor: int) -> SweepSlice:
        if cursor == 0:
            await self._change_table(model, IndexTable.sweep_begins)
        async with self._reach():
            pattern = keys.block_prefix(model) + b"*"
            after, found = await self._client.scan(cursor, match=pattern, count=SWEEP_SLICE)
            deleted = 0
            if found:
                deleted = await self._sweep(keys=[keys.live(model), *found], args=[keys.BLOCK_TTL_S])
        if after == 0:
            await self._change_table(model, IndexTable.sweep_ends)
        return SweepSlice(after, len(found) - deleted, deleted)

    async def longest_prefix(self, model: str, hashes: Sequence[bytes]) -> dict[str, int]:
        async with self._reach():
            raw, *bitmaps = await self._mget(keys.index(model).encode(), keys.block_prefix(model), hashes)
        known, owners = self._owners.get(model, (None, {}))
        if raw != known:
            owners = decode_table(raw).owners()
            self._owners[model] = (raw, owners)
        return prefix_depths(bitmaps, owners)

    async def _mget(self, first: bytes, prefix: bytes, hashes: Sequence[bytes]) -> list[bytes | None]:
        """MGET of `first` and the blocks. The command is written by hand: packing 1,000 keys one by one in
        the client costs ten times what the server takes for the whole command."""
        size = keys.HASH_BYTES
        block = b"\r\n$%d\r\n%b" % (len(prefix) + size, prefix)
        parts = [b"*%d\r\n$4\r\nMGET\r\n$%d\r\n%b" % (len(hashes) + 2, len(first), first)]
        parts += [h[:size] for h in hashes]
        pool = self._client.connection_pool
        connection = await pool.get_connection()
        try:
            await connection.send_packed_command(block.join(parts) + b"\r\n")
            return await connection.read_response()
        except BaseException:
            # An answer may still be under way; it must not meet the next command.
            await connection.disconnect(nowait=True)
            raise
        finally:
            await pool.release(connection)

    async def _write_blocks(self, script: Any, model: str, hashes: Sequence[bytes], args: list[int]) -> bool:
        prefix, row = keys.block_prefix(model), [keys.live(model), keys.rows(model)]
        async with self._reach():
            for start in range(0, max(1, len(hashes)), WRITE_SLICE):
                blocks = [prefix + h[: keys.HASH_BYTES] for h in hashes[start : start + WRITE_SLICE]]
                if not await script(keys=[*row, *blocks], args=args):
                    return False
        return True

    async def _table(self, model: str) -> bytes:
        # MGET passes over what is no string, where GET would fail until it expires.
        (raw,) = await self._client.mget(keys.index(model))
        return raw or b""

    async def _numbers(self, model: str) -> list[int]:
        """Numbers that were in use when the table alone got lost: bitmaps still carry them."""
        try:
            fields = await self._client.hkeys(keys.rows(model))
        except redis.exceptions.ResponseError:
            return []
        return sorted({int(field) for field in fields if field.isdigit() and int(field) < MAX_NUMBERS})

    async def _change_table(
        self,
        model: str,
        change: Callable[[IndexTable], IndexTable],
        row: Callable[[], list[int]] = list,
    ) -> None:
        """`row`: number and token of the row that the change begins."""
        where = [keys.index(model), keys.live(model), keys.rows(model)]
        for _ in range(_SWAP_ATTEMPTS):
            async with self._reach():
                raw = await self._table(model)
                table = decode_table(raw)
                if table == IndexTable():
                    table = IndexTable(retired=[(number, 0) for number in await self._numbers(model)])
            table = change(table)
            async with self._reach():
                args: list[Any] = [raw, encode_table(table), table.live_bits(), keys.TABLE_TTL_S, *row()]
                if await self._swap(keys=where, args=args):
                    return
        raise StoreDown(f"the index table of {model} is changed by others all the time")

    @asynccontextmanager
    async def _reach(self) -> AsyncIterator[None]:
        if time.monotonic() < self._down_until:
            raise StoreDown(self._down_reason)
        task = asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        try:
            yield
        except redis.exceptions.NoPermissionError as error:
            log.error("redis denies a command: check the access list of this user", error=str(error))
            raise StoreDenied(str(error)) from None
        except (redis.exceptions.RedisError, OSError) as error:
            self._down_reason = f"{type(error).__name__}: {error}"
            if not isinstance(error, redis.exceptions.ResponseError):
                self._down_until = time.monotonic() + BREAK_S
                # A server that restarted has closed the other idle connections as well.
                await self._client.connection_pool.disconnect(inuse_connections=False)
            raise StoreDown(self._down_reason) from None
        finally:
            # redis-py sends within `asyncio.wait_for`, which in Python 3.11 forgets a cancellation that comes
            # as the bytes have just gone; the task would go on for ever.
            if task and task.cancelling() > cancelled:
                raise asyncio.CancelledError


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _number_token(row: int) -> list[int]:
    return [number_of(row), row // MAX_NUMBERS]


def _fence(raw: bytes | None) -> tuple[int, str] | None:
    """None for nothing, and for what no scheduler wrote."""
    epoch, _, owner = (raw or b"").partition(b" ")
    try:
        return int(epoch), owner.decode()
    except ValueError:
        return None
