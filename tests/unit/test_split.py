"""How a model is split over the ranks of a group, against what the split must add up to."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.parallel.split import PANEL, plan_shards

SMOLLM = SimpleNamespace(
    heads=9, kv_heads=3, head_dim=64, hidden=576, intermediate=1536, vocab_size=49152, layers=30
)


@st.composite
def models(draw: st.DrawFn) -> SimpleNamespace:
    kv_heads, group = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    return SimpleNamespace(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=16 * draw(st.integers(1, 8)),
        hidden=16 * draw(st.integers(1, 64)),
        intermediate=draw(st.integers(1, 4000)),
        vocab_size=draw(st.integers(1, 60000)),
        layers=draw(st.integers(1, 4)),
    )


@given(models(), st.integers(1, 16))
def test_every_head_channel_and_word_belongs_to_exactly_one_rank(model: SimpleNamespace, size: int) -> None:
    least = min(model.heads, -(-model.intermediate // PANEL), -(-model.vocab_size // PANEL))
    if size > least:
        with pytest.raises(ValueError, match="lower --tp"):
            plan_shards(model, size)
        return
    plan = plan_shards(model, size)
    for name, count in (("heads", model.heads), ("ffn", model.intermediate), ("vocab", model.vocab_size)):
        spans = [getattr(shard, name) for shard in plan.shards]
        assert [i for span in spans for i in range(span.start, span.stop)] == list(range(count))
        assert all(span.size for span in spans)
    for shard in plan.shards:
        assert shard.ffn.start % PANEL == shard.vocab.start % PANEL == 0
    sizes = [shard.heads.size for shard in plan.shards]
    assert max(sizes) - min(sizes) <= 1
    assert plan.imbalance >= 1.0


@given(models(), st.integers(1, 16))
def test_each_query_head_finds_its_kv_head_on_its_rank(model: SimpleNamespace, size: int) -> None:
    try:
        plan = plan_shards(model, size)
    except ValueError:
        return
    group = model.heads // model.kv_heads
    for shard in plan.shards:
        read = [
            kv_head for kv_head, count in enumerate(shard.groups, shard.kv_heads.start) for _ in range(count)
        ]
        assert read == [head // group for head in range(shard.heads.start, shard.heads.stop)]
        assert min(shard.groups) >= 1


def test_the_splits_of_the_default_model() -> None:
    assert [shard.groups for shard in plan_shards(SMOLLM, 2).shards] == [(3, 2), (1, 3)]
    assert [shard.groups for shard in plan_shards(SMOLLM, 3).shards] == [(3,), (3,), (3,)]
    assert [shard.groups for shard in plan_shards(SMOLLM, 4).shards] == [(3,), (2,), (1, 1), (2,)]
    assert plan_shards(SMOLLM, 3).imbalance == 1.0
    assert plan_shards(SMOLLM, 2).kv_replication == pytest.approx(4 / 3)
    assert plan_shards(SMOLLM, 2).imbalance > 1.0


def test_more_ranks_than_heads_are_refused_with_what_is_too_small() -> None:
    with pytest.raises(ValueError, match=r"--tp 10: only 9 query heads"):
        plan_shards(SMOLLM, 10)
    with pytest.raises(ValueError, match="at least one rank"):
        plan_shards(SMOLLM, 0)
