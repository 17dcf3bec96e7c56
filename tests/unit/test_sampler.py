"""Sampling against a slow, obvious oracle, feature by feature and all together."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from services.worker.engine.draw import draw_rows, keep  # noqa: E402
from services.worker.engine.native.build import KernelsUnavailable  # noqa: E402
from services.worker.engine.native.decoder import Kernels  # noqa: E402
from services.worker.engine.sampler import SampleRow, sample  # noqa: E402
from services.worker.engine.uniform import uniforms  # noqa: E402
from services.worker.step import NOT_FINITE  # noqa: E402
from shared.wire import Sampling  # noqa: E402

VOCAB = 24
HISTORY = np.array([1, 2], np.int32)


def draws():
    """Every way to draw that can be had here."""
    try:
        return {"numpy": draw_rows, "native": Kernels(2).draw}
    except KernelsUnavailable:
        return {"numpy": draw_rows}


DRAWS = [pytest.param(draw, id=name) for name, draw in draws().items()]


def oracle_logits(logits: list[float], row: SampleRow) -> list[float]:
    """Logits after everything that shifts single ones, one token at a time."""
    s = row.sampling
    prompt_and_output = set(row.history.tolist())
    output = row.history[row.prompt_len :].tolist()
    result = []
    for token, value in enumerate(np.asarray(logits, np.float32)):
        if len(output) < s.min_tokens and token in s.stop_token_ids:
            value = np.float32(-np.inf)
        for biased, bias in s.logit_bias:
            if biased == token:
                value = value + np.float32(bias)
        if s.repetition_penalty != 1.0 and token in prompt_and_output:
            penalty = np.float32(s.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        if token in output:
            value = value - np.float32(output.count(token) * s.frequency_penalty + s.presence_penalty)
        result.append(value)
    return result


def oracle_kept(logits: list[float], s: Sampling) -> list[int]:
    """Ids left by min-p, top-k, top-p, by sorting everything."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = {i: math.exp((float(logits[i]) - float(logits[order[0]])) / s.temperature) for i in order}
    if s.min_p > 0:
        order = [i for i in order if weight[i] >= s.min_p]
    if s.top_k > 0:
        order = order[: s.top_k]
    if s.top_p < 1:
        total, run, kept = sum(weight[i] for i in order), 0.0, []
        for i in order:
            if run >= s.top_p * total:
                break
            kept.append(i)
            run += weight[i]
        order = kept
    return sorted(order)


def oracle_token(logits: list[float], row: SampleRow) -> int:
    s = row.sampling
    shifted = oracle_logits(logits, row)
    if s.temperature == 0:
        return max(range(len(shifted)), key=lambda i: (shifted[i], -i))
    kept = oracle_kept(shifted, s)
    top = max(float(v) for v in shifted)
    weights = [math.exp((float(shifted[i]) - top) / s.temperature) for i in kept]
    keys = (np.array([v], np.uint64) for v in (s.seed, row.choice, row.index))
    target, run = float(uniforms(*keys)[0]) * sum(weights), 0.0
    for i, weight in zip(kept, weights):
        run += weight
        if run > target:
            return i
    return kept[-1]


def logits_of(values: list[list[float]]):
    return torch.tensor(values, dtype=torch.float32)


def row(sampling: Sampling, prompt: list[int] = [1], output: list[int] = [], choice: int = 0) -> SampleRow:  # noqa: B006
    return SampleRow(sampling, choice, np.array(prompt + output, np.int32), len(prompt))


# Multiples of a quarter: ties occur, and no rounding decides what a filter keeps.
levels = st.integers(-32, 32).map(lambda v: v / 4)
token = st.integers(0, VOCAB - 1)
samplings = st.builds(
    Sampling,
    max_tokens=st.just(99),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 3, VOCAB, 999]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.313, 0.0171]),
    min_p=st.sampled_from([0.0, 0.0, 0.0713, 0.51]),
    repetition_penalty=st.sampled_from([1.0, 1.25, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, 1.0]),
    logit_bias=st.lists(st.tuples(token, st.sampled_from([-100.0, -1.0, 5.0])), max_size=3).map(tuple),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.lists(token, max_size=2).map(tuple),
)
rows = st.builds(
    lambda s, prompt, output, choice: row(s, prompt, output, choice),
    samplings,
    st.lists(token, min_size=1, max_size=6),
    st.lists(token, max_size=5),
    st.integers(0, 3),
)
logit_rows = st.lists(levels, min_size=VOCAB, max_size=VOCAB)


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(st.tuples(logit_rows, rows), min_size=1, max_size=6))
def test_every_row_of_a_mixed_batch_draws_what_the_oracle_draws(batch):
    tokens, _ = sample(logits_of([values for values, _ in batch]), [r for _, r in batch])
    assert tokens.tolist() == [oracle_token(values, r) for values, r in batch]


@settings(max_examples=150, deadline=None)
@given(values=st.lists(levels, min_size=1, max_size=600), sampling=samplings)
def test_filters_keep_what_sorting_everything_keeps(values, sampling):
    scaled = (np.array(values, np.float32) - np.float32(max(values))) / np.float32(
        sampling.temperature or 1.0
    )
    filters = sampling.top_k, sampling.top_p, sampling.min_p
    kept = keep(scaled, *filters, float(np.exp(scaled, dtype=np.float64).sum()))
    expected = oracle_kept(scaled.tolist(), Sampling(**{**as_dict(sampling), "temperature": 1.0}))
    assert (list(range(len(values))) if kept is None else kept.tolist()) == expected


def as_dict(sampling: Sampling) -> dict:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def test_a_wide_nucleus_is_found_beyond_the_first_guess():
    values = np.random.default_rng(0).normal(size=20000).astype(np.float32)
    values -= values.max()
    kept = keep(values, 0, 0.95, 0.0, float(np.exp(values, dtype=np.float64).sum()))
    order = np.argsort(-values, kind="stable")
    mass = np.cumsum(np.exp(values[order], dtype=np.float64))
    assert sorted(order[: int(np.searchsorted(mass, 0.95 * mass[-1])) + 1]) == kept.tolist()
    assert len(kept) > 2000


def test_draws_follow_the_distribution():
    values = [0.0, 1.0, 2.0, -500.0]
    drawn = [
        int(sample(logits_of([values]), [row(Sampling(max_tokens=1, seed=seed))])[0][0])
        for seed in range(4000)
    ]
    share = np.bincount(drawn, minlength=4) / 4000
    expected = np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum()
    assert np.abs(share[:3] - expected).max() < 0.025
    assert share[3] == 0


def test_a_token_depends_on_its_index_not_on_the_batch_or_the_attempt():
    values = np.random.default_rng(1).normal(size=(8, VOCAB)).tolist()
    samplings = [Sampling(max_tokens=9, seed=s, top_k=9 if s % 2 else 0) for s in range(8)]
    together = sample(logits_of(values), [row(s, [1, 2], [3, 4, 5]) for s in samplings])[0].tolist()
    alone = [
        int(sample(logits_of([v]), [row(s, [1, 2], [3, 4, 5])])[0][0]) for v, s in zip(values, samplings)
    ]
    assert together == alone


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad, temperature):
    values = [[0.0] * VOCAB, [bad] + [0.0] * (VOCAB - 1), [0.0] * (VOCAB - 1) + [9.0]]
    asked = Sampling(max_tokens=1, temperature=temperature, top_k=1, logprobs=1)
    tokens, logprobs = sample(logits_of(values), [row(asked)] * 3)
    assert tokens.tolist() == [0, NOT_FINITE, VOCAB - 1]
    assert set(logprobs) == {0, 2}


def test_logprobs_are_of_the_raw_distribution_whatever_shifts_and_filters_do():
    values = np.random.default_rng(2).normal(size=VOCAB).astype(np.float32)
    asked = Sampling(
        max_tokens=1, temperature=0.3, logprobs=4, top_k=2, logit_bias=((5, 50.0),), repetition_penalty=2.0
    )
    tokens, logprobs = sample(logits_of([values.tolist()]), [row(asked, [5, 6])])
    raw = values - np.log(np.exp(values.astype(np.float64)).sum())
    assert tokens[0] == 5
    assert logprobs[0].chosen == pytest.approx(raw[5], abs=1e-5)
    best = np.argsort(-raw, kind="stable")[:4]
    assert [i for i, _ in logprobs[0].top] == best.tolist()
    assert [p for _, p in logprobs[0].top] == pytest.approx(raw[best].tolist(), abs=1e-5)


def test_zero_alternatives_still_give_the_chosen_tokens_logprob():
    _, logprobs = sample(logits_of([[0.0, 0.0]]), [row(Sampling(max_tokens=1, temperature=0.0, logprobs=0))])
    assert logprobs[0].chosen == pytest.approx(math.log(0.5))
    assert logprobs[0].top == []


def test_stop_ids_cannot_come_before_min_tokens_and_can_afterwards():
    values = [0.0] * VOCAB
    values[7] = 9.0
    asked = Sampling(max_tokens=9, temperature=0.0, min_tokens=2, stop_token_ids=(7,))
    for output, expected in (([], 0), ([3], 0), ([3, 4], 7)):
        assert sample(logits_of([values]), [row(asked, [1, 7, 7, 7], output)])[0].tolist() == [expected]


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.2}])
@pytest.mark.parametrize("temperature", [5e-324, 1e-50, 1e-40, 1e-7])
def test_a_temperature_that_vanishes_takes_the_largest(draw, filters, temperature):
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(4))
    rows = [SampleRow(Sampling(max_tokens=4, temperature=temperature, seed=9, **filters), 0, HISTORY, 1)] * 2
    tokens, _ = sample(logits.clone(), rows, draw=draw)
    assert tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(
    "wild",
    [
        {"temperature": 1e308},
        {"temperature": 1e308, "logit_bias": [(1, -1e300)]},
        {"top_p": 0.0},
        {"top_p": -1.0},
        {"top_p": 1e9},
        {"min_p": 5.0},
        {"min_p": -1.0},
        {"top_k": -5},
        {"top_k": 2**63},
        {"repetition_penalty": 1e300},
    ],
    ids=str,
)
def test_settings_far_outside_of_their_range_give_a_token_all_the_same(draw, wild):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4))
    row = SampleRow(Sampling(**({"max_tokens": 4, "temperature": 1.0, "seed": 9} | wild)), 0, HISTORY, 1)
    tokens, _ = sample(logits, [row], draw=draw)
    assert 0 <= tokens[0] < VOCAB


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "wild",
    [
        {"logit_bias": [(0, 1e300)]},
        {"logit_bias": [(0, 3e38), (0, 3e38)]},
        {"logit_bias": [(i, -1e300) for i in range(VOCAB)]},
        {"repetition_penalty": 1e-300},
        {"frequency_penalty": -1e300},
        {"min_tokens": 9, "stop_token_ids": list(range(VOCAB))},
    ],
    ids=str,
)
def test_a_row_whose_settings_leave_no_number_ends_alone(draw, temperature, wild):
    logits = torch.ones(2, VOCAB)
    rows = [
        SampleRow(
            Sampling(**({"max_tokens": 99, "temperature": temperature, "seed": 9} | more)), 0, HISTORY, 1
        )
        for more in (wild, {})
    ]
    tokens, _ = sample(logits, rows, draw=draw)
    assert tokens[0] == NOT_FINITE
    assert 0 <= tokens[1] < VOCAB
