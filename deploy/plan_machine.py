"""This machine's CPU as a device to plan with: its memory, and its rates as they were measured here once."""

import os
import re
from dataclasses import replace
from pathlib import Path

import msgspec

from services.worker.engine.remembered import Remembered, cpu_name
from services.worker.engine.resident import room_here
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
_RUNTIME_BYTES = 400 << 20


class Rates(msgspec.Struct, frozen=True):
    """What this CPU was measured to do with all cores that this process may use."""

    read_gb_s: float
    matmul_gf_s: float


def remember(read_gb_s: float, matmul_gf_s: float) -> None:
    """For later plans, until the CPU or the number of cores changes."""
    _memory().keep(Rates(read_gb_s, matmul_gf_s))


def this_machine() -> Device:
    """Works without torch; rates that nobody measured are assumed, and said to be."""
    cores = len(os.sched_getaffinity(0))
    room = room_here()
    rates = _memory().recall()
    assumed = rates is None
    if rates is None:
        read = _READ_B_S * min(cores, _MOST_READING)
        rates = Rates(read / 1e9, _OPERATIONS * cores * _cycles() / 1e9)
    told = (
        "rates are assumed, as nothing was measured here: run `hortator plan --device measured` once"
        if assumed
        else f"measured here: {rates.read_gb_s:.1f} GB/s read, float32 products {rates.matmul_gf_s:.0f} GF/s"
    )
    origin = f"{told}; memory is what is {room.origin}"
    reach = replace(CPU_REACH, origin="those measured, above assumed rates") if assumed else CPU_REACH
    return Device(
        name=f"this machine ({cores} core{'s' * (cores > 1)})",
        memory_bytes=room.bytes,
        read_b_s=rates.read_gb_s * 1e9,
        flop_s=rates.matmul_gf_s * 1e9,
        flop8_s=_INT8_TIMES * rates.matmul_gf_s * 1e9,
        link_b_s=_NETWORK_B_S,
        link_s=_NETWORK_S,
        kind="cpu",
        runtime_bytes=_RUNTIME_BYTES,
        threads=cores,
        source=origin,
        reach=reach,
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
