"""Groups of ranks against the reference continuations of the default model, token for token."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from services.worker.engine.native import build
from shared.model import resolve
from shared.wire import Sampling

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from engine_support import Driver, Run, greedy

try:
    build.load()
except build.KernelsUnavailable as error:
    pytest.skip(f"no native kernels here: {error}", allow_module_level=True)

from tests.support.native_group import on_native_ranks

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())


def on_ranks(size: int, cases: list[tuple[list[int], Sampling]], **how: Any) -> list[list[Run]]:
    """What each rank drew for each case."""
    from services.worker.engine.executor import EngineOptions, TorchExecutor

    kernels = how.pop("kernels", "native")
    options = EngineOptions(
        dtype="float32", kv_dtype="float32", kernels=kernels, kv_bytes=300 << 20, max_len=1024, threads=1
    )

    def work(end: Any) -> list[Run]:
        executor = TorchExecutor(resolve("smol").path, options, end)
        try:
            ids, samplings = zip(*cases)
            return Driver(executor).generate(list(ids), list(samplings), **how)
        finally:
            executor.close()

    return on_native_ranks(size, work)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_golden_tokens_are_exact_on_every_rank(size: int) -> None:
    cases = [(case["ids"], greedy(len(case["golden"]))) for case in GOLDEN]
    for runs in on_ranks(size, cases, chunk=200, stagger=1):
        assert [run.tokens for run in runs] == [case["golden"] for case in GOLDEN]


def test_ranks_that_compute_with_torch_agree() -> None:
    short = sorted(GOLDEN, key=lambda case: len(case["golden"]))[:3]
    cases = [(case["ids"], greedy(len(case["golden"]))) for case in short]
    for runs in on_ranks(2, cases, chunk=64, kernels="torch"):
        assert [run.tokens for run in runs] == [case["golden"] for case in short]


def test_sampled_tokens_and_log_probabilities_are_those_of_one_rank() -> None:
    from services.worker.engine.executor import EngineOptions, TorchExecutor

    ids = GOLDEN[0]["ids"]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 3},
        {"temperature": 1.1, "top_k": 20, "frequency_penalty": 0.5},
        {"temperature": 0.7, "min_p": 0.1, "logit_bias": ((5, 2.0),), "prompt_logprobs": 2},
        {"temperature": 0.0, "logprobs": 5, "repetition_penalty": 1.3},
    ]
    cases = [(ids, Sampling(max_tokens=12, seed=seed, **kind)) for seed, kind in enumerate(kinds)]
    options = EngineOptions(
        dtype="float32", kv_dtype="float32", kernels="native", max_len=1024, measure_s=0.0
    )
    alone = Driver(TorchExecutor(resolve("smol").path, options)).generate(*map(list, zip(*cases)))
    for runs in on_ranks(2, cases):
        for one, other in zip(alone, runs, strict=True):
            assert one.tokens == other.tokens
            for a, b in zip(one.logprobs, other.logprobs, strict=True):
                assert a.chosen == pytest.approx(b.chosen, abs=2e-3)
                assert [i for i, _ in a.top] == [i for i, _ in b.top]
            for p, q in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
                assert p.chosen == pytest.approx(q.chosen, abs=2e-3)
