"""What every transport and algorithm of a group must do, on each of them."""

import threading
import time

import numpy as np
import pytest

from services.worker.collective import abi
from services.worker.collective.port import Collective, GroupLost
from services.worker.engine.native import build
from tests.support.collective_groups import KINDS, Kind, dawdle, in_order, on_ranks, parts_of
from tests.support.collective_passes import Pass

try:
    build.load(build.COLLECTIVE)
except build.KernelsUnavailable as error:
    pytest.skip(f"no compiled transports here: {error}", allow_module_level=True)

FLOATS = (1, 2, 15, 17, 576, 1001, 36_864, 100_003)


SEVERAL = [kind for kind in KINDS if kind.sizes != (1,)]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request) -> Kind:
    return request.param


@pytest.fixture(params=SEVERAL, ids=lambda kind: kind.name)
def several(request) -> Kind:
    return request.param


@pytest.fixture(params=[kind for kind in SEVERAL if kind.exchange], ids=lambda kind: kind.name)
def passes(request) -> Kind:
    return request.param


def check_sum(kind: Kind, got: list[np.ndarray], parts: list[np.ndarray]) -> None:
    exact = np.sum([part.astype(np.float64) for part in parts], axis=0)
    for values in got:
        assert np.array_equal(values, got[0]), "ranks have different bits"
    np.testing.assert_allclose(got[0], exact, atol=1e-5)
    if kind.in_rank_order:
        assert np.array_equal(got[0], in_order(parts))


def sums_of(end: Collective, lengths: list[int]) -> None:
    for floats in lengths:
        end.all_reduce(np.ones(floats, np.float32))


def test_a_sum_is_that_of_all_parts_and_has_the_same_bits_on_all_ranks(kind):
    rng = np.random.default_rng(1)
    for size in kind.sizes:
        parts = [parts_of(rng, size, floats) for floats in FLOATS * 2]

        def work(end, parts=parts):
            late, results = np.random.default_rng(end.rank), []
            for part in parts:
                dawdle(late)
                values = part[end.rank].copy()
                end.all_reduce(values)
                results.append(values)
            return results

        for number, got in enumerate(zip(*on_ranks(kind.ends(size), work))):
            check_sum(kind, list(got), parts[number])


def test_a_sum_may_be_larger_than_the_room_and_lie_anywhere(several):
    size, floats = several.sizes[0], (1 << 20) + 12_345
    parts = parts_of(np.random.default_rng(2), size, floats)

    def work(end):
        memory = np.zeros(floats + 1, np.float32)
        memory[1:] = parts[end.rank]
        end.all_reduce(memory[1:])
        end.all_reduce(memory[:0])
        return memory[1:]

    check_sum(several, on_ranks(several.ends(size), work), parts)


@pytest.mark.parametrize("length", [0, 1, 7, 4096, 30_001, 5_000_000])
def test_gathering_gives_every_rank_what_each_gave(kind, length):
    size = kind.sizes[-1]
    given = np.random.default_rng(3).integers(0, 256, (size, length), np.uint8)
    for got in on_ranks(kind.ends(size), lambda end: end.gather(given[end.rank])):
        assert np.array_equal(got, given)


def test_messages_in_flight_land_in_their_order_whoever_is_late(passes):
    rng = np.random.default_rng(4)
    for size in passes.sizes:
        plan = [(int(rng.choice((1, 16, 100, 576, 1300))), int(rng.integers(0, 4))) for _ in range(200)]
        parts = [parts_of(rng, size, floats) for floats, _ in plan]

        def work(end, plan=plan, parts=parts):
            late, step, results, sent = np.random.default_rng(end.rank), Pass(end.exchange()), [], 0

            def land():
                landed = step.land()
                assert landed
                results.append(in_order(landed))
                step.release()

            for (_, ahead), part in zip(plan, parts):
                dawdle(late)
                step.send(part[end.rank])
                sent += 1
                while sent - len(results) > ahead:
                    land()
            while len(results) < sent:
                land()
            return results

        for number, got in enumerate(zip(*on_ranks(passes.ends(size), work))):
            check_sum(passes, list(got), parts[number])


def test_parts_of_a_landed_message_stay_until_it_is_released(passes):
    size = passes.sizes[0]
    parts = [parts_of(np.random.default_rng(5), size, 700) for _ in range(4)]

    def work(end):
        step = Pass(end.exchange())
        for part in parts:
            step.send(part[end.rank])
        landed = [step.land() for _ in parts]
        time.sleep(0.01)
        sums = [in_order(rows) for rows in landed]
        for _ in parts:
            step.release()
        return sums

    for number, got in enumerate(zip(*on_ranks(passes.ends(size), work))):
        check_sum(passes, list(got), parts[number])


def test_a_native_pass_gathers_parts_by_rank(passes):
    size = passes.sizes[-1]
    parts = parts_of(np.random.default_rng(6), size, 333)

    def work(end):
        step = Pass(end.exchange())
        step.send(parts[end.rank], abi.GATHER)
        landed = [part.copy() for part in step.land()]
        step.release()
        return landed

    for got in on_ranks(passes.ends(size), work):
        assert np.array_equal(got, parts)


def test_ranks_that_send_different_messages_lose_the_group_instead_of_adding_them(several):
    def work(end):
        with pytest.raises(GroupLost, match=r"out of step|has ended"):
            sums_of(end, [100, 100 + end.rank, 100])
        return True

    assert all(on_ranks(several.ends(several.sizes[0]), work))


def test_a_lost_group_stays_lost_and_whoever_waits_is_told_why(several):
    ready, size = threading.Barrier(several.sizes[0]), several.sizes[0]

    def work(end):
        end.all_reduce(np.ones(10, np.float32))
        ready.wait(10)
        if end.rank == 1:
            end.abort("the disk is full")
        started = time.monotonic()
        with pytest.raises(GroupLost, match=r"the disk is full|rank 1 has ended|gave up"):
            end.all_reduce(np.ones(10, np.float32))
        assert time.monotonic() - started < 1
        for call in (end.check, lambda: end.gather(np.ones(3, np.uint8))):
            with pytest.raises(GroupLost):
                call()
        if several.exchange:
            step = Pass(end.exchange())
            step.send(np.ones(100, np.float32))
            assert step.land() == []
            step.release()
        return True

    assert on_ranks(several.ends(size), work) == [True] * size


def test_a_rank_may_be_told_from_another_thread_to_stop_waiting(several):
    ends, stopped = several.ends(several.sizes[0]), threading.Event()

    def work(end):
        if end.rank:
            assert stopped.wait(10)
            return
        alarm = threading.Timer(0.05, end.abort, ["stop"])
        alarm.start()
        with pytest.raises(GroupLost, match="stop"):
            end.all_reduce(np.ones(1000, np.float32))
        stopped.set()
        alarm.join()

    on_ranks(ends, work)


def test_a_rank_that_leaves_takes_nothing_back_that_it_sent(several):
    size = several.sizes[0]
    parts = parts_of(np.random.default_rng(7), size, 20_000)
    gone = threading.Barrier(size)

    def work(end):
        if end.rank == 0:
            values = parts[0].copy()
            end.all_reduce(values)
            end.close()
            gone.wait(10)
            return values
        values = parts[end.rank].copy()
        end.all_reduce(values)
        gone.wait(10)
        with pytest.raises(GroupLost):
            end.all_reduce(np.ones(4, np.float32))
        return values

    check_sum(several, on_ranks(several.ends(size), work), parts)


def test_closing_twice_is_closing_once_and_nothing_can_be_asked_afterwards(several):
    def work(end):
        end.close()
        end.close()
        end.abort("too late")
        with pytest.raises(GroupLost, match="has left its group"):
            end.check()

    on_ranks(several.ends(several.sizes[0]), work)


def test_waiting_costs_no_processor_time(several):
    size = several.sizes[0]

    def work(end):
        if end.rank:
            time.sleep(0.5)
        end.all_reduce(np.ones(100, np.float32))

    ends = several.ends(size)
    before, started = time.process_time(), time.monotonic()
    on_ranks(ends, work)
    spent, passed = time.process_time() - before, time.monotonic() - started
    assert spent / passed < 0.1
