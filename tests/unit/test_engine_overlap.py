"""Frames begun early on the real executor and the CUDA path, on a CPU: the tokens of one frame at a time."""

import json
import random
from pathlib import Path

import pytest
from engine_support import save_tiny
from random_frames import NAME, SHAPE, RandomScheduler, frame, in_pairs, schedule, told

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from services.worker.compute import Compute  # noqa: E402
from services.worker.engine.executor import TorchExecutor  # noqa: E402
from services.worker.shape import BatchShape  # noqa: E402
from services.worker.slots import Batch  # noqa: E402
from shared.wire import Admit, Sampling, Work  # noqa: E402
from tests.support.device_executor import device_executor  # noqa: E402

pytest_plugins = ("tests.support.torch_threads",)
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def compute_of(executor, shape, name=NAME):
    compute = Compute(executor, Batch(shape, name))
    compute.session = 1
    return compute


def spy_on(executor, monkeypatch):
    """How many steps hold an id that only the device knows."""
    fed = []
    forward = executor._decoder.forward

    def counting(batch):
        fed.append(bool((batch.tokens < 0).any()))
        return forward(batch)

    monkeypatch.setattr(executor._decoder, "forward", counting)
    return fed


@pytest.mark.parametrize(("seed", "broken"), [(1, None), (2, None), (3, 17)])
def test_random_frames_give_the_tokens_of_one_at_a_time(seed, broken, tmp_path, monkeypatch):
    save_tiny("llama", tmp_path, vocab_size=64, broken_token=broken)
    executors = [
        device_executor(tmp_path, "float32", "cpu", SHAPE.blocks_total, SHAPE.block_tokens) for _ in range(2)
    ]
    alone, together = (compute_of(executor, SHAPE) for executor in executors)
    scheduler = RandomScheduler(random.Random(seed), 3, 0.8, (0,) * 29 + (3,), (0.0, 1.0))
    frames, expected = schedule(alone, scheduler, 100)
    fed = spy_on(executors[1], monkeypatch)
    rng = random.Random(seed)
    got = in_pairs(together, frames, lambda: rng.random() < 0.8)
    assert [told(outcome) for outcome in got] == [told(outcome) for outcome in expected]
    reasons = {row.reason for outcome in got for row in outcome.done.stopped}
    assert {"stop", "length"} <= reasons
    assert ("error" in reasons) == (broken is not None)
    assert sum(fed) > 5
    assert bool(executors[1].kv.data.isfinite().all())


def test_the_device_begins_a_step_without_the_host_waiting_for_the_one_before(tmp_path, monkeypatch):
    save_tiny("llama", tmp_path, vocab_size=64)
    executor = device_executor(tmp_path, "float32", "cpu", SHAPE.blocks_total, SHAPE.block_tokens)
    order = []
    begin, finish = TorchExecutor.begin, TorchExecutor.finish
    monkeypatch.setattr(TorchExecutor, "begin", lambda *args: (order.append("begin"), begin(*args))[1])
    monkeypatch.setattr(TorchExecutor, "finish", lambda *args: (order.append("finish"), finish(*args))[1])
    admit = Admit(0, 0, 5, [1, 2, 3, 4, 5], 0, [0, 1, 2], Sampling(max_tokens=9, seed=1))
    frames = [frame(admit=[admit], work=[Work(0, 5)]), frame(seq=2), frame(seq=3)]
    in_pairs(compute_of(executor, SHAPE), frames, lambda: True)
    assert order == ["begin", "begin", "finish", "begin", "finish", "finish"]


@pytest.mark.model
@pytest.mark.timeout(300)
def test_golden_tokens_come_out_of_two_frames_in_flight(monkeypatch):
    from shared.model import resolve

    path = Path(__file__).parents[1] / "data" / "golden.json"
    cases = [case for case in json.loads(path.read_text()) if len(case["ids"]) <= 40]
    per_row, most = 4, 12
    blocks = per_row * len(cases)
    executor = device_executor(resolve("smol").path, "float32", "cpu", blocks, 16, 64)
    info = executor.info
    shape = BatchShape(len(cases), 64, 16, blocks, info.vocab_size)
    fed = spy_on(executor, monkeypatch)
    admits, work = [], []
    for slot, case in enumerate(cases):
        table = list(range(slot * per_row, (slot + 1) * per_row))
        how = Sampling(max_tokens=min(most, len(case["golden"])), temperature=0.0)
        admits.append(Admit(slot, 0, len(case["ids"]), case["ids"], 0, table, how))
        work.append(Work(slot, len(case["ids"])))
    frames = [frame(admit=admits, work=work), *(frame(seq=n) for n in range(2, most + 1))]
    tokens = [[] for _ in cases]
    for outcome in in_pairs(compute_of(executor, shape, info.fingerprint), frames, lambda: True):
        for slot, token in zip(outcome.done.slots, outcome.done.tokens):
            tokens[slot].append(token)
    assert tokens == [case["golden"][:most] for case in cases]
    assert sum(fed) == most - 1
