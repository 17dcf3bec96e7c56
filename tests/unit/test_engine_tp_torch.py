"""A group's ranks that compute with torch, against the whole model: any split, architecture and format."""

from pathlib import Path
from typing import Any

import pytest
from engine_support import save_tiny
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from services.worker.collective.port import LOOPBACK, Collective, GroupLost  # noqa: E402
from services.worker.engine.cuda.chunks import cut_batch  # noqa: E402
from services.worker.engine.decoder import TorchDecoder  # noqa: E402
from services.worker.engine.device import Device  # noqa: E402
from services.worker.engine.kvcache import KvCache, KvPlan  # noqa: E402
from services.worker.engine.shards import ShardedFolder, shard_of  # noqa: E402
from services.worker.engine.weights import ModelFolder  # noqa: E402
from tests.support.thread_group import ThreadRank, on_ranks  # noqa: E402
from tests.support.tp_steps import ARCHITECTURES, BLOCK, Steps, family_and_sizes, joined  # noqa: E402

pytest_plugins = ("tests.support.torch_threads",)
pytestmark = pytest.mark.usefixtures("one_torch_thread")

CPU = torch.device("cpu")


def shard(path: Path, end: Collective) -> ShardedFolder:
    return shard_of(ModelFolder(path), end.rank, end.size, filled=True)


@torch.inference_mode()
def reference(
    path: Path, steps: Steps, end: Any = LOOPBACK, dtype: str = "float32", deterministic: bool = False
) -> list[Any]:
    """Logits of each step on this rank, by plain torch."""
    own = shard(path, end)
    kv = KvCache(own.config, KvPlan(BLOCK, 0, steps.blocks), "float32", CPU)
    decoder = TorchDecoder(own, Device("cpu", dtype), kv, deterministic, end)
    return [decoder.forward(batch).clone() for batch in steps.batches]


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine query heads over three KV heads, as SmolLM2 has; sizes that no number of ranks divides."""
    path = tmp_path_factory.mktemp("nine")
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144, "intermediate_size": 115}
    save_tiny("qwen3", path, head_dim=32, initializer_range=0.1, attention_bias=True, **sizes)
    return path


@settings(max_examples=12, deadline=None)
@given(architecture=ARCHITECTURES, size=st.integers(2, 4), seed=st.integers(0, 2**31))
def test_any_architecture_split_over_ranks_computes_what_one_rank_does(
    tmp_path_factory: pytest.TempPathFactory, architecture: dict[str, Any], size: int, seed: int
) -> None:
    path = tmp_path_factory.mktemp("model")
    family, sizes = family_and_sizes(architecture)
    size = min(size, sizes["num_attention_heads"])
    save_tiny(family, path, seed % 1000, **sizes)
    steps = Steps(seed, sizes["vocab_size"])
    expected = reference(path, steps)
    got = joined(on_ranks(size, lambda end: reference(path, steps, end)))
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "int8", "int8-dynamic"])
def test_ranks_keep_their_weights_in_any_format(nine_heads: Path, dtype: str) -> None:
    steps = Steps(7, 199)
    expected = reference(nine_heads, steps, dtype=dtype)
    got = joined(on_ranks(2, lambda end: reference(nine_heads, steps, end, dtype)))
    # Columns of `out` and `down` have a scale for each rank's part, and activations are quantised by groups.
    limit = 2e-3 if dtype == "float16" else 0.1
    for one, other in zip(expected, got, strict=True):
        assert float((other - one).abs().max()) < limit * float(one.abs().max())


def test_with_deterministic_a_token_of_a_group_keeps_its_bits_whatever_is_beside_it(nine_heads: Path) -> None:
    together, alone = Steps(7, 199, sequences=3), Steps(7, 199, sequences=3)
    alone.batches = [one for each in together.batches for one in cut_batch(each, each.row_start)]
    got = [
        torch.cat(joined(on_ranks(3, lambda end, s=steps: reference(nine_heads, s, end, deterministic=True))))
        for steps in (together, alone)
    ]
    assert torch.equal(*got)


def test_heads_that_fill_up_narrow_groups_change_nothing(nine_heads: Path) -> None:
    steps = Steps(5, 199)
    parts = [shard_of(ModelFolder(nine_heads), rank, 2, filled=True) for rank in range(2)]
    assert all(part.layout.heads > part.shard.heads.size for part in parts)
    expected = reference(nine_heads, steps)
    for one, other in zip(expected, joined(on_ranks(2, lambda end: reference(nine_heads, steps, end)))):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_a_part_with_uneven_groups_must_be_filled(nine_heads: Path) -> None:
    folder = ModelFolder(nine_heads)
    uneven = next(s for s in (shard_of(folder, rank, 2) for rank in range(2)) if not s.layout.even)
    kv = KvCache(uneven.config, KvPlan(BLOCK, 0, 4), "float32", CPU)
    with pytest.raises(ValueError, match="make the shard `filled`"):
        TorchDecoder(uneven, Device("cpu", "float32"), kv)


def test_an_id_of_another_rank_brings_in_no_number_that_is_none(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, broken_token=150)
    steps = Steps(11, 149)
    for step in joined(on_ranks(2, lambda end: reference(tmp_path, steps, end))):
        assert bool(step[:, :150].isfinite().all())


def test_a_rank_that_ends_in_the_middle_of_a_step_ends_it_for_all(nine_heads: Path) -> None:
    steps = Steps(5, 199)

    def leave_early(end: ThreadRank) -> None:
        if end.rank == 1:
            whole, sums = end.all_reduce, []

            def all_reduce(values: Any) -> None:
                sums.append(values.size)
                if len(sums) == 4:
                    end.abort("rank 1 is gone")
                whole(values)

            end.all_reduce = all_reduce  # type: ignore[method-assign]
        with pytest.raises(GroupLost, match="rank 1 is gone"):
            reference(nine_heads, steps, end)

    on_ranks(3, leave_early)


def test_waiting_for_other_ranks_is_counted_apart_from_computing(nine_heads: Path) -> None:
    steps = Steps(5, 199)

    def spent(end: Any) -> dict[str, float]:
        own = shard(nine_heads, end)
        kv = KvCache(own.config, KvPlan(BLOCK, 0, steps.blocks), "float32", CPU)
        decoder = TorchDecoder(own, Device("cpu", "float32"), kv, collective=end)
        decoder.forward(steps.batches[0])
        return decoder.spent()

    assert "exposed communication" not in spent(LOOPBACK)
    assert all(each["exposed communication"] > 0 for each in on_ranks(2, spent))
