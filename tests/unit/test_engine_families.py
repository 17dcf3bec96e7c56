"""Tiny random models of every family, through the paged path, against transformers."""

import numpy as np
import pytest
from engine_support import Driver, greedy, save_tiny

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from services.worker.engine.executor import EngineOptions, TorchExecutor  # noqa: E402
from services.worker.step import StepInput  # noqa: E402

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama tied, biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}
KERNELS = ["torch", "native"]


def executor_for(path, kernels, **options):
    defaults = {"dtype": "float32", "kv_bytes": 8 << 20, "kernels": kernels, "measure_s": 0.0}
    return TorchExecutor(path, EngineOptions(**(defaults | options)))


def capture_logits(executor, sink):
    """Collect (batch, logits) of every forward pass."""
    forward = executor._decoder.forward

    def spy(batch):
        logits = forward(batch)
        sink.append((batch, logits.clone()))
        return logits

    executor._decoder.forward = spy
    return forward


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_match_transformers_at_every_position_however_the_work_is_cut(name, kernels, tmp_path):
    family, overrides = MODELS[name]
    reference = save_tiny(family, tmp_path, **overrides)
    executor = executor_for(tmp_path, kernels, block_tokens=8)
    calls: list = []
    capture_logits(executor, calls)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, 199, size=n).tolist() for n in (1, 5, 8, 33, 90)]
    driver = Driver(executor, seed=3)
    # prompt_logprobs brings the logits of every position; decode steps mix with chunks of longer prompts.
    runs = driver.generate(
        prompts, [greedy(6, prompt_logprobs=0) for _ in prompts], chunk=17, stagger=1, random_chunks=True
    )
    expected = []
    for prompt, run in zip(prompts, runs):
        with torch.inference_mode():
            expected.append(reference(torch.tensor([prompt + run.tokens])).logits[0])
    checked = 0
    for prompt, run, logits in zip(prompts, runs, expected):
        scale = logits.abs().max()
        seen = locate(calls, prompt + run.tokens)
        assert set(seen) == set(range(len(prompt) + len(run.tokens) - 1))
        for position, got in seen.items():
            assert (got - logits[position]).abs().max() <= 1e-4 * scale, position
            checked += 1
        assert run.tokens == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
    assert checked == sum(len(p) + 5 for p in prompts)


def locate(calls, ids):
    """position → logits of the sequence `ids` among all captured forward passes."""
    found, done = {}, 0
    for batch, logits in calls:
        for row in range(batch.rows):
            first, stop = batch.row_start[row], batch.row_start[row + 1]
            start = int(batch.positions[first])
            span = batch.tokens[first:stop].tolist()
            if start == done and ids[start : start + len(span)] == span and start + len(span) <= len(ids):
                for i, token in enumerate(batch.logit_tokens):
                    if first <= token < stop:
                        found[start + int(token - first)] = logits[i]
                done += len(span)
                break
    return found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float16", "float32"), ("float32", "float16")])
def test_sixteen_bit_formats_stay_close_to_float32(kernels, dtype, kv_dtype, tmp_path):
    save_tiny("llama", tmp_path, initializer_range=0.1)
    prompt = np.random.default_rng(1).integers(0, 199, size=40).tolist()
    logits = []
    for options in ({}, {"dtype": dtype, "kv_dtype": kv_dtype}):
        executor = executor_for(tmp_path, kernels, **options)
        calls: list = []
        capture_logits(executor, calls)
        Driver(executor).generate([prompt], [greedy(1)])
        logits.append(calls[-1][1][-1])
    assert (logits[0] - logits[1]).abs().max() <= 5e-3 * logits[0].abs().max()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "int8-dynamic"])
def test_int8_kernels_compute_what_the_torch_path_does(dtype, tied, tmp_path):
    save_tiny("llama", tmp_path, tie_word_embeddings=tied, attention_bias=True, intermediate_size=72)
    prompt = np.random.default_rng(1).integers(0, 199, size=40).tolist()
    logits = []
    for kernels in KERNELS:
        executor = executor_for(tmp_path, kernels, dtype=dtype)
        calls: list = []
        capture_logits(executor, calls)
        Driver(executor).generate([prompt], [greedy(1)])
        logits.append(calls[-1][1][-1])
    # Where a sum lands beside the edge of a code, rounding may take it to the next one.
    tolerance = 2e-3 if dtype == "int8-dynamic" else 1e-4
    assert (logits[0] - logits[1]).abs().max() <= tolerance * logits[0].abs().max()


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_with_broken_numbers_ends_alone(kernels, tmp_path):
    save_tiny("llama", tmp_path, broken_token=198)
    executor = executor_for(tmp_path, kernels, kv_bytes=1 << 20)
    broken, fine = [3, 198, 4], [5, 6, 7]
    alone = Driver(executor).generate([fine], [greedy(4)])[0].tokens
    driver = Driver(executor)
    runs = driver.generate([broken, fine], [greedy(4), greedy(4)])
    assert runs[0].tokens == [-2]
    assert runs[1].tokens == alone
    # The blocks of the broken sequence go to others, which must not inherit its numbers.
    rows = min(32, executor.info.blocks_total)
    assert all(run.tokens == alone for run in driver.generate([fine] * rows, [greedy(4)] * rows))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kernels", KERNELS)
def test_what_a_broken_prompt_left_in_blocks_harms_nobody_who_is_next(kernels, deterministic, tmp_path):
    save_tiny("llama", tmp_path, broken_token=7)
    executor = executor_for(tmp_path, kernels, block_tokens=8, deterministic=deterministic)
    healthy = [3, 4, 5, 6, 9, 10, 11, 12, 13, 14, 15]
    alone = Driver(executor).generate([healthy], [greedy(4)])[0].tokens
    driver = Driver(executor)
    driver.admit(0, [7] * 40, greedy(4))
    driver.step({0: 30})  # given up before it draws anything
    driver.release(0)
    assert not torch.isfinite(executor.kv.data).all()
    assert driver.generate([healthy], [greedy(4)])[0].tokens == alone


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_model_whose_file_is_overwritten_is_served_as_it_was_loaded(kernels, tmp_path):
    save_tiny("llama", tmp_path)
    executor = executor_for(tmp_path, kernels)
    before = Driver(executor).generate([[1, 2, 3]], [greedy(5)])[0].tokens
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:  # as `cp other model.safetensors` does, but of its size: no SIGBUS
        stream.write(bytes(file.stat().st_size))
    assert Driver(executor).generate([[1, 2, 3]], [greedy(5)])[0].tokens == before


def test_a_step_that_names_missing_blocks_is_refused(tmp_path):
    save_tiny("llama", tmp_path)
    driver = Driver(executor_for(tmp_path, "torch"))
    driver.admit(0, list(range(20)), greedy(2))
    one = np.array([0], np.int32)
    step = StepInput(one, np.array([0], np.int32), np.array([20], np.int32), np.array([True]))
    driver.slots.block_table[0, 0] = 3
    with pytest.raises(ValueError, match="slot 0: 20 tokens of KV, but only 1 blocks"):
        driver.executor.run(step, driver.slots)
    driver.slots.block_table[0, 1] = driver.executor.info.blocks_total
    with pytest.raises(ValueError, match="block"):
        driver.executor.run(step, driver.slots)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("slot", "start", "count", "token", "copies", "complaint"),
    [
        (99, 19, 1, 1, (), "slot 99"),
        (-3, 19, 1, 1, (), "slot -3"),
        (0, -3, 1, 1, (), "start -3"),
        (0, 5_000_000, 1, 1, (), "start 5000000"),
        (0, 19, 0, 1, (), "count 0"),
        (0, 19, 1 << 20, 1, (), "count 1048576"),
        (0, 19, 1, -7, (), "not in the vocabulary"),
        (0, 19, 1, 2_000_000_000, (), "not in the vocabulary"),
        (0, 19, 1, 1, ((0, 10**6),), "a copy to block 1000000"),
        (0, 19, 1, 1, ((-1, 0),), "a copy from block -1"),
    ],
)
def test_a_step_with_impossible_numbers_is_refused(
    kernels, slot, start, count, token, copies, complaint, tmp_path
):
    save_tiny("llama", tmp_path)
    driver = Driver(executor_for(tmp_path, kernels))
    driver.admit(0, list(range(1, 21)), greedy(2))
    driver.step({0: 19})
    driver.slots.tokens[0, 19] = token
    numbers = (np.array([value], np.int32) for value in (slot, start, count))
    step = StepInput(*numbers, np.array([True]), copies=list(copies))
    with pytest.raises(ValueError, match=complaint):
        driver.executor.run(step, driver.slots)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_copied_block_serves_in_place_of_its_source(kernels, tmp_path):
    save_tiny("qwen2", tmp_path)
    executor = executor_for(tmp_path, kernels)
    prompt = list(range(1, 31))
    expected = Driver(executor).generate([prompt], [greedy(1)])[0].tokens
    driver = Driver(executor)
    driver.admit(0, prompt, greedy(2))
    driver.step({0: 20})
    table = driver.slots.block_table[0]
    source, target = int(table[1]), driver.free.pop()
    table[1] = target
    one = np.array([0], np.int32)
    rest = np.array([20], np.int32), np.array([10], np.int32), np.array([True])
    out = executor.run(StepInput(one, *rest, copies=[(source, target)]), driver.slots)
    assert out.tokens.tolist() == expected


@pytest.mark.parametrize("dtype", ["float16", "int8", "int8-dynamic"])
def test_the_same_request_gives_the_same_bits_however_it_is_cut_and_whatever_runs_beside_it(tmp_path, dtype):
    save_tiny("llama", tmp_path)
    executor = executor_for(tmp_path, "native", dtype=dtype)
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, 199, size=70).tolist()

    def last_logits(**how):
        calls: list = []
        others = how.pop("others", 0)
        prompts = [prompt] + [
            rng.integers(0, 199, size=int(rng.integers(1, 90))).tolist() for _ in range(others)
        ]
        forward = capture_logits(executor, calls)
        runs = Driver(executor, seed=others).generate(
            prompts, [greedy(5, prompt_logprobs=0)] * len(prompts), **how
        )
        executor._decoder.forward = forward
        return locate(calls, prompt + runs[0].tokens)

    alone = last_logits()
    for how in (
        {"chunk": 7},
        {"others": 9, "stagger": 1},
        {"others": 20, "chunk": 13, "random_chunks": True},
    ):
        seen = last_logits(**how)
        assert seen.keys() == alone.keys()
        assert all(torch.equal(seen[p], alone[p]) for p in alone), how
