"""The compiled transports beyond the contract: choice of algorithms, counts, and what is refused."""

import gc
import os
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.collective.port import GroupLost
from services.worker.engine.native import build
from tests.support.collective_groups import Native, in_order, mesh, on_ranks, parts_of
from tests.support.collective_passes import Pass

try:
    build.load(build.COLLECTIVE)
except build.KernelsUnavailable as error:
    pytest.skip(f"no compiled transports here: {error}", allow_module_level=True)

from services.worker.collective.native import (
    NativeCollective,
    make_memory,
    region_bytes,
)

BOTH = Native("one-shot", memory=True, pair=socket.socketpair)


def add_ones(end, *lengths):
    for floats in lengths:
        end.all_reduce(np.ones(floats, np.float32))


def test_the_table_says_by_which_algorithm_a_sum_of_its_size_goes():
    table = [(400, "two-shot"), (4000, "ring"), (40_000, "direct")]

    def work(end):
        end.set_table(table)
        add_ones(end, 1, 100, 101, 1000, 1001, 10_000, 10_001)
        end.gather(np.zeros(10, np.uint8))
        return {name: (count.messages, count.bytes) for name, count in end.carried().items()}

    for counts in on_ranks(BOTH(3), work):
        assert counts == {
            "two-shot": (2, 404),
            "ring": (2, 404 + 4000),
            "direct": (3, 4004 + 40_000 + 40_004),
            "one-shot": (1, 12),
        }


def test_without_a_table_sums_go_through_memory_or_else_directly():
    def work(end):
        end.set_table([])
        add_ones(end, 5)
        return list(end.carried())

    assert on_ranks(BOTH(2), work) == [["one-shot"]] * 2
    assert on_ranks(Native("ring", pair=socket.socketpair)(2), work) == [["direct"]] * 2


@pytest.mark.parametrize(("memory", "links"), [(True, False), (False, True), (True, True)])
def test_an_end_says_what_it_can_sum_by_and_refuses_the_rest(memory, links):
    in_memory, over_links = ("one-shot", "two-shot"), ("direct", "ring", "tree", "scatter")
    first = (in_memory if memory else over_links)[0]
    ends = Native(first, memory, socket.socketpair if links else None)(2)

    def work(end):
        known = end.algorithms()
        assert known == (in_memory if memory else ()) + (over_links if links else ())
        for wrong in {*in_memory, *over_links, "smoke"} - set(known):
            with pytest.raises(ValueError, match=f"no sums by '{wrong}'"):
                end.set_table([(10, wrong)])
            with pytest.raises(ValueError, match="in this group, only by"):
                end.time(wrong, 10, 1)

    on_ranks(ends, work)


def test_algorithms_are_timed_by_all_ranks_together():
    def work(end):
        times = {name: end.time(name, 576, 5) for name in end.algorithms()}
        add_ones(end, 10)
        return times

    for times in on_ranks(BOTH(2), work):
        assert all(0 < least <= median < 1 for least, median in times.values())


def test_fastest_times_are_those_since_the_last_look_and_waiting_for_a_late_rank_is_not_in_them():
    def work(end):
        for name in ("one-shot", "direct"):
            end.set_table([(1 << 40, name)])
            for _ in range(20):
                time.sleep(0.02 * end.rank)
                add_ones(end, 300)
        drift, exposed = end.drift(), {name: count.exposed_s for name, count in end.carried().items()}
        assert end.drift() == {"one-shot": {}, "direct": {}}
        return drift, exposed

    (drift, exposed), (late, _) = on_ranks(BOTH(2), work)
    for name in ("one-shot", "direct"):
        assert list(drift[name]) == [10]
        assert 0 < drift[name][10] < 0.02
        assert exposed[name] > 20 * 0.015
        assert late[name] == {}


def test_links_are_busy_only_while_something_is_under_way():
    def work(end):
        add_ones(end, 10)
        before = end.busy_s()
        time.sleep(0.1)
        return before, end.busy_s()

    for before, after in on_ranks(Native("direct", pair=socket.socketpair)(2), work):
        assert 0 < before == after < 0.1


def test_what_cannot_be_a_group_is_refused_with_the_reason():
    fd = make_memory(2, 1000)
    for rank, size, memory, peers, words in (
        (2, 2, fd, None, "rank 2 of 2"),
        (0, 1, fd, None, "a group has 2 to 64 ranks"),
        (0, 65, fd, None, "a group has 2 to 64 ranks"),
        (0, 2, None, None, "neither memory nor sockets"),
        (0, 3, None, {1: None}, "needs a socket to each of"),
    ):
        with pytest.raises(ValueError, match=words):
            NativeCollective(rank, size, memory, peers)
    with pytest.raises(ValueError, match="at least one"):
        NativeCollective(0, 2, fd, most_floats=0)
    with pytest.raises(ValueError, match=r"has \d+ bytes where \d+ are needed"):
        NativeCollective(0, 2, fd, most_floats=100_000)
    with pytest.raises(ValueError, match="Bad file descriptor"):
        NativeCollective(0, 2, 999_999)
    NativeCollective(0, 2, fd, most_floats=1000).close()
    with pytest.raises(ValueError, match="do not agree"):
        NativeCollective(1, 2, fd, most_floats=999)
    os.close(fd)


def test_only_what_can_be_summed_in_place_is_taken():
    def work(end):
        for wrong in (np.ones(4), np.ones((4, 4), np.float32)[:, 0], np.ones(2, np.int32)):
            with pytest.raises(ValueError, match="contiguous writable float32"):
                end.all_reduce(wrong)
        fixed = np.ones(3, np.float32)
        fixed.flags.writeable = False
        with pytest.raises(ValueError, match="contiguous writable float32"):
            end.all_reduce(fixed)

    on_ranks(BOTH(2), work)


def test_a_rank_that_lives_but_does_not_come_is_named_after_the_limit():
    done = threading.Event()

    for ends in (
        Native("one-shot", True, None, {"limit_s": 0.2})(3),
        Native("ring", False, socket.socketpair, {"limit_s": 0.2})(3),
    ):
        done.clear()

        def work(end):
            if end.rank == 1:
                assert done.wait(10)
                return
            with pytest.raises(GroupLost, match=r"rank 1 has not sent its part within 0\.2|rank [02] "):
                add_ones(end, 10)
            done.set()

        on_ranks(ends, work)


def test_more_in_flight_than_was_said_loses_the_group_instead_of_waiting_for_itself():
    def work(end):
        step = Pass(end.exchange())
        for _ in range(300):
            step.send(np.ones(10, np.float32))
        assert step.land() == []
        with pytest.raises(GroupLost, match="in flight"):
            end.check()

    def too_long(end):
        step = Pass(end.exchange())
        assert end.exchange().room(end.exchange().self, 1001, 0)
        with pytest.raises(GroupLost, match="1001 floats where 1000 may be in flight"):
            end.check()
        del step

    on_ranks(BOTH(2), work)
    on_ranks(Native("one-shot", True, None, {"most_floats": 1000})(2), too_long)


def test_a_peer_that_speaks_nonsense_loses_the_group():
    near, far = socket.socketpair()
    with far:
        end = NativeCollective(0, 2, None, {1: near})
        far.sendall(bytes(range(256)) * 10)
        with pytest.raises(GroupLost, match="rank 1 sent what is no message of this group"):
            add_ones(end, 10)
        end.close()


def test_a_closed_group_leaves_no_thread_descriptor_or_mapping():
    def state():
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return (
            len(os.listdir("/proc/self/task")),
            sorted(os.listdir("/proc/self/fd")),
            maps.count("hortator-group"),
        )

    def use(end):
        add_ones(end, 1000)

    fd = make_memory(3)

    def groups():
        peers = mesh(3)
        return [lambda r=r: NativeCollective(r, 3, fd, peers[r]) for r in range(3)]

    on_ranks(groups(), use)
    os.close(fd)
    fd = make_memory(3)
    before = state()
    on_ranks(groups(), use)
    assert state() == before
    os.close(fd)


def test_memory_is_as_large_as_said():
    fd = make_memory(4, 12_345)
    assert os.fstat(fd).st_size == region_bytes(4, 12_345) > 4 * 2 * 12_345 * 4
    os.close(fd)


MOST = 3000
CALLS = st.lists(
    st.tuples(st.integers(1, MOST // 3), st.integers(0, 2), st.sampled_from(["memory", "links"])),
    max_size=60,
)


@settings(max_examples=30, deadline=None)
@given(calls=CALLS, size=st.integers(2, 3))
def test_any_order_of_sizes_and_algorithms_gives_the_sums(calls, size):
    rng = np.random.default_rng(len(calls))
    parts = [parts_of(rng, size, floats) for floats, _, _ in calls]

    def work(end):
        step, sums, sent = Pass(end.exchange()), [], 0

        def land():
            sums.append(in_order(step.land()))
            step.release()

        for (floats, ahead, way), part in zip(calls, parts):
            algorithms = end.algorithms()[:2] if way == "memory" else end.algorithms()[2:]
            end.set_table([(1 << 40, algorithms[floats % len(algorithms)])])
            step.send(part[end.rank])
            sent += 1
            while sent - len(sums) > ahead:
                land()
        while len(sums) < sent:
            land()
        return sums

    results = on_ranks(Native("one-shot", True, socket.socketpair, {"most_floats": MOST})(size), work)
    for number, got in enumerate(zip(*results)):
        assert all(np.array_equal(values, got[0]) for values in got)
        np.testing.assert_allclose(got[0], in_order(parts[number]), atol=1e-5)
