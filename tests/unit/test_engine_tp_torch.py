"""A group's ranks that compute with torch, against the whole model: any split, architecture and format."""

from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_support import Driver, greedy, save_tiny
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from services.worker.collective.port import LOOPBACK, Collective, GroupLost  # noqa: E402
from services.worker.collective.tensors import HostReducer  # noqa: E402
from services.worker.engine.cuda.chunks import cut_batch  # noqa: E402
from services.worker.engine.cuda.decoder import CudaDecoder  # noqa: E402
from services.worker.engine.cuda.draw import (  # noqa: E402
    OnTheWay,
    PlainDraw,
    await_checked,
    draw_plain,
    draw_split,
)
from services.worker.engine.cuda.planning import plan_by_measuring  # noqa: E402
from services.worker.engine.decoder import TorchDecoder  # noqa: E402
from services.worker.engine.device import Device  # noqa: E402
from services.worker.engine.executor import EngineOptions, TorchExecutor  # noqa: E402
from services.worker.engine.kvcache import KvCache, KvPlan  # noqa: E402
from services.worker.engine.shards import ShardedFolder, shard_of  # noqa: E402
from services.worker.engine.weights import ModelFolder  # noqa: E402
from services.worker.parallel.crossover import CrossoverTable, Timing  # noqa: E402
from services.worker.step import NOT_FINITE  # noqa: E402
from shared.wire import Sampling  # noqa: E402
from tests.support.device_executor import kv_with_scratch  # noqa: E402
from tests.support.thread_group import ThreadRank, on_ranks  # noqa: E402
from tests.support.tp_steps import ARCHITECTURES, BLOCK, Steps, cut, family_and_sizes, joined  # noqa: E402

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


class Late:
    """`Begin` whose sums are made when they land, oldest first; until then there is nothing to be read."""

    def __init__(self, reducer: HostReducer) -> None:
        self._reducer = reducer
        self._flying: deque[tuple[Any, Any]] = deque()
        self.most = 0
        self.sizes: list[int] = []

    def __call__(self, part: Any) -> Any:
        mine = part.clone()
        part.fill_(float("nan"))
        self._flying.append((part, mine))
        self.most = max(self.most, len(self._flying))
        self.sizes.append(part.numel())

        def land() -> Any:
            while any(target is part for target, _ in self._flying):
                target, value = self._flying.popleft()
                target.copy_(self._reducer.all_reduce(value))
            return part

        return land


@torch.inference_mode()
def on_device(
    path: Path, steps: Steps, end: Any, chunks: int, dtype: Any = torch.float32, late: bool = True
) -> tuple[list[Any], Late]:
    """Logits of each step on this rank, by the CUDA path on a CPU, and what its overlapped sums were."""
    own, reducer = shard(path, end), HostReducer(end)
    kv = kv_with_scratch(own.config, "float32", CPU, steps.blocks, BLOCK)
    decoder = CudaDecoder(own, kv, dtype, reducer=reducer)
    decoder.plan = lambda tokens: cut(tokens, chunks)
    aside = Late(reducer)
    if late:
        decoder._aside = aside
    return [decoder.forward(batch).clone() for batch in steps.batches], aside


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


@settings(max_examples=12, deadline=None)
@given(
    architecture=ARCHITECTURES,
    size=st.integers(2, 4),
    chunks=st.integers(1, 6),
    late=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_device_path_computes_it_too_however_a_step_is_cut_and_however_late_sums_land(
    tmp_path_factory: pytest.TempPathFactory,
    architecture: dict[str, Any],
    size: int,
    chunks: int,
    late: bool,
    seed: int,
) -> None:
    path = tmp_path_factory.mktemp("model")
    family, sizes = family_and_sizes(architecture)
    size = min(size, sizes["num_attention_heads"])
    save_tiny(family, path, seed % 1000, **sizes)
    steps = Steps(seed, sizes["vocab_size"])
    expected = reference(path, steps)
    got = on_ranks(size, lambda end: on_device(path, steps, end, chunks, late=late)[0])
    for one, other in zip(expected, joined(got), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_ranks_in_sixteen_bit_stay_close_to_float32(nine_heads: Path) -> None:
    steps = Steps(7, 199)
    got = on_ranks(3, lambda end: on_device(nine_heads, steps, end, 3, torch.bfloat16)[0])
    for one, other in zip(reference(nine_heads, steps), joined(got), strict=True):
        assert float((other - one).abs().max()) < 0.08 * float(one.abs().max())


def test_sums_of_one_chunk_travel_while_others_are_computed(nine_heads: Path) -> None:
    steps = Steps(3, 199, sequences=1)
    tokens, hidden, layers = steps.batches[0].size, 144, 3
    steps.batches = steps.batches[:1]
    for _, sums in on_ranks(2, lambda end: on_device(nine_heads, steps, end, 4)):
        assert sums.most == 4
        # Of the last layer only what leads to the logits: a chunk without any sends nothing of it.
        assert sum(sums.sizes) == tokens * hidden * (1 + 2 * (layers - 1)) + 2 * hidden


@given(seed=st.integers(0, 10**6), chunks=st.integers(1, 12))
def test_chunks_of_a_step_are_its_tokens_once_each_and_see_what_they_would_have_seen(
    seed: int, chunks: int
) -> None:
    for batch in Steps(seed, 100).batches:
        plan = cut(batch.size, chunks)
        parts = cut_batch(batch, plan)
        assert [part.size for part in parts] == [b - a for a, b in pairwise(plan.tolist())]
        for name in ("tokens", "positions", "write_block", "write_offset"):
            joint = np.concatenate([getattr(part, name) for part in parts])
            assert joint.tolist() == getattr(batch, name).tolist()
        wanted = [start + part.logit_tokens for start, part in zip(plan, parts)]
        assert np.concatenate(wanted).tolist() == batch.logit_tokens.tolist()
        row_of = np.repeat(np.arange(batch.rows), np.diff(batch.row_start))
        for start, part in zip(plan, parts):
            for row in range(part.rows):
                first, stop = part.row_start[row], part.row_start[row + 1]
                assert stop > first
                whole = row_of[start + first : start + stop]
                assert len(set(whole.tolist())) == 1
                assert part.block_table[row].tolist() == batch.block_table[whole[0]].tolist()
                assert part.kv_len[row] == part.positions[stop - 1] + 1


def test_a_plan_that_is_not_of_this_step_is_refused() -> None:
    batch = Steps(1, 100).batches[0]
    for plan in ([0, batch.size + 1], [1, batch.size], [0, 3, 3, batch.size]):
        with pytest.raises(ValueError, match="chunk plan"):
            cut_batch(batch, plan)


def test_a_part_of_a_model_is_refused_without_the_other_ranks(nine_heads: Path) -> None:
    own = shard_of(ModelFolder(nine_heads), 0, 2, filled=True)
    kv = kv_with_scratch(own.config, "float32", CPU, 4, BLOCK)
    with pytest.raises(ValueError, match="split 2 ways"):
        CudaDecoder(own, kv, torch.float32)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 4), rows=st.integers(1, 6), warm=st.booleans())
def test_drawing_from_a_split_vocabulary_gives_every_rank_the_token_of_the_whole(
    seed: int, size: int, rows: int, warm: bool
) -> None:
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(size, 200))
    logits = torch.from_numpy(rng.normal(0, 5, (rows, vocab)).astype(np.float32).round(1))
    if rows > 2:
        logits[1, int(rng.integers(vocab))] = float(rng.choice([np.nan, np.inf, -np.inf]))
    temperature = rng.choice([0.0, 0.3, 1.0, 4.0], rows).astype(np.float32) * np.float32(warm)
    plan = PlainDraw(np.arange(rows, dtype=np.int32), temperature, rng.random(rows))
    bounds = [0, *sorted(rng.choice(np.arange(1, vocab), size - 1, replace=False).tolist()), vocab]
    expected = draw_plain(logits, plan)

    def work(end: ThreadRank) -> Any:
        first, stop = bounds[end.rank], bounds[end.rank + 1]
        return draw_split(logits[:, first:stop].contiguous(), plan, first, HostReducer(end))

    drawn = on_ranks(size, work)
    assert all(torch.equal(drawn[0], other) for other in drawn)
    assert int(drawn[0][1]) == NOT_FINITE if rows > 2 else True
    for row in torch.nonzero(drawn[0] != expected).flatten().tolist():
        # Only where the uniform falls on a boundary, but for rounding.
        mass = (logits[row].double() / float(temperature[row])).softmax(-1).cumsum(-1)
        assert float((mass - plan.uniform[row]).abs().min()) < 1e-6


@torch.inference_mode()
def test_what_a_group_drew_feeds_its_next_step_on_every_rank(nine_heads: Path) -> None:
    steps = Steps(9, 199)
    first, then = steps.batches[2], steps.batches[3]
    slots = np.arange(first.rows, dtype=np.int32)
    plan = PlainDraw(slots, np.zeros(first.rows, np.float32), np.zeros(first.rows))

    def work(end: ThreadRank) -> Any:
        own = shard(nine_heads, end)
        kv = kv_with_scratch(own.config, "float32", CPU, steps.blocks, BLOCK)
        decoder = CudaDecoder(own, kv, torch.float32, reducer=HostReducer(end))
        for batch in steps.batches[:2]:
            decoder.forward(batch)
        tokens = decoder.draw(decoder.forward(first), plan)
        fed = decoder.forward(replace(then, tokens=-1 - slots)).clone()
        told = decoder.forward(replace(then, tokens=tokens.numpy().astype(np.int32))).clone()
        return tokens, fed, told

    results = on_ranks(3, work)
    for tokens, fed, told in results:
        assert torch.equal(tokens, results[0][0])
        assert torch.equal(fed, told)


def test_ranks_of_devices_measure_and_then_cut_their_prompts_alike(nine_heads: Path) -> None:
    steps = Steps(9, 199)
    slow = CrossoverTable.build([Timing("any", size, 1e-4 + size * 1e-7) for size in (1024, 1 << 20)])

    def work(end: ThreadRank) -> Any:
        own = shard(nine_heads, end)
        kv = kv_with_scratch(own.config, "float32", CPU, 60, BLOCK)
        decoder = CudaDecoder(own, kv, torch.float32, reducer=HostReducer(end))
        costs = plan_by_measuring(decoder, kv, end, slow)
        with torch.inference_mode():
            logits = [decoder.forward(batch).clone() for batch in steps.batches]
        return costs, decoder.plan(512).tolist(), logits

    (costs, plan, one), (others, same, other) = on_ranks(2, work)
    assert costs == others
    assert plan == same
    assert costs.attend.row_s > 0
    assert costs.link.s_per_byte == pytest.approx(1e-7, rel=0.01)
    for got, expected in zip(joined([one, other]), reference(nine_heads, steps), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_whoever_waits_for_a_device_hears_that_the_group_is_lost() -> None:
    looked = []

    def check() -> None:
        looked.append(1)
        if len(looked) == 3:
            raise GroupLost("rank 1 is gone")

    with pytest.raises(GroupLost, match="rank 1 is gone"):
        await_checked(lambda: False, check)
    await_checked(lambda: True, check)
    assert len(looked) == 3
    looked.clear()
    on_the_way = OnTheWay(torch.zeros(1), check)
    assert on_the_way.ready()
    on_the_way._arrived = SimpleNamespace(query=lambda: False)  # type: ignore[assignment]
    assert not on_the_way.ready()
    assert not on_the_way.ready()
    with pytest.raises(GroupLost, match="rank 1 is gone"):
        on_the_way.ready()


SAMPLINGS = (
    greedy(9),
    Sampling(max_tokens=9, temperature=0.8, seed=7),
    Sampling(max_tokens=9, temperature=0.9, top_k=20, top_p=0.9, seed=8, logprobs=2),
)


def executor(path: Path, end: Collective, on_device: bool) -> TorchExecutor:
    """Of plain torch, or computing as on a CUDA device."""
    options = EngineOptions("float32", kv_bytes=1 << 22, kernels="torch", measure_s=0, threads=1, max_len=128)
    made = TorchExecutor(path, options, end)
    if on_device:
        own = shard(path, end)
        made._kv = kv_with_scratch(own.config, "float32", CPU, made.info.blocks_total, made.info.block_tokens)
        reducer = None if end.size == 1 else HostReducer(end)
        made._decoder = CudaDecoder(own, made._kv, torch.float32, reducer=reducer)
        made._decoder.plan = lambda tokens: cut(tokens, 3)
        made._info = replace(made._info, overlaps=True)
    return made


@pytest.mark.parametrize("on_device", [False, True], ids=["plain", "device"])
@pytest.mark.parametrize("kinds", [SAMPLINGS[:2], SAMPLINGS], ids=["drawn on devices", "drawn on hosts"])
def test_a_group_generates_what_one_rank_does(nine_heads: Path, on_device: bool, kinds: Any) -> None:
    prompts = [list(range(3 + i, 40 + 7 * i)) for i in range(len(kinds))]

    def generated(end: Any) -> list[list[int]]:
        runs = Driver(executor(nine_heads, end, on_device)).generate(prompts, list(kinds), chunk=16)
        return [run.tokens for run in runs]

    expected = generated(LOOPBACK)
    assert [len(tokens) for tokens in expected] == [9] * len(kinds)
    assert on_ranks(3, generated) == [expected] * 3
