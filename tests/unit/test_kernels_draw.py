"""Drawing in native code: the same ids as the reference keeps and takes, row by row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from services.worker.engine.draw import DRAW, draw_rows  # noqa: E402
from services.worker.engine.native import build  # noqa: E402

try:
    from services.worker.engine.native.decoder import Kernels

    TEAMS = [Kernels(1), Kernels(3)]
except build.KernelsUnavailable as error:
    pytest.skip(f"no native kernels here: {error}", allow_module_level=True)


def draws_of(values: np.ndarray, **fields) -> np.ndarray:
    """One draw of each row."""
    draws = np.zeros(len(values), DRAW)
    draws["row"], draws["largest"] = np.arange(len(values)), values.argmax(axis=1)
    draws["top_p"] = draws["temperature"] = 1.0
    for name, value in fields.items():
        draws[name] = value
    return draws


filters = st.tuples(
    st.sampled_from([0, 0, 1, 3, 40, 10**6]),
    st.sampled_from([1.0, 1.0, 0.9, 0.313, 0.0171, 0.0]),
    st.sampled_from([0.0, 0.0, 1e-9, 0.0713, 0.51, 1.0]),
    st.one_of(st.sampled_from([0.0, 1 - 2**-53]), st.floats(0, 1, exclude_max=True)),
    st.sampled_from([0.01, 0.5, 1.0, 2.0, 100.0]),
)


@settings(max_examples=150, deadline=None)
@given(
    size=st.sampled_from([1, 2, 24, 255, 256, 257, 3001]),
    spread=st.sampled_from([0.1, 1.0, 5.0, 40.0]),
    ties=st.booleans(),
    masked=st.booleans(),
    wishes=st.lists(filters, min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_kernel_draws_what_the_reference_draws(size, spread, ties, masked, wishes, seed):
    rng = np.random.default_rng(seed)
    wide = (rng.standard_normal((len(wishes), size + 7)) * spread).astype(np.float32)
    if ties:
        wide = np.round(wide)
    values = wide[:, :size]
    if masked:
        values[:, rng.random(size) < 0.5] = -np.inf
        values[:, 0] = 0.0
    draws = draws_of(values)
    for name, column in zip(("top_k", "top_p", "min_p", "uniform", "temperature"), zip(*wishes)):
        draws[name] = column
    # Sums in another order may move a uniform that is next to a border across it.
    near = [draws.copy(), draws.copy()]
    for moved, by in zip(near, (-1e-5, 1e-5)):
        moved["uniform"] = np.clip(draws["uniform"] + by, 0.0, 1 - 2**-53)
    lowest, highest = (draw_rows(values, moved) for moved in near)
    first, second = (kernels.draw(values, draws) for kernels in TEAMS)
    assert first.tolist() == second.tolist()
    assert ((lowest <= first) & (first <= highest)).all()


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}])
def test_draws_follow_the_distribution(fields):
    rng = np.random.default_rng(5)
    one = (rng.standard_normal(600) * 2).astype(np.float32)
    many = 40_000
    values = np.broadcast_to(one, (1, 600)).copy()
    draws = np.repeat(draws_of(values, **fields), many)
    draws["uniform"] = rng.random(many)
    counts = np.bincount(TEAMS[1].draw(values, draws), minlength=600)
    likely = np.exp(one - one.max(), dtype=np.float64)
    order = np.argsort(-one, kind="stable")
    if "top_p" in fields:
        share = np.cumsum(likely[order]) / likely.sum()
        likely[order[int(np.searchsorted(share, 0.9)) + 1 :]] = 0.0
    if "top_k" in fields:
        likely[order[50:]] = 0.0
    likely[likely < fields.get("min_p", 0.0)] = 0.0
    expected = likely / likely.sum() * many
    assert not counts[likely == 0.0].any()
    # Five standard deviations of every count.
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected) + 1).all()
