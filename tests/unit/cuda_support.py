"""The CUDA path and the reference decoder side by side, on a CPU or a CUDA device.

Not a test: imported by the tests of the CUDA path, here and in tests/gpu.
"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from engine_support import Driver, greedy

from services.worker.engine.batch import build_batch
from services.worker.engine.cuda.decoder import CudaDecoder
from services.worker.engine.cuda.draw import PlainDraw
from services.worker.engine.decoder import TorchDecoder
from services.worker.engine.device import Device
from services.worker.engine.weights import ModelFolder
from services.worker.step import SlotArrays, StepInput, StepOutput
from tests.support.device_executor import kv_with_scratch

BLOCKS, BLOCK_TOKENS = 120, 8


class Twins:
    """Runs each step on the reference (CPU, float32) and on the path under test; `Driver` takes it for an
    executor. `errors` are the largest differences of logits by step, relative to the largest logit."""

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype = torch.float32,
        kv_dtype: str = "float32",
        graphs: bool = True,
        device: str = "cpu",
    ) -> None:
        folder = ModelFolder(path, 128)
        self.config = folder.config
        self.reference_kv = kv_with_scratch(self.config, "float32", torch.device("cpu"), BLOCKS, BLOCK_TOKENS)
        self.kv = kv_with_scratch(self.config, kv_dtype, torch.device(device), BLOCKS, BLOCK_TOKENS)
        self.reference = TorchDecoder(folder, Device("cpu", "float32"), self.reference_kv)
        self.decoder = CudaDecoder(folder, self.kv, dtype, graphs)
        self.info = SimpleNamespace(block_tokens=BLOCK_TOKENS, blocks_total=BLOCKS, max_len=128)
        self.errors: list[float] = []
        self.single = 0

    @torch.inference_mode()
    def run(self, step: StepInput, slots: SlotArrays) -> StepOutput:
        batch = build_batch(step, slots, BLOCK_TOKENS)
        self.single += batch.size == batch.rows
        expected, on_device = self.reference.forward(batch), self.decoder.forward(batch)
        got = on_device.cpu()
        assert got.dtype == torch.float32
        assert got.shape == expected.shape
        if len(got):
            self.errors.append(float((got - expected).abs().max() / expected.abs().max()))
        sampled = np.flatnonzero(step.samples)
        tokens = np.full(batch.rows, -1, np.int32)
        if len(sampled):
            last = np.searchsorted(batch.logit_tokens, batch.row_start[1:][sampled] - 1)
            greedily = PlainDraw(step.slots[sampled], np.zeros(len(last), np.float32), np.zeros(len(last)))
            rows = torch.from_numpy(last).to(on_device.device)
            tokens[sampled] = self.decoder.draw(on_device[rows], greedily).cpu().numpy()
        return StepOutput(tokens)


def prompts_of(seed: int, sizes: tuple[int, ...] = (1, 5, 8, 33, 60)) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 199, size=n).tolist() for n in sizes]


def fed_from_the_device(twins: Twins) -> None:
    """Steps whose tokens only the device knows, in slots that are not the rows' order."""
    driver = Driver(twins, seed=3)
    for slot, prompt in zip((4, 1), prompts_of(9, (12, 30))):
        driver.admit(slot, prompt, greedy(9))
    driver.step({4: 12})
    driver.step({1: 30})
    forward = twins.decoder.forward
    twins.decoder.forward = lambda batch: forward(
        dataclasses.replace(batch, tokens=-1 - np.array([1, 4], np.int32))
    )
    for _ in range(4):
        driver.step({1: 1, 4: 1})
    assert len(twins.errors) == 6
