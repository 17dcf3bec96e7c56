"""With --deterministic the bits of a sequence's logits depend on nothing but the sequence."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from engine_support import Driver, greedy, save_tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.engine import invariant
from services.worker.engine.executor import EngineOptions, TorchExecutor
from services.worker.engine.invariant import by_tiles, check_places
from services.worker.engine.native import build
from shared.wire import Sampling

try:
    build.load()
    KERNELS = ["torch", "native"]
except build.KernelsUnavailable:
    KERNELS = ["torch"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("deterministic") / "model"
    save_tiny("qwen3", path, num_hidden_layers=2, head_dim=32, intermediate_size=88, vocab_size=1003)
    return path


@pytest.fixture(
    scope="module",
    params=[(k, *f) for k in KERNELS for f in (("float32", "float16", "2"), ("float16", "float32", "1"))],
    ids="-".join,
)
def executor(request, folder):
    kernels, dtype, kv_dtype, threads = request.param
    options = EngineOptions(
        dtype=dtype, kv_dtype=kv_dtype, kv_bytes=8 << 20, block_tokens=8, threads=int(threads),
        kernels=kernels, deterministic=True, measure_s=0.0,
    )  # fmt: skip
    made = TorchExecutor(folder, options)
    assert dict(made.info.detail)["deterministic"] == "yes"
    yield made
    made.close()


def logits_of(executor, prompts, samplings, **how):
    """Logits by position of the first prompt, and its run."""
    seen: dict[int, torch.Tensor] = {}
    forward = executor._decoder.forward

    def spy(batch):
        logits = forward(batch)
        for place, token in enumerate(batch.logit_tokens):
            if token < batch.row_start[1] and batch.block_table[0, 0] == first_block:
                seen[int(batch.positions[token])] = logits[place].clone()
        return logits

    driver = Driver(executor, seed=int(how.pop("seed", 0)))
    first_block = driver.free[-1]
    executor._decoder.forward = spy
    try:
        runs = driver.generate(prompts, samplings, **how)
    finally:
        executor._decoder.forward = forward
    return seen, runs[0]


SAMPLED = Sampling(max_tokens=6, temperature=0.9, top_p=0.95, seed=11, logprobs=3, prompt_logprobs=0)


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_logits_tokens_and_logprobs_keep_their_bits_in_any_company_and_cut(executor, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31), label="seed"))
    others = data.draw(st.integers(0, 5), label="others")
    prompt, *rest = (rng.integers(0, 1003, size=int(rng.integers(1, 40))).tolist() for _ in range(others + 1))
    sampling = data.draw(st.sampled_from([greedy(6, prompt_logprobs=0), SAMPLED]))
    alone, run = logits_of(executor, [prompt], [sampling])
    company, other = logits_of(
        executor,
        [prompt, *rest],
        [sampling, *[greedy(6), SAMPLED][rng.integers(2) :][:1] * others],
        chunk=data.draw(st.integers(1, 40), label="chunk"),
        stagger=data.draw(st.integers(0, 1), label="stagger"),
        random_chunks=data.draw(st.booleans(), label="random chunks"),
        seed=others,
    )
    assert company.keys() == alone.keys()
    assert len(alone) == len(prompt) + 5
    for position, expected in alone.items():
        assert torch.equal(company[position], expected), position
    assert other.tokens == run.tokens
    assert [(found.chosen, found.top) for found in other.logprobs] == [
        (found.chosen, found.top) for found in run.logprobs
    ]
    flat = [value for r in (run, other) for part in r.prompt_logprobs for value in part.chosen]
    assert flat[: len(flat) // 2] == flat[len(flat) // 2 :]


def test_tokens_computed_again_after_a_preemption_go_on_with_the_same_bits(executor):
    prompt = list(range(40))
    alone, run = logits_of(executor, [prompt], [greedy(8)])
    driver = Driver(executor, seed=5)
    driver.admit(0, prompt, greedy(8), output=tuple(run.tokens[:4]))
    seen = []
    forward = executor._decoder.forward

    def spy(batch):
        logits = forward(batch)
        seen.append(logits[-1].clone())
        return logits

    executor._decoder.forward = spy
    try:
        driver.step({0: 44})
    finally:
        executor._decoder.forward = forward
    assert torch.equal(seen[0], alone[43])


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 40])
def test_tiles_give_every_row_its_own_result_in_order(rows):
    x, y = torch.arange(rows * 3.0).view(rows, 3), torch.ones(rows, 3)
    seen = []

    def work(a, b):
        seen.append(len(a))
        return a * 2 + b

    assert torch.equal(by_tiles(work, x, y), x * 2 + y)
    assert set(seen) <= ({invariant.TILE} if rows else {0})


def test_a_machine_whose_products_depend_on_a_rows_place_is_refused(folder):
    executor = TorchExecutor(folder, EngineOptions(kv_bytes=8 << 20, measure_s=0.0, kernels="torch"))
    forward = executor._decoder.forward

    def uneven(batch):
        logits = forward(batch)
        logits[-1] += 1e-5
        return logits if len(logits) > 1 else logits - 1e-5

    with pytest.raises(ValueError, match="needs the native kernels"):
        check_places(uneven, executor.kv)
