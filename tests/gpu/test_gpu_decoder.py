"""The CUDA path on a CUDA device: captured graphs, FlashInfer if it is installed, tokens fed back.

`tests/gpu/run.sh` runs these and the measurements. What needs no device is in tests/unit/test_engine_cuda.py.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from cuda_support import Twins, fed_from_the_device, prompts_of  # noqa: E402
from engine_support import Driver, greedy  # noqa: E402
from random_frames import NAME, SHAPE, RandomScheduler, in_pairs, schedule, told  # noqa: E402

from services.worker.compute import Compute  # noqa: E402
from services.worker.engine.cuda.attention import GatheredAttention  # noqa: E402
from services.worker.engine.cuda.draw import PlainDraw, draw_plain  # noqa: E402
from services.worker.engine.executor import EngineOptions, TorchExecutor  # noqa: E402
from services.worker.slots import Batch  # noqa: E402
from shared.wire import Sampling  # noqa: E402
from tests.gpu.random_model import write_random  # noqa: E402
from tests.support.device_executor import device_executor  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    # A warning of FlashInfer's parts must not look like FlashInfer being broken.
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason=f"NO CUDA DEVICE: torch {torch.__version__} sees none, so nothing of the GPU lane was checked",
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("model"), "tiny")


def run_everything(twins):
    samplings = [greedy(8), greedy(8, prompt_logprobs=0), greedy(8), greedy(8), greedy(8)]
    driver = Driver(twins, seed=2)
    driver.generate(prompts_of(5), samplings, chunk=17, stagger=1, random_chunks=True)
    driver.generate(prompts_of(6), samplings, chunk=64)
    assert twins.single > 5


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
def test_float32_logits_are_the_cpus_however_the_work_is_cut(model, graphs):
    twins = Twins(model, graphs=graphs, device="cuda")
    run_everything(twins)
    assert max(twins.errors) < 5e-4


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.05), ("float16", 0.01)])
@pytest.mark.parametrize("attention", ["chosen", "gathered"])
def test_sixteen_bit_stays_close_to_float32(model, dtype, limit, graphs, attention, monkeypatch):
    if attention == "gathered":
        monkeypatch.setitem(sys.modules, "flashinfer", None)
    twins = Twins(model, getattr(torch, dtype), dtype, graphs, "cuda")
    run_everything(twins)
    print(twins.decoder.detail(), "largest difference", max(twins.errors))
    assert max(twins.errors) < limit


def test_without_flashinfer_blocks_are_gathered_and_the_reason_is_told(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    decoder = Twins(model, torch.bfloat16, "bfloat16", device="cuda").decoder
    assert isinstance(decoder._attention, GatheredAttention)
    assert "flashinfer" in decoder.detail()["attention"]


def test_a_step_takes_tokens_that_only_the_device_knows(model):
    twins = Twins(model, device="cuda")
    fed_from_the_device(twins)
    assert max(twins.errors) < 5e-4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_device_draws_the_tokens_that_the_cpu_draws(temperature):
    logits = torch.randn(64, 50_000, generator=torch.Generator().manual_seed(1)) * 4
    logits[3] = 1.0
    logits[5, 9] = float("nan")
    rng = np.random.default_rng(2)
    plan = PlainDraw(np.arange(64, dtype=np.int32), np.full(64, temperature, np.float32), rng.random(64))
    same = draw_plain(logits.cuda(), plan).cpu() == draw_plain(logits, plan)
    # exp() of the two differs in the last bit, so a draw on the edge between two tokens may fall either way.
    assert int(same.sum()) >= (64 if temperature == 0 else 62)


def test_an_executor_on_the_device_gives_the_tokens_of_one_on_the_cpu(model):
    samplings = [
        greedy(20),
        greedy(20, logprobs=3),
        Sampling(max_tokens=20, temperature=0.8, top_p=0.9, seed=4),
        Sampling(max_tokens=20, temperature=0.8, seed=5),
    ]
    tokens = {}
    for device in ("cpu", "cuda"):
        options = EngineOptions(dtype="float32", device=device, kv_bytes=16 << 20, measure_s=0.2)
        executor = TorchExecutor(model, options)
        prompts = prompts_of(7, (3, 20, 41, 60))
        runs = Driver(executor, seed=2).generate(prompts, samplings, chunk=30, stagger=1)
        tokens[device] = [run.tokens for run in runs]
        executor.close()
    assert tokens["cuda"] == tokens["cpu"]


def test_two_frames_in_flight_give_the_tokens_of_one_at_a_time(model):
    computes = []
    for _ in range(2):
        executor = device_executor(model, "float32", "cuda", SHAPE.blocks_total, SHAPE.block_tokens)
        assert executor.info.overlaps
        shape = replace(SHAPE, vocab_size=executor.info.vocab_size)
        computes.append(Compute(executor, Batch(shape, NAME)))
        computes[-1].session = 1
    # Sampling would fall either way where the last bits of two batches differ.
    scheduler = RandomScheduler(random.Random(1), 3, 0.8, temperature=(0.0,))
    frames, expected = schedule(computes[0], scheduler, 200)
    got = in_pairs(computes[1], frames, lambda: True)
    assert [told(outcome) for outcome in got] == [told(outcome) for outcome in expected]
