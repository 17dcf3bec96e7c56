"""Native attention against torch over ragged batches; only a token's own history touches its result."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from services.worker.engine.native import build  # noqa: E402

try:
    from services.worker.engine.native.attention import attend
    from services.worker.engine.native.decoder import Kernels

    KERNELS = {threads: Kernels(threads) for threads in (1, 2, 3, 4)}
except build.KernelsUnavailable as error:
    pytest.skip(f"no native kernels here: {error}", allow_module_level=True)

pytest_plugins = ("tests.support.torch_threads",)
pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Paged:
    """Random KV of sequences of given lengths in shuffled blocks, and one query per token of each."""

    def __init__(self, lengths, kv_heads=2, group=3, dim=64, block_tokens=16, half=False, seed=0, size=1.0):
        generator = torch.Generator().manual_seed(seed)
        widths = [-(-n // block_tokens) for n in lengths]
        order = iter(np.random.default_rng(seed).permutation(sum(widths)).astype(np.int32))
        self.table = np.zeros((len(lengths), max(widths)), np.int32)
        for r, width in enumerate(widths):
            self.table[r, :width] = [next(order) for _ in range(width)]
        kv = torch.randn(sum(widths), 2, 2, kv_heads, block_tokens, dim, generator=generator) * size
        self.kv = kv.half() if half else kv
        self.lengths, self.group, self.layer, self.size = lengths, group, 1, block_tokens
        self.q = [torch.randn(n, kv_heads * group, dim, generator=generator) * size for n in lengths]

    def attend(self, chunks, threads=2):
        """Results of tokens [first, stop) of row r for each (r, first, stop) of `chunks`, in one batch."""
        counts = [stop - first for _, first, stop in chunks]
        row_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.concatenate([np.arange(first, stop) for _, first, stop in chunks]).astype(np.int32)
        q = torch.cat([self.q[r][first:stop] for r, first, stop in chunks])
        table = np.ascontiguousarray(self.table[[r for r, _, _ in chunks]])
        out = attend(KERNELS[threads], self.kv, self.layer, q, row_start, positions, table)
        return torch.split(out, counts)

    def expected(self, r, first, stop):
        blocks = torch.from_numpy(self.table[r, : -(-stop // self.size)].astype(np.int64))
        kv = self.kv[blocks, self.layer].double()  # [block, 2, kv_head, token, dim]
        kv = kv.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :stop].repeat_interleave(self.group, dim=1)
        seen = torch.arange(stop) <= torch.arange(first, stop)[:, None]
        q = self.q[r][first:stop].transpose(0, 1).double()
        out = torch.nn.functional.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=seen)
        return out.transpose(0, 1)


SHAPES = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 9),
        "dim": st.sampled_from([16, 32, 48, 64, 80, 128]),
        "block_tokens": st.sampled_from([1, 4, 8, 16, 32, 64]),
        "half": st.booleans(),
        "size": st.sampled_from([0.1, 1.0, 6.0]),
    }
)
LENGTHS = st.one_of(st.integers(1, 80), st.integers(240, 280), st.integers(500, 800))


@settings(max_examples=40, deadline=None)
@given(
    shape=SHAPES,
    lengths=st.lists(LENGTHS, min_size=1, max_size=4),
    counts=st.lists(st.one_of(st.just(1), st.integers(1, 70)), min_size=4, max_size=4),
    threads=st.integers(1, 4),
)
def test_attention_matches_torch_for_any_batch(shape, lengths, counts, threads):
    paged = Paged(lengths, **shape)
    chunks = [(r, max(0, n - count), n) for r, (n, count) in enumerate(zip(lengths, counts))]
    size = shape["size"]  # scores grow with its square, values with it
    for chunk, got in zip(chunks, paged.attend(chunks, threads), strict=True):
        expected = paged.expected(*chunk)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5 * size * (1 + size * size))


@settings(max_examples=30, deadline=None)
@given(
    shape=SHAPES,
    length=st.integers(2, 1100),
    others=st.lists(LENGTHS, max_size=3),
    cut=st.integers(0, 10_000),
    count=st.integers(1, 60),
    threads=st.integers(1, 4),
)
def test_a_tokens_result_has_the_same_bits_however_its_sequence_is_cut_and_whoever_shares_the_batch(
    shape, length, others, cut, count, threads
):
    paged = Paged([length, *others], **shape)
    first = cut % length
    stop = min(length, first + count)
    [chunk] = paged.attend([(0, first, stop)], threads=1)
    beside = [(r + 1, n - 1, n) for r, n in enumerate(others)]
    for at in {first, stop - 1}:
        *_, alone = paged.attend([*beside, (0, at, at + 1)], threads)
        assert torch.equal(alone[0], chunk[at - first])


def test_one_long_sequence_is_shared_by_all_threads_with_the_same_bits_every_time():
    paged = Paged([6000], kv_heads=3)
    [alone] = paged.attend([(0, 5999, 6000)], threads=1)
    for threads in (2, 3, 4) * 10:
        [got] = paged.attend([(0, 5999, 6000)], threads)
        assert torch.equal(got, alone)


def test_scores_far_apart_neither_overflow_nor_lose_the_largest():
    paged = Paged([700], size=30.0)
    [got] = paged.attend([(0, 650, 700)])
    torch.testing.assert_close(got.double(), paged.expected(0, 650, 700), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("half", [False, True])
def test_a_key_that_is_not_a_number_spoils_exactly_the_tokens_that_see_it(half):
    paged = Paged([600], kv_heads=1, group=1, half=half)
    paged.kv[paged.table[0, 400 // 16], 1, 0, 0, 400 % 16, 5] = float("nan")
    [got] = paged.attend([(0, 390, 410)])
    spoilt = ~torch.isfinite(got).flatten(1).all(dim=1)
    assert spoilt.tolist() == [at >= 400 for at in range(390, 410)]


def test_what_a_block_holds_behind_the_sequence_is_never_seen():
    paged = Paged([37], half=True)
    [before] = paged.attend([(0, 30, 37)])
    paged.kv[paged.table[0, 2], :, :, :, 5:] = float("nan")
    [after] = paged.attend([(0, 30, 37)])
    assert torch.equal(before, after)
