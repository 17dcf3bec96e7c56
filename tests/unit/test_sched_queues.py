import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.clients import Client
from services.scheduler.queues import WaitQueue
from services.scheduler.sequences import ALLOWED, Phase, Request, Sequence
from shared.wire import Sampling


def sequence(order: int, priority: int = 0, queue_deadline: float = 0.0) -> Sequence:
    client = Client("c", 0.0)
    request = Request(client, "r", [1], Sampling(max_tokens=1), priority, 0.0, 1e9, queue_deadline)
    return Sequence(request, order, 0, order, client.rows.append, [])


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 100)), max_size=40),
    st.lists(st.integers(0, 39), max_size=20),
)
def test_the_queue_is_sorted_by_aged_priority_and_arrival_whoever_comes_and_goes(
    rows: list[tuple[int, int]], leaving: list[int]
):
    queue = WaitQueue(aging_s=30.0)
    waiting = [sequence(order, priority, float(when)) for order, (priority, when) in enumerate(rows)]
    for entry in waiting:
        queue.push(entry)
    for index in leaving:
        if index < len(waiting):
            queue.remove(waiting.pop(index))
    oracle = sorted(waiting, key=lambda s: (30.0 * s.request.priority + s.request.queue_deadline, s.order))
    assert list(queue) == oracle
    assert len(queue) == len(oracle)


def test_removing_somebody_who_does_not_wait_is_an_error():
    queue = WaitQueue()
    queue.push(sequence(1))
    with pytest.raises(KeyError, match="not waiting"):
        queue.remove(sequence(2))


def test_the_queue_may_change_while_it_is_walked():
    queue = WaitQueue()
    for order in range(5):
        queue.push(sequence(order))
    for entry in queue:
        queue.remove(entry)
    assert len(queue) == 0


@pytest.mark.parametrize("before", Phase)
@pytest.mark.parametrize("after", Phase)
def test_a_sequence_changes_phase_only_along_the_table(before: Phase, after: Phase):
    entry = sequence(1)
    entry.phase = before
    if after in ALLOWED[before]:
        entry.enter(after, 1.0)
        assert entry.phase is after
    else:
        with pytest.raises(RuntimeError, match="cannot go"):
            entry.enter(after, 1.0)
