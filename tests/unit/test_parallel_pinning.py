"""Which processors ranks get, on machines of many shapes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.parallel.pinning import Cpu, Pinning, cpus_of, pin


def machine(nodes: int, caches: int, cores: int, threads: int = 1) -> list[Cpu]:
    """Numbered as Linux does: every core's first thread, then every core's second."""
    count = nodes * caches * cores
    return [
        Cpu(thread * count + core, core, core // cores, core // (cores * caches))
        for thread in range(threads)
        for core in range(count)
    ]


shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 2))


def ranks_of(found: Pinning) -> list[tuple[int, ...]]:
    return [rank for group in found.cores for rank in group]


@settings(max_examples=50, deadline=None)
@given(shapes, st.integers(1, 6), st.integers(1, 3), st.one_of(st.none(), st.integers(1, 6)))
def test_no_core_is_shared_while_there_are_enough(
    shape: tuple[int, int, int, int], size: int, groups: int, threads: int | None
) -> None:
    cpus = machine(*shape)
    by_id = {cpu.id: cpu for cpu in cpus}
    cores = len({cpu.core for cpu in cpus})
    found = pin(cpus, size, groups, threads)
    ranks = ranks_of(found)
    assert [len(group) for group in found.cores] == [size] * groups
    assert all(rank and len(set(rank)) == len(rank) for rank in ranks)
    wanted = threads or max(1, cores // len(ranks))
    assert found.crowded == (wanted * len(ranks) > len(cpus))
    used = [{by_id[cpu].core for cpu in rank} for rank in ranks]
    if len(ranks) <= cores:
        assert sum(map(len, used)) == len(set().union(*used))
        assert all(len(its) == min(wanted, cores // len(ranks)) for its in used)
    else:
        # Idle cores beside shared ones would be a waste.
        assert len(set().union(*used)) == cores


@settings(max_examples=50, deadline=None)
@given(shapes, st.integers(1, 6), st.integers(1, 5))
def test_ranks_have_one_cache_and_groups_one_node_where_they_fit(
    shape: tuple[int, int, int, int], size: int, threads: int
) -> None:
    nodes, caches, cores, _ = shape
    cpus = machine(*shape)
    by_id = {cpu.id: cpu for cpu in cpus}
    found = pin(cpus, size, threads=threads)
    if threads <= cores and size <= caches * (cores // threads):
        assert found.straddling == ()
        assert all(len({by_id[cpu].cache for cpu in rank}) == 1 for rank in ranks_of(found))
    if found.straddling:
        assert size * threads > caches * cores
    if size * threads <= nodes * caches * cores and threads <= cores and cores % threads == 0:
        assert all(len({by_id[cpu].cache for cpu in rank}) == 1 for rank in ranks_of(found))


def test_two_groups_on_two_nodes_have_a_node_each() -> None:
    found = pin(machine(2, 2, 4), size=2, groups=2)
    assert found.cores == (((0, 1, 2, 3), (4, 5, 6, 7)), ((8, 9, 10, 11), (12, 13, 14, 15)))
    assert found.straddling == ()


def test_one_group_of_all_cores_straddles_nodes_with_a_rank_on_each() -> None:
    found = pin(machine(2, 1, 8), size=2)
    assert found.cores == ((tuple(range(8)), tuple(range(8, 16))),)
    assert found.straddling == (0,)


def test_few_threads_leave_the_other_node_to_others() -> None:
    found = pin(machine(2, 2, 4), size=4, threads=2)
    assert {cpu // 8 for rank in found.cores[0] for cpu in rank} == {0}


def test_ranks_leave_second_threads_idle_while_there_are_cores() -> None:
    cpus = machine(1, 1, 4, threads=2)
    assert pin(cpus, size=2).cores == (((0, 1), (2, 3)),)
    assert pin(cpus, size=2, threads=3).cores == (((0, 1, 4), (2, 3, 6)),)
    assert pin(cpus, size=2, threads=4).cores == (((0, 1, 4, 5), (2, 3, 6, 7)),)
    assert not pin(cpus, size=2, threads=4).crowded
    assert pin(cpus, size=2, threads=5).crowded


def test_more_ranks_than_cores_take_turns() -> None:
    found = pin(machine(1, 1, 2), size=4)
    assert found.cores == (((0,), (1,), (0,), (1,)),)
    assert found.crowded
    assert pin(machine(1, 1, 2), size=3).cores == (((0,), (1,), (0,)),)
    assert not pin(machine(1, 1, 2, threads=2), size=4).crowded


def test_groups_of_nothing_are_refused() -> None:
    for cpus, size, groups in (([], 1, 1), (machine(1, 1, 1), 0, 1), (machine(1, 1, 1), 1, 0)):
        with pytest.raises(ValueError, match="cannot be pinned"):
            pin(cpus, size, groups)


def test_processors_are_read_from_what_linux_tells() -> None:
    files = {
        "node/node0/cpulist": "0-1,4-5\n",
        "node/node1/cpulist": "2-3,6-7\n",
        **{f"cpu/cpu{i}/topology/core_cpus_list": f"{i % 4},{i % 4 + 4}\n" for i in range(8)},
        **{
            f"cpu/cpu{i}/cache/index3/shared_cpu_list": "2-3,6-7\n" if i % 4 > 1 else "0-1,4-5\n"
            for i in range(8)
        },
    }
    assert cpus_of(files) == tuple(Cpu(i, i % 4, i % 4 // 2 * 2, i % 4 // 2) for i in range(8))
    assert [cpu.id for cpu in cpus_of(files, allowed={1, 6})] == [1, 6]


def test_a_system_that_tells_little_is_one_node_with_one_cache() -> None:
    files = {f"cpu/cpu{i}/topology/core_cpus_list": f"{i}\n" for i in range(3)}
    assert cpus_of(files) == tuple(Cpu(i, i, 0, 0) for i in range(3))
