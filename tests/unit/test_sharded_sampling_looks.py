"""Looking at a slice of logits in native code: the same as the reference finds, to the last candidate."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from services.worker.engine.native import build
from services.worker.engine.sharded_sampling_looks import LOOK, look_rows, looks_of
from services.worker.engine.sharded_sampling_merge import exp

try:
    from services.worker.engine.native.decoder import Kernels

    TEAMS = [Kernels(1), Kernels(3)]
except build.KernelsUnavailable as error:
    pytest.skip(f"no native kernels here: {error}", allow_module_level=True)


@settings(max_examples=150, deadline=None)
@given(
    size=st.sampled_from([1, 7, 8, 255, 257, 3001]),
    spread=st.sampled_from([0.0, 0.1, 5.0, 40.0]),
    ties=st.booleans(),
    order=st.sampled_from(["any", "rising", "falling"]),
    bad=st.lists(st.sampled_from([np.nan, np.inf, -np.inf, -0.0]), max_size=3),
    wishes=st.lists(
        st.tuples(st.sampled_from([0.0, 1e-5, 0.7, 1e30]), st.sampled_from([0, 1, 20, 66, 256, 5000])),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_kernel_finds_what_the_reference_finds(size, spread, ties, order, bad, wishes, seed):
    rng = np.random.default_rng(seed)
    wide = (rng.standard_normal((len(wishes), size + 7)) * spread).astype(np.float32)
    if ties:
        wide = np.round(wide)
    values = wide[:, :size]
    if order != "any":
        values.sort(axis=1)
        values[:] = values[:, :: 1 if order == "rising" else -1].copy()
    for value in bad:
        values[rng.integers(len(values)), rng.integers(size)] = value
    looks = np.zeros(len(wishes), LOOK)
    looks["row"] = rng.permutation(len(wishes))
    looks["temperature"], looks["count"] = zip(*wishes)
    looks["at"] = np.cumsum(looks["count"]) - looks["count"]
    all_listed = int(looks["count"].sum())
    found, listed = look_rows(values, looks, 1000, all_listed)
    for kernels in TEAMS:
        mine, mine_listed = looks_of(kernels)(values, looks, 1000, all_listed)
        assert mine["state"].tolist() == found["state"].tolist()
        known = found["state"] > 0
        for name in ("id", "value", "raw"):
            assert mine[name][known].tolist() == found[name][known].tolist()
        assert mine["sum"][known] == pytest.approx(found["sum"][known], rel=1e-6)
        assert mine_listed.tolist() == listed.tolist()


def test_the_exponential_that_ranks_share_is_exact_to_the_last_digits():
    x = np.concatenate((-np.geomspace(1e-300, 699, 20_000), -np.linspace(0, 699, 20_000), [0.0]))
    assert np.abs(exp(x) / np.exp(x) - 1).max() < 5e-16
    assert exp(np.array([-701.0, -1e300, -np.inf])).tolist() == [0.0, 0.0, 0.0]
