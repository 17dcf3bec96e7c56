"""What every store must do, on the in-memory twin and on a real Valkey or Redis server."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Iterator

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.store import keys
from shared.store.index_table import IndexTable, decode_table, encode_table, prefix_depths
from shared.store.memory import MemoryStore
from shared.store.port import MAX_NUMBERS, IndexFull, LeaseState, Store, StoreDown, number_of
from shared.store.redis import RedisStore
from tests.support.servers import RunningServer, redis_server

ACL = "user default off\nuser mesh on >pw ~hortator:* +@read +@write +@connection +@scripting -@dangerous"
"""What a service may do in a mesh; the suite passes with no more than this."""


def block(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


CHAIN = [block(i) for i in range(1000)]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with redis_server(ACL) as running:
        yield running


_models = iter(range(10_000))


@pytest.fixture
def model() -> str:
    """A model name of its own for each test, so that tests share the server but not keys."""
    return f"model.{next(_models)}*"


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.servers)])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    running = request.getfixturevalue("server")
    real = RedisStore(f"redis://mesh:pw@127.0.0.1:{running.port}/0")
    yield real
    await real.close()


async def sweep(store: Store, model: str) -> tuple[int, int]:
    """A whole sweep; (kept, deleted)."""
    kept = deleted = cursor = 0
    while True:
        part = await store.index_sweep(model, cursor)
        kept, deleted, cursor = kept + part.kept, deleted + part.deleted, part.cursor
        if cursor == 0:
            return kept, deleted


# --- leadership ---------------------------------------------------------------------------------------------


async def test_an_unknown_model_has_no_leader_and_no_epoch(store: Store, model: str) -> None:
    assert await store.read_lease(model) == LeaseState(0, None)


async def test_a_lower_epoch_or_an_equal_one_of_a_larger_owner_cannot_take_the_lease(
    store: Store, model: str
) -> None:
    assert await store.write_lease(model, 10, "m", 60)
    assert not await store.write_lease(model, 9, "a", 60)
    assert not await store.write_lease(model, 10, "n", 60)
    assert await store.read_lease(model) == LeaseState(10, (10, "m"))
    assert await store.write_lease(model, 10, "m", 60)
    assert await store.write_lease(model, 10, "a", 60)
    assert await store.write_lease(model, 11, "z", 60)
    assert await store.read_lease(model) == LeaseState(11, (11, "z"))


async def test_the_highest_epoch_outlives_the_lease(store: Store, model: str) -> None:
    await store.write_lease(model, 5, "a", 0.02)
    await asyncio.sleep(0.05)  # the lease's own time to live is what is tested
    assert await store.read_lease(model) == LeaseState(5, None)
    assert not await store.write_lease(model, 4, "b", 60)


async def test_only_the_holder_releases_the_lease(store: Store, model: str) -> None:
    await store.write_lease(model, 5, "a b", 60)
    await store.release_lease(model, 5, "b")
    await store.release_lease(model, 4, "a b")
    assert (await store.read_lease(model)).holder == (5, "a b")
    await store.release_lease(model, 5, "a b")
    assert await store.read_lease(model) == LeaseState(5, None)


async def test_a_duty_has_one_holder_until_it_lets_go_or_lapses(store: Store, model: str) -> None:
    assert await store.hold(model, "a", 60)
    assert await store.hold(model, "a", 0.02)
    assert not await store.hold(model, "b", 60)
    await store.let_go(model, "b")
    assert not await store.hold(model, "b", 60)
    await asyncio.sleep(0.05)
    assert await store.hold(model, "b", 60)
    await store.let_go(model, "b")
    assert await store.hold(model, "a", 60)


# --- instances ----------------------------------------------------------------------------------------------


async def test_instance_records_are_listed_until_they_expire_or_are_dropped(store: Store, model: str) -> None:
    assert await store.list_instances(model) == {}
    await store.put_instance(model, "w0", b"zero", 60)
    await store.put_instance(model, "w1", b"one", 60)
    await store.put_instance(model, "w1", b"new", 60)
    await store.put_instance(model, "w2", b"short", 0.02)
    await asyncio.sleep(0.05)
    assert await store.list_instances(model) == {"w0": b"zero", "w1": b"new"}
    await store.drop_instance(model, "w0")
    await store.drop_instance(model, "w0")
    assert await store.list_instances(model) == {"w1": b"new"}
    assert await store.list_instances(model + "x") == {}


# --- prefix index -------------------------------------------------------------------------------------------


async def test_a_lookup_tells_how_far_each_instance_holds_the_chain_without_a_gap(
    store: Store, model: str
) -> None:
    first = await store.index_begin(model, "w0", 1)
    second = await store.index_begin(model, "w1", 1)
    await store.index_begin(model, "w2", 1)
    assert await store.index_add(model, first, CHAIN[:1000])
    assert await store.index_add(model, second, CHAIN[:3])
    assert await store.index_add(model, second, CHAIN[4:])
    assert await store.longest_prefix(model, CHAIN) == {"w0": 1000, "w1": 3}
    assert await store.longest_prefix(model, CHAIN[:2]) == {"w0": 2, "w1": 2}
    assert await store.longest_prefix(model, [block(-1), *CHAIN]) == {}
    assert await store.longest_prefix(model, []) == {}
    assert await store.index_remove(model, first, [CHAIN[1], block(-1)])
    assert await store.longest_prefix(model, CHAIN) == {"w0": 1, "w1": 3}
    assert await store.longest_prefix(model + "x", CHAIN) == {}


async def test_blocks_whose_first_16_bytes_are_equal_are_one_entry(store: Store, model: str) -> None:
    # So an answer is a hint: whoever acts on it compares all 32 bytes where the block lies.
    row = await store.index_begin(model, "w0", 1)
    other = CHAIN[0][:16] + bytes(16)
    await store.index_add(model, row, [other])
    assert await store.longest_prefix(model, CHAIN) == {"w0": 1}
    await store.index_remove(model, row, CHAIN[:1])
    assert await store.longest_prefix(model, [other]) == {}


async def test_a_new_life_of_an_instance_starts_empty_and_its_old_number_is_refused(
    store: Store, model: str
) -> None:
    old = await store.index_begin(model, "w0", 1)
    await store.index_add(model, old, CHAIN[:5])
    new = await store.index_begin(model, "w0", 2)
    assert new != old
    assert await store.longest_prefix(model, CHAIN) == {}
    assert not await store.index_add(model, old, CHAIN[:5])
    assert not await store.index_remove(model, old, CHAIN[:5])
    await store.index_add(model, new, CHAIN[:2])
    assert await store.longest_prefix(model, CHAIN) == {"w0": 2}


async def test_a_number_is_given_anew_only_after_a_sweep_that_began_after_it_retired(
    store: Store, model: str
) -> None:
    old = await store.index_begin(model, "dead", 1)
    await store.index_add(model, old, CHAIN[:700])
    assert await store.index_rows(model) == {"dead": number_of(old)}
    await store.index_retire(model, "dead")
    await store.index_retire(model, "dead")
    assert await store.index_rows(model) == {}
    kept = await store.index_begin(model, "w0", 1)
    await store.index_add(model, kept, CHAIN[:600])
    assert number_of(kept) != number_of(old)
    assert await sweep(store, model) == (600, 100)
    heir = await store.index_begin(model, "heir", 1)
    assert number_of(heir) == number_of(old)
    assert await store.longest_prefix(model, CHAIN) == {"w0": 600}
    await store.index_add(model, heir, CHAIN[:1])
    assert await store.longest_prefix(model, CHAIN) == {"w0": 600, "heir": 1}
    # Whoever still writes for the dead one writes into nobody's row.
    assert not await store.index_add(model, old, CHAIN[1:5])
    assert not await store.index_remove(model, old, CHAIN[:1])
    assert await store.longest_prefix(model, CHAIN) == {"w0": 600, "heir": 1}


async def test_removing_the_last_holder_leaves_nothing_to_sweep(store: Store, model: str) -> None:
    number = await store.index_begin(model, "w0", 1)
    await store.index_add(model, number, CHAIN[:300])
    await store.index_remove(model, number, CHAIN[:300])
    assert await sweep(store, model) == (0, 0)


async def test_two_writers_that_begin_at_once_get_different_numbers(store: Store, model: str) -> None:
    rows = await asyncio.gather(*(store.index_begin(model, f"w{i}", 1) for i in range(10)))
    assert sorted(number_of(row) for row in rows) == list(range(10))


async def test_lookups_agree_with_the_twin_after_random_changes(store: Store, model: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    twin = MemoryStore()
    rows: dict[str, tuple[int, int]] = {}
    for _ in range(300):
        name = f"w{rng.randrange(20)}"
        move = rng.choice(["add", "add", "add", "remove", "begin", "retire", "sweep"])
        start = rng.randrange(30)
        some = CHAIN[start : start + rng.randrange(30)]
        if name not in rows or move == "begin":
            rows[name] = await store.index_begin(model, name, 1), await twin.index_begin(model, name, 1)
            assert number_of(rows[name][0]) == number_of(rows[name][1])
        elif move == "retire":
            del rows[name]
            await store.index_retire(model, name)
            await twin.index_retire(model, name)
        elif move == "sweep":
            assert await sweep(store, model) == await sweep(twin, model)
        else:
            for each, row in zip((store, twin), rows[name], strict=True):
                change = each.index_add if move == "add" else each.index_remove
                assert await change(model, row, some)
        assert await store.longest_prefix(model, CHAIN[:40]) == await twin.longest_prefix(model, CHAIN[:40])


# --- outages ------------------------------------------------------------------------------------------------


async def test_a_twin_told_to_be_down_and_flushed_behaves_like_a_server_that_lost_everything() -> None:
    store = MemoryStore()
    number = await store.index_begin("m", "w0", 1)
    store.down = True
    with pytest.raises(StoreDown):
        await store.ping()
    store.down = False
    store.flush()
    assert not await store.index_add("m", number, CHAIN[:1])


@pytest.mark.servers
async def test_a_lookup_of_1000_blocks_and_100_instances_is_one_command_of_less_than_2_ms() -> None:
    with redis_server() as server:
        store = RedisStore(f"redis://127.0.0.1:{server.port}/0")
        for number in range(100):
            row = await store.index_begin("m", f"w{number}", 1)
            await store.index_add("m", row, CHAIN[: 10 * number + 10])
        await store._client.config_resetstat()
        for _ in range(20):
            assert len(await store.longest_prefix("m", CHAIN)) == 100
        counted = await store._client.info("commandstats")
        lookups = counted.pop("cmdstat_mget")
        assert lookups["calls"] == 20
        assert set(counted) <= {"cmdstat_config|resetstat", "cmdstat_info"}
        # The server's own time, which a busy machine does not change much.
        assert lookups["usec_per_call"] < 2000
        await store.close()


@pytest.mark.servers
async def test_after_a_flush_nobody_writes_into_the_row_that_got_its_number() -> None:
    with redis_server() as server:
        store = RedisStore(f"redis://127.0.0.1:{server.port}/0")
        old = await store.index_begin("m", "w0", 1)
        await store._client.flushall()
        new = await store.index_begin("m", "w1", 1)
        assert number_of(new) == number_of(old)
        assert not await store.index_add("m", old, CHAIN[:3])
        assert await store.index_add("m", new, CHAIN[:2])
        assert await store.longest_prefix("m", CHAIN) == {"w1": 2}
        await store.close()


@pytest.mark.servers
async def test_when_the_table_alone_is_lost_no_number_is_given_anew_that_bitmaps_still_carry() -> None:
    with redis_server() as server:
        store = RedisStore(f"redis://127.0.0.1:{server.port}/0")
        old = await store.index_begin("m", "w0", 1)
        await store.index_add("m", old, CHAIN[:5])
        await store._client.delete(keys.index("m"))
        heir = await store.index_begin("m", "w1", 1)
        assert number_of(heir) != number_of(old)
        assert await store.longest_prefix("m", CHAIN) == {}
        await sweep(store, "m")
        next_one = await store.index_begin("m", "w2", 1)
        assert number_of(next_one) == number_of(old)
        assert await store.longest_prefix("m", CHAIN) == {}
        await store.close()


@pytest.mark.servers
async def test_what_no_kvstore_wrote_under_the_keys_is_no_error_and_gives_way_to_what_one_writes() -> None:
    with redis_server() as server:
        store = RedisStore(f"redis://127.0.0.1:{server.port}/0")
        server_side = store._client
        tables = [
            b"\xc1",
            msgpack.packb([0, {"w0": [1 << 40, 1]}, []]),
            msgpack.packb([0, {"w0": [-1, 1]}, []]),
            msgpack.packb([0, {"w0": [0, 1], "w1": [0, 1]}, []]),
            msgpack.packb([0, [[[]]], {}]),
        ]
        for table in tables:
            await server_side.set(keys.index("m"), table)
            assert await store.longest_prefix("m", CHAIN) == {}
        for key in (
            keys.index("m"),
            keys.live("m"),
            keys.rows("m"),
            keys.instances("m"),
            *_blocks(CHAIN[:3]),
        ):
            await server_side.delete(key)
            await server_side.lpush(key, b"no bitmap")
        assert await store.longest_prefix("m", CHAIN) == {}
        assert await store.index_rows("m") == {}
        assert not await store.index_add("m", 0, CHAIN)
        row = await store.index_begin("m", "w0", 1)
        assert await store.index_remove("m", row, CHAIN)
        assert await store.index_add("m", row, CHAIN[:2])
        await server_side.set(_blocks(CHAIN)[3], b"\xff" * 600)
        assert await store.longest_prefix("m", CHAIN) == {"w0": 2}
        assert await sweep(store, "m") == (3, 1)
        assert await store.longest_prefix("m", CHAIN) == {"w0": 2}
        await server_side.mset({keys.epoch("m"): b"\xffhigh w", keys.lease("m"): b"7"})
        assert await store.read_lease("m") == LeaseState(0, (7, ""))
        await store.close()


def _blocks(hashes: list[bytes]) -> list[bytes]:
    return [keys.block_prefix("m") + h[: keys.HASH_BYTES] for h in hashes]


@pytest.mark.servers
async def test_every_call_fails_quickly_while_the_server_is_away_and_works_when_it_is_back() -> None:
    with redis_server() as server:
        store = RedisStore(f"redis://127.0.0.1:{server.port}/0", timeout_s=0.3)
        number = await store.index_begin("m", "w0", 1)
        server.stop()
        await _all_fail(store, within_s=0.3)
        server.start()
        await _back(store)
        assert not await store.index_add("m", number, CHAIN[:1])
        server.freeze()
        await _all_fail(store, within_s=1.0)
        server.thaw()
        await _back(store)
        # An answer that came after its call had given up must not be taken for another's.
        assert await store.longest_prefix("m", CHAIN) == {}
        assert await store.read_lease("m") == LeaseState(0, None)
        await store.close()


@pytest.mark.servers
async def test_a_restart_of_the_server_costs_one_failed_call_however_many_connections_were_idle() -> None:
    with redis_server() as server:
        store = RedisStore(f"redis://127.0.0.1:{server.port}/0")
        await asyncio.gather(*(store.read_lease("m") for _ in range(8)))
        server.stop()
        server.start()
        with pytest.raises(StoreDown):
            await store.read_lease("m")
        await _back(store)
        await asyncio.gather(*(store.read_lease("m") for _ in range(8)))
        await store.close()


@pytest.mark.servers
async def test_a_denied_command_names_the_fault_and_does_not_look_like_an_outage() -> None:
    with redis_server("user default off\nuser poor on >pw ~hortator:* +@connection +mget") as poor:
        store = RedisStore(f"redis://poor:pw@127.0.0.1:{poor.port}/0")
        with pytest.raises(StoreDown, match="permission"):
            await store.write_lease("m", 1, "a", 1)
        assert await store.read_lease("m") == LeaseState(0, None)
        await store.close()


async def test_a_task_that_is_cancelled_ends_whatever_its_call_was_just_doing(
    store: Store, model: str
) -> None:
    row = await store.index_begin(model, "w0", 1)

    async def work() -> None:
        while True:
            await store.index_add(model, row, CHAIN[:3])
            await asyncio.sleep(0)

    for turns in range(60):
        task = asyncio.ensure_future(work())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=5)
        assert done, f"cancelled after {turns} turns of the loop, it went on"
        assert task.cancelled()


async def _all_fail(store: RedisStore, within_s: float) -> None:
    calls = [
        lambda: store.read_lease("m"),
        lambda: store.write_lease("m", 1, "a", 1),
        lambda: store.longest_prefix("m", CHAIN),
        lambda: store.index_add("m", 0, CHAIN[:1]),
        lambda: store.list_instances("m"),
    ]
    clock = asyncio.get_running_loop().time
    started = clock()
    for call in calls:
        with pytest.raises(StoreDown):
            await call()
    assert clock() - started < within_s


async def _back(store: RedisStore) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                return await store.ping()
            except StoreDown:
                await asyncio.sleep(0.02)


# --- pure parts ---------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(st.none(), st.sets(st.integers(0, 40), min_size=1)), max_size=12), st.data())
def test_prefix_depths_agree_with_counting_bit_by_bit(
    holders: list[set[int] | None], data: st.DataObject
) -> None:
    owners = {n: f"w{n}" for n in data.draw(st.sets(st.integers(0, 40)))}
    expected = {}
    for number, name in owners.items():
        depth = 0
        while depth < len(holders) and number in (holders[depth] or ()):
            depth += 1
        if depth:
            expected[name] = depth
    assert prefix_depths([_bitmap(h) if h else None for h in holders], owners) == expected


def _bitmap(numbers: set[int]) -> bytes:
    return IndexTable(live={str(n): (n, 0) for n in numbers}).live_bits()


def test_a_full_table_is_refused_until_a_sweep_frees_numbers() -> None:
    table = IndexTable()
    for _ in range(MAX_NUMBERS):
        table, _number = table.begin("w0", 1)
    with pytest.raises(IndexFull):
        table.begin("w0", 1)
    table = table.sweep_begins().sweep_ends()
    assert table.begin("w0", 2)[1] == 0


def test_a_table_survives_encoding_and_garbage_is_an_empty_one() -> None:
    table, _ = IndexTable().begin("w0", 7)
    assert decode_table(encode_table(table)) == table
    assert decode_table(b"\xc1") == decode_table(None) == IndexTable()
