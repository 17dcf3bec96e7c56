"""The simulated instance and its books, which the experiments' step counts rest on."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.admission import ExpectedOutput, ReserveMax
from services.scheduler.policy import ContinuousPolicy, StaticBatchPolicy
from tests.bench.simulated import SimulatedMesh
from tests.bench.simulation import VOCAB, Request, Size

POLICIES = {"continuous": ContinuousPolicy, "static": StaticBatchPolicy}

lengths = st.lists(st.tuples(st.integers(1, 80), st.integers(1, 40)), min_size=1, max_size=24)


def requests(shape, seed=0, limit=None):
    rng = random.Random(seed)
    return [Request([rng.randrange(2, VOCAB) for _ in range(p)], o, limit or o) for p, o in shape]


def run(shape, policy="continuous", reservation=ExpectedOutput, slots=4, blocks=400, limit=None, at=()):
    todo = requests(shape, limit=limit)
    for request, when in zip(todo, at, strict=False):
        request.at = when
    mesh = SimulatedMesh(POLICIES[policy](), reservation(), Size(slots, blocks, max_len=512), seed=0)
    wall_s = mesh.run(todo)
    return mesh, todo, wall_s


@settings(max_examples=25, deadline=None)
@given(shape=lengths, policy=st.sampled_from(sorted(POLICIES)))
def test_every_request_gets_its_tokens_and_the_books_agree_with_the_scheduler(shape, policy):
    mesh, todo, wall_s = run(shape, policy)
    books, counters = mesh.books, mesh.core.counters
    # The first token of each comes from its last prompt chunk, or from a decode of a one-id prompt.
    tokens = sum(o for _, o in shape)
    assert tokens - len(shape) <= books.decode_tokens <= tokens
    assert books.prefill_tokens + books.decode_tokens == sum(p + o - 1 for p, o in shape)
    assert books.max_running <= 4
    assert books.interruptions == books.stalls == counters.preemptions == 0
    assert 0 <= books.waste < 1
    assert wall_s == pytest.approx(max(r.last for r in todo))


def test_a_static_batch_runs_to_its_longest_member_and_a_continuous_one_does_not():
    # In order: each batch of four holds one long request.
    shape = [(8, 40), (8, 4), (8, 4), (8, 4)] * 4
    steps = {policy: run(shape, policy)[0].books.decode_steps for policy in POLICIES}
    assert steps["static"] >= 4 * 39
    # The oracle of perfect packing: all tokens over four slots.
    assert steps["continuous"] <= sum(o for _, o in shape) / 4 + 41
    assert steps["static"] > 1.8 * steps["continuous"]


def test_reserving_to_the_limit_admits_fewer_at_once_in_the_same_memory():
    shape = [(16, 10)] * 60
    # 40 blocks of 16: with a limit of 200 each, three fit in full.
    most = {
        r: run(shape, reservation=r, slots=32, blocks=40, limit=200)[0] for r in (ReserveMax, ExpectedOutput)
    }
    assert most[ReserveMax].books.max_running == 40 // -(-(16 + 200 - 1) // 16)
    assert most[ExpectedOutput].books.max_running >= 2 * most[ReserveMax].books.max_running
    assert most[ReserveMax].books.claimed_waste > most[ExpectedOutput].books.claimed_waste


def test_scarce_memory_shows_in_the_books_as_interruptions():
    class Careless(ExpectedOutput):
        def output_tokens(self, max_tokens, written):
            return min(written + 1, max_tokens)

    mesh, todo, _ = run([(16, 60)] * 6, reservation=Careless, slots=6, blocks=12)
    assert all(r.tokens == 60 for r in todo)
    assert mesh.books.interruptions == mesh.core.counters.preemptions > 0


def test_a_later_request_is_not_served_before_it_arrives():
    _, todo, _ = run([(8, 4), (8, 4)], at=(0.0, 5.0))
    assert todo[0].last < 5.0 < todo[1].first
