"""What this machine can do at best, measured in this process: the bounds that kernels are held against."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_READ_BYTES = 256 << 20
_SIDE = 768


@dataclass(frozen=True)
class Peaks:
    read_gb_s: float
    """Memory read by all threads, from an array far larger than the caches."""
    matmul_gf_s: float
    """float32 product of two square matrices by torch, all threads."""


def measure_peaks(threads: int, budget_s: float = 1.0) -> Peaks:
    """The best of what `budget_s` seconds allow. torch's thread count is as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        memory = torch.ones(_READ_BYTES // 4)
        read_s = _best(memory.sum, budget_s / 2)
        a, b = torch.rand(_SIDE, _SIDE), torch.rand(_SIDE, _SIDE)
        out = torch.empty(_SIDE, _SIDE)
        matmul_s = _best(lambda: torch.mm(a, b, out=out), budget_s / 2)
    finally:
        torch.set_num_threads(before)
    return Peaks(_READ_BYTES / read_s / 1e9, 2 * _SIDE**3 / matmul_s / 1e9)


def _best(work: Callable[[], object], budget_s: float) -> float:
    """Seconds of the fastest call; at least three."""
    best, calls, end = float("inf"), 0, time.perf_counter() + budget_s
    while calls < 3 or time.perf_counter() < end:
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
        calls += 1
    return best
