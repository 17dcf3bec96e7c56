"""The collective of machines without a compiler: the same bits on all ranks, and no waiting for the dead."""

import socket
import threading
import time
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.collective.port import GroupLost
from services.worker.group.plain import PlainCollective


def group(size: int, limit_s: float = 10.0) -> list[PlainCollective]:
    peers: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for a, b in combinations(range(size), 2):
        peers[a][b], peers[b][a] = socket.socketpair()
    return [PlainCollective(rank, size, peers[rank], limit_s) for rank in range(size)]


def on_all(ranks: list[PlainCollective], work: Callable[[PlainCollective], Any]) -> list[Any]:
    """What `work` returns or raises on each rank, all at once."""
    found: list[Any] = [None] * len(ranks)

    def run(place: int) -> None:
        try:
            found[place] = work(ranks[place])
        except GroupLost as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 4), floats=st.sampled_from([1, 7, 1000, 300_001]), seed=st.integers(0, 99))
def test_sums_are_in_the_order_of_the_ranks_and_gatherings_by_rank(size: int, floats: int, seed: int) -> None:
    parts = np.random.default_rng(seed).standard_normal((size, floats)).astype(np.float32)
    expected = parts[0].copy()
    for part in parts[1:]:
        expected += part

    def work(rank: PlainCollective) -> tuple[bytes, bytes]:
        values = parts[rank.rank].copy()
        rank.all_reduce(values)
        return values.tobytes(), rank.gather(parts[rank.rank].view(np.uint8)).tobytes()

    ranks = group(size)
    try:
        assert on_all(ranks, work) == [(expected.tobytes(), parts.tobytes())] * size
    finally:
        for rank in ranks:
            rank.close()


def lost_within(ranks: list[PlainCollective], end: Callable[[], None], limit_s: float) -> list[str]:
    """Why the ranks that wait in a sum stop waiting once `end` has happened."""
    timer = threading.Timer(0.1, end)
    timer.start()
    began = time.monotonic()
    errors = on_all(ranks, lambda rank: rank.all_reduce(np.ones(100_000, np.float32)))
    assert time.monotonic() - began < 0.1 + limit_s
    timer.join()
    assert all(isinstance(error, GroupLost) for error in errors)
    for rank in ranks:
        with pytest.raises(GroupLost):
            rank.check()
        rank.close()
    return [str(error) for error in errors]


def test_the_end_of_a_rank_frees_the_others_with_its_number() -> None:
    first, second, third = group(3)
    reasons = lost_within([first, second], third.close, 1.0)
    assert "rank 2 has ended" in reasons


def test_an_abort_from_another_thread_frees_a_rank_with_its_reason() -> None:
    first, second = group(2)
    assert lost_within([first], lambda: first.abort("rank 1 was killed"), 1.0) == ["rank 1 was killed"]
    second.close()


def test_a_rank_that_lives_but_does_not_come_is_lost_after_the_limit() -> None:
    first, second = group(2, limit_s=0.3)
    assert lost_within([first], lambda: None, 2.0) == ["rank 1 has not come for 0.3 s"]
    second.close()


def test_ranks_that_make_different_calls_do_not_go_on() -> None:
    ranks = group(2, limit_s=0.5)
    errors = on_all(ranks, lambda rank: rank.gather(np.zeros(4 + 4 * rank.rank, np.uint8)))
    assert any("another collective" in str(error) for error in errors)
    for rank in ranks:
        rank.close()
