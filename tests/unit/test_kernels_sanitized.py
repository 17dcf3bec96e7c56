"""The kernels under the address and undefined-behaviour sanitizers (compiled anew: second lane)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = """
import pathlib, sys, tempfile
import numpy as np, torch
from services.worker.engine.native import build
build._FLAGS = (*build._FLAGS, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g")
from services.worker.engine.executor import EngineOptions, TorchExecutor
from services.worker.engine.formats import FORMATS
from services.worker.engine.native.decoder import Kernels
from engine_support import Driver, greedy, save_tiny

kernels = Kernels(3)
for n, k, m in ((1, 1, 1), (33, 7, 5), (16, 321, 8), (200, 700, 230), (17, 640, 3)):
    for form in FORMATS.values():
        kernels.pack(torch.randn(n, k), form, torch.randn(n)).multiply(torch.randn(m, k))
for rows, size in ((1, 1), (3, 17), (2, 64)):
    kernels.scan(np.random.randn(rows, size).astype(np.float32))
from services.worker.engine.draw import DRAW
for size, scale in ((1, 1), (17, 3), (256, 1), (5000, 0.1)):
    values = (np.random.randn(6, size) * scale).astype(np.float32)
    draws = np.zeros(6, DRAW)
    draws["row"], draws["largest"], draws["temperature"] = np.arange(6), values.argmax(1), 0.7
    draws["top_p"], draws["top_k"] = (1, 0.9, 1, 0.9, 1, 0), (0, 0, 3, 7, 0, 0)
    draws["min_p"], draws["uniform"] = (0, 0, 0, 0.01, 1, 0), (0, 0.5, 0.999999, 0.3, 0.9, 0.1)
    kernels.draw(values, draws)
from services.worker.engine.native.attention import attend
for block_tokens, dim, group, lengths, counts in (
    (1, 16, 1, (5, 40), (5, 1)), (4, 48, 7, (70, 300), (20, 3)), (16, 64, 3, (1300, 17, 256), (1, 17, 40)),
    (64, 128, 2, (65, 530), (1, 65)),
):
    for dtype in (torch.float32, torch.float16):
        widths = [-(-n // block_tokens) for n in lengths]
        kv = torch.randn(sum(widths), 1, 2, 2, block_tokens, dim).to(dtype)
        table = np.zeros((len(lengths), max(widths)), np.int32)
        for r, width in enumerate(widths):
            table[r, :width] = np.arange(width) + sum(widths[:r])
        row_start = np.cumsum([0, *counts]).astype(np.int32)
        positions = np.concatenate([np.arange(n - c, n) for n, c in zip(lengths, counts)]).astype(np.int32)
        q = torch.randn(len(positions), 2 * group, dim)
        assert torch.isfinite(attend(kernels, kv, 0, q, row_start, positions, table)).all()
folder = pathlib.Path(tempfile.mkdtemp())
save_tiny("qwen3", folder, head_dim=16, intermediate_size=40, max_position_embeddings=700)
rng = np.random.default_rng(1)
prompts = [rng.integers(0, 199, size=n).tolist() for n in (1, 3, 17, 70)]
seen = set()
for block_tokens in (4, 16):
    for dtype, kv_dtype in (
        ("float32", "float32"), ("float16", "float16"), ("int8", "float16"), ("int8-dynamic", "float32")
    ):
        options = EngineOptions(
            dtype=dtype, kv_dtype=kv_dtype, block_tokens=block_tokens, kv_bytes=3 << 20,
            kernels="native", measure_s=0.0, threads=3,
        )
        executor = TorchExecutor(folder, options)
        runs = Driver(executor).generate(prompts, [greedy(2)] * 4, chunk=50, stagger=1, random_chunks=True)
        seen.add((dtype, str([run.tokens for run in runs])))
        executor.close()
assert len(seen) == 4, seen
print("clean")
"""


def runtime(name: str) -> str | None:
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=False)
    path = found.stdout.strip()
    return path if os.path.isabs(path) else None


def test_kernels_touch_only_their_own_memory(tmp_path):
    try:
        libraries = [runtime("libasan.so"), runtime("libubsan.so")]
    except OSError:
        libraries = [None]
    if None in libraries:
        pytest.skip("no g++ with sanitizers here")
    root, here = Path(__file__).parents[2], Path(__file__).parent
    env = os.environ | {
        "HORTATOR_CACHE": str(tmp_path),
        "LD_PRELOAD": " ".join(str(library) for library in libraries),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
        "PYTHONPATH": f"{root}{os.pathsep}{here}",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("clean\n"), done.stdout + done.stderr[-4000:]
