"""This machine's CPU as a device to plan with: its memory, and its rates as they were measured here once."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from services.worker.engine.remembered import Remembered, cpu_name
from services.worker.engine.resident import room_here
from services.worker.engine.runtime_memory import remembered_runtime_bytes, runtime_bytes
from services.worker.memory.devices import CPU_REACH, Device

_OPERATIONS = 16
"""float32 operations of a core in a cycle, if nothing was measured: two fused products of four."""
_CYCLES = 2.5e9
_READ_B_S = 10e9
"""Of a core, if nothing was measured."""
_MOST_READING = 4
"""Cores that together read as fast as memory goes."""
_INT8_TIMES = 1.2
"""8-bit integer products are so many times as fast as float32 ones, whole steps (docs/benchmarks.md)."""
_NETWORK_B_S, _NETWORK_S = 0.125e9, 100e-6
"""Between machines, if nothing is said: 1 Gbit/s."""
_RUNTIME_BYTES = 320 << 20
"""If it was never measured."""
_UNDISTURBED = 0.85
"""Share of the time measured that a process must have had its cores, for the result to be remembered."""


class Rates(msgspec.Struct, frozen=True):
    """What this CPU was measured to do with all cores that this process may use."""

    read_gb_s: float
    matmul_gf_s: float


def remember(peaks: Mapping[str, Any]) -> bool:
    """Take these peaks (`services.worker.engine.peaks.Peaks` as plain data), measured with all cores, for
    later plans, until the CPU or the number of cores changes.

    False, and they are not taken, if others wanted the cores meanwhile.
    """
    if peaks["undisturbed"] < _UNDISTURBED:
        return False
    _memory().keep(Rates(peaks["read_gb_s"], peaks["matmul_gf_s"]))
    return True


def measured(peaks: Mapping[str, Any]) -> Device:
    """This machine with these peaks, remembered if they may be. What a process takes before it has a model is
    measured as well, if it never was."""
    runtime_bytes()
    kept = remember(peaks)
    origin = "measured now" if kept else "measured now, while others wanted the cores: not remembered"
    return _with(Rates(peaks["read_gb_s"], peaks["matmul_gf_s"]), origin)


def this_machine() -> Device:
    """Works without torch; rates that nobody measured are assumed, and said to be."""
    if (rates := _memory().recall()) is not None:
        return _with(rates, "measured here earlier")
    cores = len(os.sched_getaffinity(0))
    read_b_s = _READ_B_S * min(cores, _MOST_READING)
    rates = Rates(read_b_s / 1e9, _OPERATIONS * cores * _cycles() / 1e9)
    found = _with(rates, "assumed, as nothing was measured: `hortator plan --device measured` does it once")
    return replace(found, reach=replace(CPU_REACH, origin="as measured elsewhere, of rates that are assumed"))


def _with(rates: Rates, origin: str) -> Device:
    cores, room = len(os.sched_getaffinity(0)), room_here()
    told = f"{rates.read_gb_s:.1f} GB/s read and {rates.matmul_gf_s:.0f} GF/s in float32 products"
    return Device(
        name=f"this machine ({cores} core{'s' * (cores > 1)})",
        memory_bytes=room.bytes,
        read_b_s=rates.read_gb_s * 1e9,
        flop_s=rates.matmul_gf_s * 1e9,
        flop8_s=_INT8_TIMES * rates.matmul_gf_s * 1e9,
        link_b_s=_NETWORK_B_S,
        link_s=_NETWORK_S,
        kind="cpu",
        runtime_bytes=remembered_runtime_bytes() or _RUNTIME_BYTES,
        threads=cores,
        source=f"{told}, {origin}; memory is what is {room.origin}",
        reach=CPU_REACH,
    )


def _memory() -> Remembered[Rates]:
    return Remembered(Rates, "peaks", {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0))})


def _cycles() -> float:
    """A second, of the first core."""
    try:
        found = re.search(r"^cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return float(found[1]) * 1e6 if found else _CYCLES
