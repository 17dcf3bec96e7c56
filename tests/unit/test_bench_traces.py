from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.bench import traces
from deploy.bench.traces import BadTrace, TraceRow
from deploy.bench.workload import Shape, poisson, random_jobs

DATA = Path(__file__).parents[1] / "data"
SHAPE = Shape()

row = st.builds(
    TraceRow,
    at=st.floats(0, 1000),
    prompt_tokens=st.integers(0, 20_000),
    output_tokens=st.integers(0, 3000),
    blocks=st.lists(st.integers(0, 5), max_size=6).map(tuple),
)
rows = st.lists(row, min_size=1, max_size=20).map(lambda r: sorted(r, key=lambda x: x.at))


def test_the_azure_trace_is_read_as_it_is_written():
    made = traces.parse((DATA / "azure_conv_2023.csv").read_text().splitlines())
    assert len(made) == 2000
    assert (made[0].at, made[0].prompt_tokens, made[0].output_tokens) == (0.0, 374, 44)
    # 18:15:46.6805900 to 18:15:50.9951690
    assert made[1].at == pytest.approx(4.314579)
    assert all(a.at <= b.at for a, b in pairwise(made))


def test_the_mooncake_trace_is_read_as_it_is_written():
    made = traces.parse((DATA / "mooncake_conversation.jsonl").read_text().splitlines())
    assert len(made) == 1500
    assert made[0] == TraceRow(0.0, 6758, 500, tuple(range(14)))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "empty"),
        ("a,b\n1,2", "line 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,5,x", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,5,5", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "no requests"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}\n{"timestamp": 1}', "line 2"),
        ('{"timestamp": 0', "line 1"),
    ],
)
def test_a_damaged_trace_is_refused_with_its_line(text, where):
    with pytest.raises(BadTrace, match=where):
        traces.parse(text.splitlines())


@settings(deadline=None, max_examples=50)
@given(rows=rows, context=st.integers(2, 8192), limit=st.integers(0, 30), speed=st.floats(0.1, 50))
def test_scaled_rows_fit_the_context_and_keep_order_and_pace(rows, context, limit, speed):
    scaled = traces.scale(rows, context, limit, speed)
    assert len(scaled.rows) == (min(limit, len(rows)) or len(rows))
    assert 0 < scaled.token_scale <= 1
    assert scaled.rows[0].at == 0
    for before, after in zip(rows, scaled.rows, strict=False):
        assert after.prompt_tokens >= 1
        assert after.output_tokens >= 1
        assert after.prompt_tokens + after.output_tokens <= context
        assert after.at == pytest.approx((before.at - rows[0].at) / speed)


@settings(deadline=None, max_examples=50)
@given(rows=rows, context=st.integers(64, 4096))
def test_prompts_share_exactly_the_prefixes_the_trace_names(rows, context):
    scaled = traces.scale(rows, context)
    jobs = traces.jobs(scaled, SHAPE, "7")
    for a, job_a in zip(scaled.rows, jobs, strict=True):
        assert len(job_a.prompt) == job_a.prompt_tokens == a.prompt_tokens
        for b, job_b in zip(scaled.rows, jobs, strict=True):
            same = 0
            while same < min(len(a.blocks), len(b.blocks)) and a.blocks[same] == b.blocks[same]:
                same += 1
            shared = min(same * scaled.block_tokens, a.prompt_tokens, b.prompt_tokens)
            assert job_a.prompt[:shared] == job_b.prompt[:shared]
            if a is not b and same * scaled.block_tokens + 8 < min(a.prompt_tokens, b.prompt_tokens):
                tail = slice(same * scaled.block_tokens, min(a.prompt_tokens, b.prompt_tokens))
                assert job_a.prompt[tail] != job_b.prompt[tail]


def test_the_same_seed_gives_the_same_jobs_and_another_gives_others():
    shape = Shape(32, 4, shared_prefix=8)
    one, again, other = (random_jobs(4, shape, s) for s in ("1", "1", "2"))
    assert one == again
    assert one != other
    assert len({tuple(j.prompt[:8]) for j in one}) == 1
    assert len({tuple(j.prompt) for j in one}) == 4


@settings(deadline=None, max_examples=50)
@given(rate=st.floats(0.1, 100), seed=st.integers(0, 1000))
def test_poisson_arrivals_are_ordered_and_of_the_right_mean(rate, seed):
    jobs = poisson(random_jobs(400, Shape(1, 1), "x"), rate, str(seed))
    assert all(a.at < b.at for a, b in pairwise(jobs))
    # The sum of 400 exponentials: standard deviation 5 % of its mean; six of those are as good as never.
    assert jobs[-1].at * rate == pytest.approx(400, rel=0.3)
