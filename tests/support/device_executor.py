"""A `TorchExecutor` that computes as on a CUDA device, on one or, to be tested, on a CPU."""

from dataclasses import replace
from pathlib import Path

import torch

from services.worker.engine.config import ModelConfig
from services.worker.engine.cuda.decoder import CudaDecoder
from services.worker.engine.executor import EngineOptions, TorchExecutor
from services.worker.engine.kvcache import DTYPES, KvCache, KvPlan, plan_kv
from services.worker.engine.weights import ModelFolder


def kv_with_scratch(
    config: ModelConfig, dtype: str, device: torch.device, blocks: int, block_tokens: int
) -> KvCache:
    """KV of `blocks` sequence blocks and the one that padded rows write, which a CPU's lacks."""
    kv = KvCache(config, KvPlan(block_tokens, 0, blocks + (device.type == "cpu")), dtype, device)
    kv.blocks = blocks
    return kv


def device_executor(
    model: Path, dtype: str, device: str, blocks: int, block_tokens: int, max_len: int | None = None
) -> TorchExecutor:
    """KV is of the same dtype, float32 or float16 on a CPU, where nothing is captured."""
    folder = ModelFolder(model, max_len)
    kv_bytes = blocks * plan_kv(folder.config, dtype, 1 << 50, block_tokens).block_bytes
    on = torch.device(device)
    options = EngineOptions(
        dtype=dtype if on.type == "cuda" else "float32",
        kv_dtype=dtype if on.type == "cuda" else "float32",
        kv_bytes=kv_bytes * (4 // DTYPES[dtype].itemsize if on.type == "cpu" else 1),
        block_tokens=block_tokens,
        max_len=max_len,
        device=device,
        kernels="auto" if on.type == "cuda" else "torch",
        measure_s=0.0,
    )
    executor = TorchExecutor(model, options)
    if on.type == "cpu":
        executor._kv = kv_with_scratch(folder.config, dtype, on, blocks, block_tokens)
        executor._decoder = CudaDecoder(folder, executor._kv, DTYPES[dtype])
        executor._info = replace(executor._info, overlaps=True)
    return executor
