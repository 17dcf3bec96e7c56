"""What this machine can do at best, measured in this process: the bounds that kernels are held against.

`python -m services.worker.engine.peaks` prints them as JSON, of the first GPU where there is one.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

_READ_BYTES = 256 << 20
_SIDE = 768
_DEVICE_BYTES, _DEVICE_SIDE, _DEVICE_CALLS = 1 << 30, 8192, 8


@dataclass(frozen=True)
class Peaks:
    read_gb_s: float
    """Memory read by all threads, from an array far larger than the caches."""
    matmul_gf_s: float
    """float32 product of two square matrices by torch, all threads."""
    undisturbed: float = 1.0
    """Share of the time measured in which all threads had a core, as far as is known."""


def measure_peaks(threads: int, budget_s: float = 1.0) -> Peaks:
    """The best of what `budget_s` seconds allow. torch's thread count is as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    begun, busy = time.perf_counter(), time.process_time()
    try:
        memory = torch.ones(_READ_BYTES // 4)
        read_s = _best(memory.sum, budget_s / 2)
        a, b = torch.rand(_SIDE, _SIDE), torch.rand(_SIDE, _SIDE)
        out = torch.empty(_SIDE, _SIDE)
        matmul_s = _best(lambda: torch.mm(a, b, out=out), budget_s / 2)
    finally:
        torch.set_num_threads(before)
    share = (time.process_time() - busy) / (threads * (time.perf_counter() - begun))
    return Peaks(_READ_BYTES / read_s / 1e9, 2 * _SIDE**3 / matmul_s / 1e9, min(1.0, share))


def _best(work: Callable[[], object], budget_s: float) -> float:
    """Seconds of the fastest call; at least three."""
    best, calls, end = float("inf"), 0, time.perf_counter() + budget_s
    while calls < 3 or time.perf_counter() < end:
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
        calls += 1
    return best


def measure_gpu(index: int = 0) -> Peaks:
    """Of a copy, bytes read and written, and of a product of 16-bit matrices on that CUDA device."""
    device = torch.device("cuda", index)
    half = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    source = torch.ones(_DEVICE_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copy_s = _best_on(device, lambda: target.copy_(source))
    a, b = (torch.rand(_DEVICE_SIDE, _DEVICE_SIDE, device=device, dtype=half) for _ in "ab")
    out = torch.empty_like(a)
    matmul_s = _best_on(device, lambda: torch.mm(a, b, out=out))
    return Peaks(2 * _DEVICE_BYTES / copy_s / 1e9, 2 * _DEVICE_SIDE**3 / matmul_s / 1e9)


def _best_on(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the fastest call, the device waited for."""
    best = float("inf")
    for _ in range(_DEVICE_CALLS):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return best


def main() -> None:
    """Measure and print kind, peaks and, of a GPU, name and memory_bytes."""
    found: dict[str, object]
    if torch.cuda.is_available():
        peaks, memory = measure_gpu(), torch.cuda.get_device_properties(0).total_memory
        found = {"kind": "cuda", "name": torch.cuda.get_device_name(0), "memory_bytes": memory}
    else:
        peaks, found = measure_peaks(len(os.sched_getaffinity(0))), {"kind": "cpu"}
    sys.stdout.write(json.dumps(found | asdict(peaks)) + "\n")


if __name__ == "__main__":
    main()
