"""Passes of a tensor-parallel group against the whole model: any split, any chunks, any architecture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_support import save_tiny
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from services.worker.collective.port import LOOPBACK, GroupLost  # noqa: E402
from services.worker.engine.formats import weight_format  # noqa: E402
from services.worker.engine.kvcache import KvCache, KvPlan  # noqa: E402
from services.worker.engine.native import build  # noqa: E402
from services.worker.engine.shards import shard_of  # noqa: E402
from services.worker.engine.weights import ModelFolder  # noqa: E402
from tests.support.thread_group import ThreadRank, on_ranks  # noqa: E402
from tests.support.tp_steps import ARCHITECTURES, BLOCK, Steps, cut, family_and_sizes, joined  # noqa: E402

try:
    from services.worker.engine.native.decoder import Kernels, NativeDecoder

    build.load()
except build.KernelsUnavailable as error:
    pytest.skip(f"no native kernels here: {error}", allow_module_level=True)

pytest_plugins = ("tests.support.torch_threads",)
pytestmark = pytest.mark.usefixtures("one_torch_thread")

ONE = weight_format("float32")


def logits_of(
    path: Path,
    steps: Steps,
    end: Any = LOOPBACK,
    chunks: int = 1,
    dtype: str = "float32",
    threads: int = 1,
) -> list[Any]:
    """Logits of each step on this rank."""
    shard = shard_of(ModelFolder(path), end.rank, end.size)
    kv = KvCache(shard.config, KvPlan(BLOCK, 0, steps.blocks), "float32", torch.device("cpu"))
    decoder = NativeDecoder(Kernels(threads), shard, weight_format(dtype), kv, end)
    decoder.plan = lambda tokens: cut(tokens, chunks)
    return [decoder.forward(batch).clone() for batch in steps.batches]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    architecture=ARCHITECTURES,
    size=st.integers(2, 4),
    chunks=st.integers(1, 9),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_any_architecture_split_over_ranks_computes_what_one_rank_does(
    tmp_path_factory: pytest.TempPathFactory,
    architecture: dict[str, Any],
    size: int,
    chunks: int,
    threads: int,
    seed: int,
) -> None:
    path = tmp_path_factory.mktemp("model")
    family, sizes = family_and_sizes(architecture)
    save_tiny(family, path, seed % 1000, **sizes)
    steps = Steps(seed, sizes["vocab_size"])
    if size > sizes["num_attention_heads"]:
        with pytest.raises(ValueError, match="lower --tp"):
            shard_of(ModelFolder(path), 0, size)
        return
    expected = logits_of(path, steps)
    got = joined(on_ranks(size, lambda end: logits_of(path, steps, end, chunks, threads=threads)))
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine query heads over three KV heads, as SmolLM2 has."""
    path = tmp_path_factory.mktemp("nine")
    save_tiny(
        "llama",
        path,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=32,
        hidden_size=144,
        intermediate_size=120,
    )
    return path


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int8-dynamic"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_how_a_step_is_cut_into_chunks_changes_no_bit(nine_heads: Path, size: int, dtype: str) -> None:
    steps = Steps(7, 199)
    whole, cut_up = (
        on_ranks(size, lambda end, chunks=chunks: logits_of(nine_heads, steps, end, chunks, dtype))
        for chunks in (1, 7)
    )
    for one, other in zip(whole, cut_up, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_chunk_without_logits_sends_nothing_behind_its_last_keys_and_values(nine_heads: Path) -> None:
    steps = Steps(3, 199, sequences=1)
    sent: list[list[int]] = []

    def work(end: ThreadRank) -> None:
        logits_of(nine_heads, steps, end, chunks=3)
        sent.append(end.messages)

    on_ranks(2, work)
    layers, chunks, hidden = 3, 3, 144
    tokens = steps.batches[0].size
    first_step = sent[0][: chunks * (1 + 2 * (layers - 1)) + 2]
    assert sum(first_step[:chunks]) == tokens * hidden
    assert first_step[-2:] == [hidden, hidden]
    assert sent[0] == sent[1]


def test_a_rank_that_ends_in_the_middle_of_a_step_ends_it_for_all(nine_heads: Path) -> None:
    steps = Steps(5, 199)

    def leave_early(end: ThreadRank) -> None:
        if end.rank == 1:
            begun: Callable[[], None] = end._begin

            def begin() -> None:
                begun()
                if len(end.messages) == 4:
                    end.abort("rank 1 is gone")

            end._begin = begin  # type: ignore[method-assign]
        with pytest.raises(GroupLost, match="rank 1 is gone"):
            logits_of(nine_heads, steps, end, chunks=2, threads=2)

    on_ranks(3, leave_early)
