"""The CUDA path on a CPU (nothing captured, attention gathered), against the reference decoder."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_support import BLOCK_TOKENS, BLOCKS, Twins, fed_from_the_device, prompts_of
from engine_support import Driver, greedy, save_tiny
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from services.worker.engine.batch import build_batch  # noqa: E402
from services.worker.engine.cuda import attention as attention_module  # noqa: E402
from services.worker.engine.cuda.attention import FlashInferAttention, why_not_flashinfer  # noqa: E402
from services.worker.engine.cuda.decoder import FED_SLOTS, CudaDecoder  # noqa: E402
from services.worker.engine.cuda.draw import PlainDraw, PlainDraws, draw_plain, is_plain  # noqa: E402
from services.worker.engine.cuda.inputs import (  # noqa: E402
    BUCKETS,
    bucket_of,
    pack,
    pad_decode,
    page_lists,
    unpack,
)
from services.worker.engine.executor import EngineOptions, TorchExecutor  # noqa: E402
from services.worker.engine.kvcache import KvCache, KvPlan  # noqa: E402
from services.worker.engine.sampler import SampleRow, sample  # noqa: E402
from services.worker.engine.weights import ModelFolder  # noqa: E402
from services.worker.step import SlotArrays, StepInput  # noqa: E402
from shared.wire import Sampling  # noqa: E402
from tests.support.device_executor import device_executor  # noqa: E402

pytest_plugins = ("tests.support.torch_threads",)
pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_are_the_reference_decoders_however_the_work_is_cut(family, graphs, tmp_path):
    save_tiny(family, tmp_path, attention_bias=True) if family == "llama" else save_tiny(family, tmp_path)
    twins = Twins(tmp_path, graphs=graphs)
    prompts = prompts_of(5)
    samplings = [greedy(8), greedy(8, prompt_logprobs=0), greedy(8), greedy(8), greedy(8)]
    driver = Driver(twins, seed=2)
    driver.generate(prompts, samplings, chunk=17, stagger=1, random_chunks=True)
    driver.generate(prompts_of(6), samplings, chunk=64)
    assert twins.single > 5
    assert max(twins.errors) < 1e-4


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "limit"),
    [(torch.bfloat16, "float32", 0.08), (torch.float16, "float16", 0.02)],
    ids=["bfloat16", "float16"],
)
def test_sixteen_bit_stays_close_to_float32(dtype, kv_dtype, limit, tmp_path):
    # Weights of a usual size: large random ones would tell noise from noise.
    save_tiny("llama", tmp_path, initializer_range=0.08)
    twins = Twins(tmp_path, dtype, kv_dtype)
    Driver(twins, seed=1).generate(prompts_of(8), [greedy(6)] * 5, chunk=40)
    assert max(twins.errors) < limit


def test_rows_are_gathered_in_pieces_when_together_they_would_be_too_large(tmp_path, monkeypatch):
    save_tiny("llama", tmp_path)
    monkeypatch.setattr(attention_module, "_GATHER_BYTES", 30_000)
    twins = Twins(tmp_path)
    Driver(twins, seed=4).generate(prompts_of(3, (9, 30, 2, 17, 60, 5)), [greedy(5)] * 6, chunk=25)
    assert max(twins.errors) < 1e-4


def test_padded_rows_touch_no_block_of_a_sequence(tmp_path):
    save_tiny("llama", tmp_path)
    twins = Twins(tmp_path)
    driver = Driver(twins, seed=1)
    driver.generate(prompts_of(4, (20, 21, 22)), [greedy(5)] * 3)
    difference = (twins.kv.data[:BLOCKS] - twins.reference_kv.data[:BLOCKS]).abs()
    assert float(difference.max()) < 1e-4
    assert float(twins.kv.data[BLOCKS].abs().max()) > 0


def test_kv_without_a_block_for_padded_rows_is_refused(tmp_path):
    save_tiny("llama", tmp_path)
    folder = ModelFolder(tmp_path, 64)
    kv = KvCache(folder.config, KvPlan(8, 0, 4), "float32", torch.device("cpu"))
    with pytest.raises(ValueError, match="one more is needed"):
        CudaDecoder(folder, kv, torch.float32)


def decode_batch(kv_lens, seed=0):
    """The batch of a decode step of slots that hold so many ids, with random blocks."""
    rng = np.random.default_rng(seed)
    rows, width = len(kv_lens), -(-max(kv_lens) // BLOCK_TOKENS) + 1
    slots = SlotArrays(
        tokens=rng.integers(0, 199, (rows, 200)).astype(np.int32),
        block_table=np.full((rows, width), -1, np.int32),
        computed=np.array(kv_lens, np.int32) - 1,
        known=np.array(kv_lens, np.int32),
        prompt_len=np.ones(rows, np.int32),
        choice=np.zeros(rows, np.int32),
        sampling=[greedy(9)] * rows,
        version=np.ones(rows, np.int64),
    )
    for row, length in enumerate(kv_lens):
        held = -(-length // BLOCK_TOKENS)
        slots.block_table[row, :held] = rng.integers(0, BLOCKS, held)
    ones = np.ones(rows, np.int32)
    step = StepInput(np.arange(rows, dtype=np.int32), slots.computed, ones, np.ones(rows, np.bool_))
    return build_batch(step, slots, BLOCK_TOKENS), step, slots


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40))
def test_a_padded_step_keeps_its_rows_and_adds_idle_ones(kv_lens):
    batch, _, _ = decode_batch(kv_lens)
    rows = bucket_of(batch)
    assert rows is not None
    assert rows in BUCKETS
    assert rows >= len(kv_lens)
    assert rows == 1 or rows // 2 < len(kv_lens)
    padded = pad_decode(batch, rows, 16, BLOCKS)
    count = batch.rows
    for name in ("tokens", "positions", "kv_len", "write_block", "write_offset"):
        assert getattr(padded, name)[:count].tolist() == getattr(batch, name).tolist()
    width = batch.block_table.shape[1]
    held = batch.block_table >= 0
    assert (padded.block_table[:count, :width][held] == batch.block_table[held]).all()
    assert (padded.block_table[:count, :width][~held] == BLOCKS).all()
    assert (padded.block_table[count:] == BLOCKS).all()
    assert (padded.write_block[count:] == BLOCKS).all()
    assert padded.kv_len[count:].tolist() == [1] * (rows - count)


def test_steps_that_no_graph_fits_have_no_bucket():
    assert bucket_of(decode_batch([3] * 256)[0]) == 256
    assert bucket_of(decode_batch([3] * 257)[0]) is None
    slots = decode_batch([9, 9])[2]
    two = StepInput(np.array([0, 1], np.int32), np.array([7, 8], np.int32), np.array([2, 1], np.int32),
                    np.ones(2, np.bool_))  # fmt: skip
    assert bucket_of(build_batch(two, slots, BLOCK_TOKENS)) is None


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20))
def test_page_lists_name_the_blocks_of_every_row_in_order(kv_lens):
    batch, _, slots = decode_batch(kv_lens)
    starts, pages, ends = page_lists(batch, BLOCK_TOKENS)
    assert starts[-1] == len(pages)
    for row, length in enumerate(kv_lens):
        held = -(-length // BLOCK_TOKENS)
        assert pages[starts[row] : starts[row + 1]].tolist() == slots.block_table[row, :held].tolist()
        assert (held - 1) * BLOCK_TOKENS + ends[row] == length


def test_what_is_packed_comes_out_as_it_was():
    batch, _, _ = decode_batch([3, 40, 17])
    inputs = unpack(pack(batch, pinned=False), batch)
    for name in (
        "tokens",
        "positions",
        "write_block",
        "write_offset",
        "logit_tokens",
        "kv_len",
        "block_table",
    ):
        assert getattr(inputs, name).tolist() == getattr(batch, name).tolist()


def test_a_step_can_take_the_tokens_that_only_the_device_knows(tmp_path):
    save_tiny("llama", tmp_path)
    twins = Twins(tmp_path)
    fed_from_the_device(twins)
    assert max(twins.errors) < 1e-4


def test_a_slot_beyond_the_devices_memory_of_tokens_is_refused(tmp_path):
    save_tiny("llama", tmp_path)
    decoder = Twins(tmp_path).decoder
    one = np.zeros(1)
    plan = PlainDraw(np.array([FED_SLOTS], np.int32), one.astype(np.float32), one)
    with pytest.raises(ValueError, match="--max-slots"):
        decoder.draw(torch.zeros(1, 199), plan)


@pytest.mark.parametrize("temperature", [0.0, 1e-50, 0.3, 1.0, 2.5, 1e300])
def test_tokens_drawn_on_the_device_are_the_samplers(temperature):
    torch.manual_seed(11)
    logits = torch.randn(64, 3000) * 4
    logits[5] = 1.0  # all alike: the lowest id wins when greedy
    samplings = [Sampling(max_tokens=50, temperature=temperature, seed=s * 7919) for s in range(64)]
    samplings[9] = greedy(50, top_k=3)
    history = np.arange(20, dtype=np.int32)
    rows = [SampleRow(s, i % 3, history[: 4 + i % 16], 4) for i, s in enumerate(samplings)]
    slots = SlotArrays(
        tokens=np.tile(history, (64, 1)),
        block_table=np.zeros((64, 1), np.int32),
        computed=np.zeros(64, np.int32),
        known=np.array([len(r.history) for r in rows], np.int32),
        prompt_len=np.full(64, 4, np.int32),
        choice=np.array([r.choice for r in rows], np.int32),
        sampling=list(samplings),
        version=np.ones(64, np.int64),
    )
    ones = np.ones(64, np.int32)
    step = StepInput(np.arange(64, dtype=np.int32), slots.known - 1, ones, ones.astype(np.bool_))
    plan = PlainDraws().of(step, slots)
    assert plan is not None
    tokens = draw_plain(logits, plan)
    expected, _ = sample(logits.clone(), rows)
    assert tokens.tolist() == expected.tolist()


def test_a_row_that_is_not_finite_draws_no_token_and_leaves_the_others_alone():
    logits = torch.zeros(4, 50)
    logits[:, 7] = 1.0
    logits[1, 3], logits[2, 4], logits[3, 5] = float("nan"), float("inf"), float("-inf")
    for temperature in (0.0, 1.0):
        plan = PlainDraw(np.arange(4, dtype=np.int32), np.full(4, temperature, np.float32), np.full(4, 0.5))
        tokens = draw_plain(logits, plan).tolist()
        assert tokens[1:] == [-2, -2, -2]
        assert tokens[0] >= 0


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"logprobs": 0}, {"prompt_logprobs": 0},
        {"logit_bias": ((3, 1.0),)}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5}, {"min_tokens": 2, "stop_token_ids": (1,)},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_whatever_changes_the_distribution_is_left_to_the_host(change):
    assert is_plain(Sampling(max_tokens=5, temperature=1.0))
    assert not is_plain(Sampling(max_tokens=5, temperature=1.0, **change))


def test_a_slot_that_was_admitted_anew_is_looked_at_again():
    _, step, slots = decode_batch([5, 6])
    draws = PlainDraws()
    assert draws.of(step, slots) is not None
    slots.sampling[1] = Sampling(max_tokens=5, top_p=0.5)
    slots.version[1] += 1
    assert draws.of(step, slots) is None


def test_flashinfer_is_asked_only_for_formats_it_has():
    config = SimpleNamespace(head_dim=64)
    assert why_not_flashinfer(config, torch.bfloat16, torch.bfloat16) is None
    assert "float32" in why_not_flashinfer(config, torch.float32, torch.float32)
    assert "KV" in why_not_flashinfer(config, torch.float16, torch.bfloat16)
    assert "head size 80" in why_not_flashinfer(SimpleNamespace(head_dim=80), torch.float16, torch.float16)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "bfloat16"}, "--dtype bfloat16"),
        ({"kv_dtype": "bfloat16"}, "--kv-dtype bfloat16"),
        ({"device": "cuda"}, "--device cuda"),
    ],
    ids=["dtype", "kv dtype", "device"],
)
def test_what_needs_a_cuda_device_is_refused_without_one(options, words, tmp_path):
    if torch.cuda.is_available() and "device" in options:
        pytest.skip("there is a CUDA device")
    save_tiny("llama", tmp_path)
    with pytest.raises(ValueError, match=words):
        TorchExecutor(tmp_path, EngineOptions(**({"kv_bytes": 8 << 20, "measure_s": 0.0} | options)))


def executor_on(path, model):
    if path == "cuda":
        return device_executor(model, "float32", "cpu", BLOCKS, BLOCK_TOKENS)
    options = EngineOptions(
        dtype="float32", kv_bytes=700_000, block_tokens=BLOCK_TOKENS, kernels="torch", measure_s=0.0
    )
    return TorchExecutor(model, options)


def test_an_executor_draws_the_same_tokens_whether_the_device_or_the_host_does(tmp_path):
    save_tiny("llama", tmp_path)
    samplings = [
        greedy(7),
        Sampling(max_tokens=9, temperature=0.8, seed=5),
        Sampling(max_tokens=5, temperature=1.0, top_p=0.8, seed=6),
        Sampling(max_tokens=12, temperature=1.3, seed=7, stop_token_ids=(3,)),
        greedy(8, logprobs=2),
    ]
    executors = {path: executor_on(path, tmp_path) for path in ("torch", "cuda")}
    on_device = []
    drawn = executors["cuda"]._decoder.begin_draw

    def spy(*step):
        on_device.append(drawn(*step))
        return on_device[-1]

    executors["cuda"]._decoder.begin_draw = spy
    tokens = {
        path: [run.tokens for run in Driver(executor, seed=2).generate(prompts_of(7), samplings, chunk=30)]
        for path, executor in executors.items()
    }
    assert tokens["cuda"] == tokens["torch"]
    # Both ways were taken: at the end only rows without filters and log-probabilities are left.
    assert any(t is None for t in on_device)
    assert any(t is not None for t in on_device)


def test_a_row_without_finite_logits_is_stopped_and_its_blocks_cleaned(tmp_path):
    save_tiny("llama", tmp_path, broken_token=150)
    executor = executor_on("cuda", tmp_path)
    runs = Driver(executor).generate([[5, 6, 7], [5, 150, 7]], [greedy(4), greedy(4)])
    assert len(runs[0].tokens) == 4
    assert runs[1].tokens == [-2]
    assert bool(executor._kv.data.isfinite().all())


class FakeWrapper:
    """What FlashInfer's batch wrappers compute, from the same arguments, row by row."""

    def __init__(self, workspace, layout, **buffers):
        assert layout == "HND"
        self.rows = len(buffers["paged_kv_last_page_len_buffer"]) if buffers else None
        assert not buffers or (buffers["use_cuda_graph"] and buffers["use_tensor_cores"])

    def plan(self, *planned, causal=False, q_data_type, kv_data_type):
        if self.rows is None:
            assert causal
            self.queries, planned = planned[0].tolist(), planned[1:]
        else:
            self.queries = list(range(self.rows + 1))
        starts, pages, ends, *self.shape = planned
        assert len(ends) == len(self.queries) - 1
        self.pages = [pages[a:b].long() for a, b in pairwise(starts.tolist())]
        self.lengths = [(len(p) - 1) * self.shape[3] + int(e) for p, e in zip(self.pages, ends)]

    def run(self, q, planes):
        heads, kv_heads, head_dim, page = self.shape
        assert q.shape[1:] == (heads, head_dim)
        assert planes[0].shape[1:] == (kv_heads, page, head_dim)
        assert planes[0].stride() == planes[1].stride()
        out = torch.empty_like(q)
        for (first, stop), pages, length in zip(pairwise(self.queries), self.pages, self.lengths):
            k, v = (
                plane[pages].transpose(1, 2).reshape(-1, kv_heads, head_dim)[:length].transpose(0, 1)
                for plane in planes
            )
            count = stop - first
            mask = torch.arange(length) <= torch.arange(length - count, length)[:, None]
            out[first:stop] = torch.nn.functional.scaled_dot_product_attention(
                q[first:stop].transpose(0, 1)[None], k[None], v[None], attn_mask=mask, enable_gqa=True
            )[0].transpose(0, 1)
        return out


def test_flashinfer_is_told_the_pages_of_every_row(tmp_path, monkeypatch):
    """Its kernels need a device; that they are asked for the right thing does not."""
    library = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=FakeWrapper, BatchDecodeWithPagedKVCacheWrapper=FakeWrapper
    )
    nothing = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(torch.cuda, "Event", lambda: nothing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    save_tiny("llama", tmp_path)
    twins = Twins(tmp_path)
    attention = FlashInferAttention(twins.config, twins.kv, torch.float32)
    attention.probe(BLOCKS)
    twins.decoder._attention = attention
    driver = Driver(twins, seed=2)
    driver.generate(prompts_of(5), [greedy(8)] * 5, chunk=17, stagger=1, random_chunks=True)
    assert twins.single > 5
    assert max(twins.errors) < 1e-4
