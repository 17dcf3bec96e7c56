"""Sampling over a split vocabulary: what the joined logits would give, on every rank, in few messages."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from services.worker.engine.batch import build_batch  # noqa: E402
from services.worker.engine.draw import draw_rows  # noqa: E402
from services.worker.engine.native.build import KernelsUnavailable  # noqa: E402
from services.worker.engine.native.decoder import Kernels  # noqa: E402
from services.worker.engine.sampler import SampleRow, sample, top_logprobs  # noqa: E402
from services.worker.engine.sharded_sampling import RanksDiverged, ShardedSampler  # noqa: E402
from services.worker.step import NOT_FINITE, SlotArrays, StepInput  # noqa: E402
from shared.wire import Sampling  # noqa: E402

NEAR = 1e-6
"""Sums differ by rounding: a uniform that near to a border may fall on its other side."""

POOL = ThreadPoolExecutor(4)


def kernels_here():
    try:
        return [Kernels(1) for _ in range(4)]
    except KernelsUnavailable:
        return None


KERNELS = kernels_here()
LOOKS = ["numpy", *(["native"] if KERNELS else [])]


class Ranks:
    """Threads that are the ranks of a group, with `gather` between them."""

    def __init__(self, vocab: int, cuts: list[int], looks: str = "numpy") -> None:
        edges = [0, *sorted(cuts), vocab]
        self.spans = list(pairwise(edges))
        self.size = len(self.spans)
        self._barrier = threading.Barrier(self.size)
        self._parts: list[np.ndarray | None] = [None] * self.size
        self.lengths: list[int] = []

        def make(rank):
            first, stop = self.spans[rank]
            kernels = KERNELS[rank] if looks == "native" else None
            return ShardedSampler(
                first, stop - first, vocab, rank, self.size, lambda b: self._gather(rank, b), kernels
            )

        self.samplers = self.each(make)
        self.lengths.clear()

    def _gather(self, rank: int, mine: np.ndarray) -> np.ndarray:
        self._parts[rank] = mine
        self._barrier.wait(10)
        assert len({len(part) for part in self._parts}) == 1
        every = np.stack(self._parts)
        if rank == 0:
            self.lengths.append(len(mine))
        self._barrier.wait(10)
        return every

    def each(self, call):
        def on(rank):
            try:
                return call(rank)
            except BaseException:
                self._barrier.abort()
                raise

        futures = [POOL.submit(on, rank) for rank in range(self.size)]
        # What the others say of a rank that failed tells nothing.
        for error in (f.exception() for f in futures):
            if error and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [f.result() for f in futures]

    def sample(self, logits: np.ndarray, rows: list[SampleRow], headers: list[bytes] | None = None):
        """(tokens, logprobs), after checking that all ranks have the same."""

        def on(rank):
            first, stop = self.spans[rank]
            wide = np.full((len(rows), stop - first + 5), 7e7, np.float32)  # panels are padded
            wide[:, : stop - first] = logits[:, first:stop]
            header = headers[rank] if headers else b"12345678"
            return self.samplers[rank].sample(wide[:, : stop - first], rows, header)

        results = self.each(on)
        for tokens, logprobs in results[1:]:
            assert tokens.tolist() == results[0][0].tolist()
            assert logprobs == results[0][1]
        return results[0]


def moved(by: float):
    def draw(values, draws):
        draws = draws.copy()
        draws["uniform"] = np.clip(draws["uniform"] + by, 0.0, 1 - 2**-53)
        return draw_rows(values, draws)

    return draw


def joined(logits: np.ndarray, rows: list[SampleRow]):
    """(lowest token allowed, highest, logprobs) by the sampler of whole rows."""
    given = [torch.from_numpy(logits.copy()) for _ in range(2)]
    lowest, logprobs = sample(given[0], rows, draw=moved(-NEAR))
    highest, _ = sample(given[1], rows, draw=moved(NEAR))
    return lowest, highest, logprobs


def check(ranks: Ranks, logits: np.ndarray, rows: list[SampleRow]) -> np.ndarray:
    lowest, highest, expected = joined(logits, rows)
    tokens, logprobs = ranks.sample(logits, rows)
    assert ((lowest <= tokens) & (tokens <= highest)).all(), (lowest, tokens, highest)
    assert set(logprobs) == {i for i in expected if tokens[i] != NOT_FINITE}
    for i, mine in logprobs.items():
        with np.errstate(all="ignore"):
            raw = torch.log_softmax(torch.from_numpy(logits[i]), dim=-1).numpy()
        assert mine.chosen == pytest.approx(float(raw[tokens[i]]), abs=1e-4, rel=1e-5)
        order = np.lexsort((np.arange(len(raw)), -logits[i]))[: rows[i].sampling.logprobs]
        assert [t for t, _ in mine.top] == order.tolist()
        assert [p for _, p in mine.top] == pytest.approx(raw[order].tolist(), abs=1e-4, rel=1e-5)
    return tokens


def row(sampling: Sampling, history=(1, 2), prompt=1, choice=0) -> SampleRow:
    return SampleRow(sampling, choice, np.array(history, np.int32), prompt)


@st.composite
def steps(draw):
    """(logits, cuts of the vocabulary, rows)."""
    vocab = draw(st.sampled_from([17, 64, 300, 1500]))
    cuts = draw(st.lists(st.integers(1, vocab - 1), max_size=3, unique=True))
    token = st.integers(0, vocab - 1)
    samplings = st.builds(
        Sampling,
        max_tokens=st.just(99),
        seed=st.integers(0, 2**64 - 1),
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0, 30.0]),
        top_k=st.sampled_from([0, 0, 1, 3, 40, 250, 256, 257, 1000]),
        top_p=st.sampled_from([1.0, 1.0, 0.9137, 0.313, 0.0171, 0.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.0, 1e-9, 0.0713, 0.51, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.25]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.25]),
        logit_bias=st.lists(st.tuples(token, st.sampled_from([-100.0, 5.0])), max_size=3).map(tuple),
        min_tokens=st.sampled_from([0, 0, 3]),
        stop_token_ids=st.lists(token, max_size=2).map(tuple),
        logprobs=st.sampled_from([None, None, 0, 5, 20]),
    )
    histories = st.tuples(st.lists(token, min_size=1, max_size=6), st.lists(token, max_size=5))
    rows = draw(st.lists(st.tuples(samplings, histories, st.integers(0, 3)), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.standard_normal((len(rows), vocab)) * draw(st.sampled_from([0.1, 1.0, 5.0, 40.0]))
    if draw(st.booleans()):  # as from 16 bits: many are equal
        logits = np.round(logits * 4) / 4
    made = [row(s, prompt + output, len(prompt), choice) for s, (prompt, output), choice in rows]
    return logits.astype(np.float32), cuts, made


@settings(max_examples=100, deadline=None)
@given(step=steps(), looks=st.sampled_from(LOOKS))
def test_every_rank_draws_what_the_joined_logits_give(step, looks):
    logits, cuts, rows = step
    check(Ranks(logits.shape[1], cuts, looks), logits, rows)


@settings(max_examples=30, deadline=None)
@given(step=steps(), looks=st.sampled_from(LOOKS), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_a_row_that_is_not_finite_on_one_rank_fails_alone_on_all(step, looks, bad):
    logits, cuts, rows = step
    logits[0, logits.shape[1] // 2] = bad
    tokens = check(Ranks(logits.shape[1], cuts, looks), logits, rows)
    assert tokens[0] == NOT_FINITE


def greedy(n: int) -> list[SampleRow]:
    return [row(Sampling(max_tokens=9, temperature=0.0))] * n


def logits_of(rows: int, vocab: int = 3000, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32)


@pytest.mark.parametrize("looks", LOOKS)
def test_greedy_rows_need_one_message_that_no_vocabulary_makes_longer(looks):
    for vocab in (3000, 6000):
        ranks = Ranks(vocab, [vocab // 2], looks)
        check(ranks, logits_of(32, vocab), greedy(32))
        assert ranks.lengths == [8 + 32 * 24]


@pytest.mark.parametrize("looks", LOOKS)
@pytest.mark.parametrize(
    ("asked", "messages"),
    [
        ({"top_k": 50, "top_p": 0.95}, 1),
        ({"top_p": 0.9}, 1),
        ({"min_p": 0.05}, 1),
        ({"top_k": 50, "logprobs": 5}, 1),
        ({"temperature": 0.0, "logprobs": 5, "logit_bias": ((7, 9.0),)}, 1),
        ({}, 2),
        ({"logprobs": 3}, 2),
        ({"top_k": 50, "logprobs": 5, "repetition_penalty": 1.1}, 2),
    ],
    ids=str,
)
def test_only_rows_that_need_it_cost_a_second_message_and_it_is_short(asked, messages, looks):
    ranks = Ranks(3000, [1000, 1700], looks)
    check(ranks, logits_of(4) * 2, [row(Sampling(max_tokens=9, seed=s, **asked)) for s in range(4)])
    assert len(ranks.lengths) == messages
    assert sum(ranks.lengths[1:]) <= 4 * 8
    traffic = ranks.samplers[0].traffic
    assert (traffic.messages_now, traffic.joined) == (messages, 0)
    assert traffic.messages_now < traffic.messages_before
    assert traffic.bytes_now < traffic.bytes_before


@pytest.mark.parametrize("looks", LOOKS)
@pytest.mark.parametrize("asked", [{"top_p": 0.95}, {"top_k": 900}, {"min_p": 1e-6}], ids=str)
def test_a_row_whose_candidates_prove_nothing_is_joined_and_no_other(asked, looks):
    ranks = Ranks(3000, [1000], looks)
    rows = [*greedy(3), row(Sampling(max_tokens=9, seed=3, temperature=2.0, logprobs=2, **asked))]
    check(ranks, logits_of(4), rows)
    assert ranks.lengths[1:] == [4 * 2000, 8]
    assert ranks.samplers[0].traffic.joined == 1


@pytest.mark.parametrize("looks", LOOKS)
def test_many_rows_are_joined_in_messages_of_bounded_length(monkeypatch, looks):
    monkeypatch.setattr("services.worker.engine.sharded_sampling._MOST_BYTES", 20_000)
    asked = {"top_p": 0.97, "temperature": 3.0, "repetition_penalty": 1.3, "logprobs": 1}
    rows = [row(Sampling(max_tokens=9, seed=s, **asked)) for s in range(7)]
    ranks = Ranks(3000, [1000, 1500, 1600], looks)
    check(ranks, logits_of(7), rows)
    # Slices, then what was drawn, then the logits of that before penalties.
    assert ranks.lengths[1:] == [3 * 5600, 3 * 5600, 5600, 7 * 8, 7 * 8]


@pytest.mark.parametrize("looks", LOOKS)
def test_the_best_k_of_many_equal_logits_are_those_with_the_lowest_ids(looks):
    # Numbers of 8 bits, as from a head in bfloat16: the 40th best is one of many equals.
    logits = torch.from_numpy(logits_of(16, 4000)).bfloat16().float().numpy()
    rows = [row(Sampling(max_tokens=9, seed=s, top_k=40, temperature=5.0)) for s in range(16)]
    ranks = Ranks(4000, [1000, 2000], looks)
    check(ranks, logits, rows)
    assert ranks.samplers[0].traffic.joined == 0


@pytest.mark.parametrize("looks", LOOKS)
def test_values_that_only_scaling_makes_equal_are_told_apart_by_all_ranks_as_by_one(looks):
    # So far below the top that single steps of a float vanish: they go by id, whatever their bits.
    logits = np.full((40, 600), 1e4, np.float32)
    rng = np.random.default_rng(3)
    logits[:, :] = rng.integers(0, 40, (40, 600)).astype(np.float32) * 1e-7
    logits[:, 300] = 10.0
    rows = [row(Sampling(max_tokens=9, seed=s, top_k=20, temperature=50.0)) for s in range(40)]
    check(Ranks(600, [200, 400], looks), logits, rows)


def test_ranks_at_different_steps_are_told_apart():
    ranks = Ranks(64, [32])
    with pytest.raises(RanksDiverged, match="rank 1 is not where rank 0 is"):
        ranks.sample(logits_of(1, 64), greedy(1), [b"\0" * 8, b"\1" + b"\0" * 7])


def test_ranks_whose_rows_do_not_follow_each_other_are_refused():
    every = np.array([(0, 8, 24), (16, 8, 24)], np.int64).view(np.uint8)
    with pytest.raises(ValueError, match=r"\[0, 8\), \[16, 24\)"):
        ShardedSampler(0, 8, 24, 0, 2, lambda mine: every, None)


@pytest.mark.parametrize("looks", LOOKS)
def test_prompt_logprobs_are_those_of_the_joined_logits(looks, monkeypatch):
    monkeypatch.setattr("services.worker.engine.sharded_sampling._MOST_BYTES", 200)
    logits = logits_of(20, 500)
    logits[4, 100] = np.nan
    ranks = Ranks(500, [120, 300], looks)
    rng = np.random.default_rng(1)
    places = rng.permutation(20)[:12]
    targets = rng.integers(0, 500, 12)
    counts = rng.integers(0, 7, 12).tolist()

    def on(rank):
        first, stop = ranks.spans[rank]
        return ranks.samplers[rank].score(logits[:, first:stop], places, targets, counts)

    every = ranks.each(on)
    raw = torch.log_softmax(torch.from_numpy(logits), dim=-1)[places]
    expected = top_logprobs(raw, targets, counts)
    for mine in every:
        assert [c for c, _ in mine] == pytest.approx([c for c, _ in expected], abs=1e-4, nan_ok=True)
        for (_, top), (_, wanted) in zip(mine, expected):
            assert [i for i, _ in top] == [i for i, _ in wanted]
            assert [p for _, p in top] == pytest.approx([p for _, p in wanted], abs=1e-4)
    assert 1 < len(ranks.lengths) < 12


def test_prompt_logprobs_of_a_step_go_to_the_rows_whose_prompts_they_are():
    asked = [
        Sampling(max_tokens=9, temperature=0.0, prompt_logprobs=2),
        Sampling(max_tokens=9, temperature=0.0),
        Sampling(max_tokens=9, temperature=0.0, prompt_logprobs=0),
        Sampling(max_tokens=9, temperature=0.0, prompt_logprobs=1),
    ]
    prompts = [9, 5, 7, 4]
    rng = np.random.default_rng(2)
    slots = SlotArrays(
        tokens=rng.integers(0, 300, (4, 16)).astype(np.int32),
        block_table=np.arange(4, dtype=np.int32)[:, None],
        computed=np.zeros(4, np.int32),
        known=np.array(prompts, np.int32),
        prompt_len=np.array(prompts, np.int32),
        choice=np.zeros(4, np.int32),
        sampling=list(asked),
        version=np.zeros(4, np.int64),
    )
    # The first prompt from its third token on and not to its end; the last has nothing left to predict.
    starts, counts = np.array([2, 0, 0, 3], np.int32), np.array([5, 5, 7, 1], np.int32)
    step = StepInput(np.arange(4, dtype=np.int32), starts, counts, np.array([False, True, True, True]))
    batch = build_batch(step, slots, 16)
    logits = logits_of(len(batch.logit_tokens), 300)
    ranks = Ranks(300, [100])
    found = ranks.each(
        lambda rank: ranks.samplers[rank].prompt_logprobs(
            logits[:, slice(*ranks.spans[rank])], batch, step, slots
        )
    )
    assert found[0] == found[1]
    assert {row: (p.start, len(p.chosen)) for row, p in found[0].items()} == {0: (3, 5), 2: (1, 6)}
    raw = torch.log_softmax(torch.from_numpy(logits), dim=-1).numpy()
    at = batch.logit_tokens.tolist().index(batch.row_start[2])
    for i, (chosen, top) in enumerate(zip(found[0][2].chosen, found[0][2].top)):
        assert chosen == pytest.approx(float(raw[at + i, slots.tokens[2, 1 + i]]), abs=1e-4)
        assert top == []
    for i, (chosen, top) in enumerate(zip(found[0][0].chosen, found[0][0].top)):
        assert chosen == pytest.approx(float(raw[i, slots.tokens[0, 3 + i]]), abs=1e-4)
        assert [t for t, _ in top] == np.argsort(-raw[i])[:2].tolist()
    assert len(ranks.lengths) == 1


def test_a_step_that_draws_nothing_still_compares_headers():
    ranks = Ranks(64, [32])
    assert len(ranks.sample(logits_of(1, 64)[:0], [])[0]) == 0
    with pytest.raises(RanksDiverged):
        ranks.sample(logits_of(1, 64)[:0], [], [b"1", b"2"])


@pytest.mark.parametrize("looks", LOOKS)
def test_settings_far_outside_of_their_range_give_the_same_as_on_one_rank(looks):
    wild = [
        *({"temperature": t} for t in (5e-324, 1e-7, 1e308)),
        *({"top_p": p} for p in (-1.0, 0.0, 1e9)),
        *({"min_p": p} for p in (5.0, -1.0)),
        *({"top_k": k} for k in (-5, 2**63)),
        {"logit_bias": ((0, 1e300),)},
        {"logit_bias": tuple((i, -1e300) for i in range(64))},
        {"temperature": 1e308, "logit_bias": ((1, -1e300),)},
        {"repetition_penalty": 1e-300},
        {"frequency_penalty": -1e300},
        {"min_tokens": 9, "stop_token_ids": tuple(range(64))},
        {"min_tokens": 9, "stop_token_ids": tuple(range(32))},
    ]
    rows = [row(Sampling(**({"max_tokens": 99, "seed": 9} | more))) for more in wild]
    check(Ranks(64, [32], looks), logits_of(len(rows), 64), rows)
