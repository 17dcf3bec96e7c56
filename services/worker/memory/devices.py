"""What devices can hold and do: a sheet of common GPUs, and devices that a file describes. Pure.

Rates of the sheet are those that vendors print, dense and without sparsity; memory is in units of 10^9 bytes,
as sold. What of them a step reaches is the business of `Reach`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

GB = 10**9


class BadDevice(ValueError):
    """A device that is not known, or a description that says no device; the message says what to do."""


@dataclass(frozen=True)
class Reach:
    """What share of its printed or measured rates a device reaches in steps of the engine."""

    read: float
    """Of memory bandwidth, reading weights and KV."""
    decode: float
    """Of arithmetic, in steps of few tokens a sequence."""
    prompt: float
    """Of arithmetic, in prompts."""
    step_s: float
    """Taken by a step whatever is in it."""
    origin: str
    """Where these come from, for people."""


CPU_REACH = Reach(
    read=1.0,
    decode=0.9,
    prompt=1.0,
    step_s=0.0,
    origin="measured: with these, steps of 1, 8 and 32 sequences and a prompt of SmolLM2-135M on two CPU "
    "cores are predicted within 7 % (docs/memory.md)",
)
"""Of rates measured in the same process. Reading and arithmetic are added, not overlapped: so it was measured
to be, since 16-bit weights are widened on their way."""
SHEET_REACH = Reach(
    read=0.75,
    decode=0.5,
    prompt=0.5,
    step_s=1e-3,
    origin="assumed, not measured: 75 % of the printed bandwidth, 50 % of the arithmetic, 1 ms a step",
)
MEASURED_REACH = Reach(
    read=0.9,
    decode=0.6,
    prompt=0.75,
    step_s=1e-3,
    origin="assumed: 90 % of the measured copy rate, 60 to 75 % of the measured matrix product, 1 ms a step",
)


@dataclass(frozen=True)
class Device:
    """One device. Rates in bytes or operations a second, a multiplication and an addition being two."""

    name: str
    memory_bytes: int
    read_b_s: float
    """Memory bandwidth."""
    flop_s: float
    """Of products of 16-bit matrices; on CPUs of float32 ones, as they are computed there."""
    flop8_s: float
    """Of products of 8-bit integers."""
    link_b_s: float
    """One device to others nearby, each way."""
    link_s: float
    """A message's latency there."""
    island: int = 1
    """Devices that are linked so; what leaves an island goes by the network."""
    kind: str = "cuda"
    """`cuda`, `cpu`, or another that this engine does not compute on."""
    runtime_bytes: int = 600 << 20
    """What a process takes there before it has a model: context and libraries."""
    threads: int = 1
    """Cores of a CPU."""
    source: str = ""
    """Where the figures come from."""
    reach: Reach = SHEET_REACH

    def linked(self, gb_s: float | None, us: float | None) -> "Device":
        """With other links between its devices: GB/s each way, microseconds; None: as they are."""
        return replace(
            self,
            link_b_s=self.link_b_s if gb_s is None else gb_s * GB,
            link_s=self.link_s if us is None else us / 1e6,
        )

    @property
    def shared(self) -> bool:
        """It is a rank's share of a machine."""
        return self.kind == "cpu" and self.island > 1

    def shared_by(self, ranks: int) -> "Device":
        """What each of so many ranks has of a machine whose cores and memory they share."""
        return replace(
            self,
            name=f"1/{ranks} of {self.name}",
            memory_bytes=self.memory_bytes // ranks,
            read_b_s=self.read_b_s / ranks,
            flop_s=self.flop_s / ranks,
            flop8_s=self.flop8_s / ranks,
            link_b_s=SHARED_B_S,
            link_s=SHARED_S,
            island=ranks,
            threads=max(1, self.threads // ranks),
        )


SHARED_B_S, SHARED_S = 9e9, 3e-6
"""Between ranks of one machine, over memory that they share: measured (docs/benchmarks.md, sums)."""
NETWORK_B_S, NETWORK_S = 25e9, 15e-6
"""Between islands, for each device: 200 Gbit/s; an assumption."""


def _gpu(
    name: str,
    gb: float,
    read_gb_s: float,
    tflops16: float,
    tflops8: float,
    link_gb_s: float,
    island: int,
    source: str,
    kind: str = "cuda",
) -> Device:
    switched = link_gb_s >= 100
    return Device(
        name=name,
        memory_bytes=round(gb * GB),
        read_b_s=read_gb_s * GB,
        flop_s=tflops16 * 1e12,
        flop8_s=tflops8 * 1e12,
        link_b_s=link_gb_s * GB,
        link_s=5e-6 if switched else 10e-6,
        island=island,
        kind=kind,
        source=source,
    )


SHEET: tuple[Device, ...] = (
    _gpu("B200", 180, 8000, 2250, 4500, 900, 8, "NVIDIA DGX B200 data sheet, an eighth of it"),
    _gpu("H200", 141, 4800, 989, 1979, 450, 8, "NVIDIA H200 data sheet (SXM)"),
    _gpu("H100", 80, 3350, 989, 1979, 450, 8, "NVIDIA H100 data sheet (SXM)"),
    _gpu("H100-PCIe", 80, 2000, 756, 1513, 64, 8, "NVIDIA H100 PCIe product brief; PCIe 5.0 x16"),
    _gpu("A100-80", 80, 2039, 312, 624, 300, 8, "NVIDIA A100 data sheet (80 GB SXM)"),
    _gpu("A100-80-PCIe", 80, 1935, 312, 624, 32, 8, "NVIDIA A100 data sheet (80 GB PCIe); PCIe 4.0 x16"),
    _gpu("A100-40", 40, 1555, 312, 624, 300, 8, "NVIDIA A100 data sheet (40 GB SXM)"),
    _gpu("L40S", 48, 864, 362, 733, 32, 8, "NVIDIA L40S data sheet; PCIe 4.0 x16"),
    _gpu("L4", 24, 300, 121, 242, 32, 8, "NVIDIA L4 data sheet; PCIe 4.0 x16"),
    _gpu("A10", 24, 600, 125, 250, 32, 8, "NVIDIA A10 data sheet; PCIe 4.0 x16"),
    _gpu("A6000", 48, 768, 155, 310, 32, 4, "NVIDIA RTX A6000 data sheet; PCIe 4.0 x16, no bridge"),
    _gpu("RTX5090", 32, 1792, 209, 838, 64, 4, "NVIDIA RTX Blackwell architecture paper; PCIe 5.0 x16"),
    _gpu("RTX4090", 24, 1008, 165, 660, 32, 4, "NVIDIA Ada architecture paper; PCIe 4.0 x16"),
    _gpu("RTX3090", 24, 936, 71, 284, 32, 4, "NVIDIA Ampere GA102 paper; PCIe 4.0 x16"),
    _gpu("V100-32", 32, 900, 125, 62, 150, 8, "NVIDIA V100 data sheet (SXM2)"),
    _gpu("T4", 16, 320, 65, 130, 16, 8, "NVIDIA T4 data sheet; PCIe 3.0 x16"),
    _gpu("MI300X", 192, 5300, 1307, 2615, 448, 8, "AMD Instinct MI300X data sheet", kind="rocm"),
)
"""Dense 16-bit rates with float32 sums; links each way."""

_ALIASES = {
    "H100SXM": "H100",
    "H200SXM": "H200",
    "A100": "A100-80",
    "A100SXM": "A100-80",
    "V100": "V100-32",
    "RTXA6000": "A6000",
    "4090": "RTX4090",
    "5090": "RTX5090",
    "3090": "RTX3090",
}
_NOISE = re.compile(r"NVIDIA|AMD|GEFORCE|INSTINCT|TESLA|GB\b|GB(?=-|$)|[\s_-]")


def find_device(name: str) -> Device:
    """The sheet's device of that name; case, spaces, dashes and makers' names do not matter.

    Raises `BadDevice`.
    """
    wanted = _plain(name)
    wanted = _plain(_ALIASES.get(wanted, wanted))
    for device in SHEET:
        if _plain(device.name) == wanted:
            return device
    known = ", ".join(device.name for device in SHEET)
    raise BadDevice(
        f"--device {name[:60]!r} is not known. Known: {known}; cpu for this machine, measured to "
        "measure it first, or a .json file with name, memory_gb, read_gb_s, tflops and link_gb_s"
    )


def _plain(name: str) -> str:
    return _NOISE.sub("", name.upper())


_FIELDS = {
    "name": "what to call it",
    "memory_gb": "memory in 10^9 bytes",
    "read_gb_s": "memory bandwidth in 10^9 bytes a second",
    "tflops": "dense products of 16-bit matrices, 10^12 operations a second",
    "tflops8": "the same of 8-bit integers; twice tflops if left out",
    "link_gb_s": "one device to another, each way, in 10^9 bytes a second",
    "link_us": "latency of a message between them in microseconds",
    "island": "devices that are linked so",
    "kind": "cuda, cpu or another",
    "runtime_gb": "what a process takes before it has a model, in 10^9 bytes",
    "measured": "true where the rates were measured rather than printed",
}
_NEEDED = ("name", "memory_gb", "read_gb_s", "tflops", "link_gb_s")


def device_of(raw: object, source: str) -> Device:
    """A device from what a JSON file says. Raises `BadDevice`, naming the key."""
    if not isinstance(raw, Mapping):
        raise BadDevice(f"{source} holds no object: write {', '.join(_FIELDS)}")
    for key in raw:
        if key not in _FIELDS:
            raise BadDevice(f"{source}: {str(key)[:60]!r} is not known: write {', '.join(_FIELDS)}")
    for key in _NEEDED:
        if raw.get(key) is None:
            raise BadDevice(f"{source}: {key} is missing: {_FIELDS[key]}")
    for key in ("name", "kind"):
        if not isinstance(raw.get(key, ""), str) or len(raw.get(key, "")) > 80:
            raise BadDevice(f"{source}: {key} must be a short text")
    if not isinstance(raw.get("measured", False), bool):
        raise BadDevice(f"{source}: measured must be true or false")
    tflops = _number(raw, "tflops", source)
    kind = raw.get("kind", "cuda")
    measured = CPU_REACH if kind == "cpu" else MEASURED_REACH
    return Device(
        name=raw["name"],
        memory_bytes=round(_number(raw, "memory_gb", source) * GB),
        read_b_s=_number(raw, "read_gb_s", source) * GB,
        flop_s=tflops * 1e12,
        flop8_s=_number(raw, "tflops8", source, 2 * tflops) * 1e12,
        link_b_s=_number(raw, "link_gb_s", source) * GB,
        link_s=_number(raw, "link_us", source, 10.0) / 1e6,
        island=max(1, int(_number(raw, "island", source, 8))),
        kind=kind,
        runtime_bytes=round(_number(raw, "runtime_gb", source, 0.6) * GB),
        source=source,
        reach=measured if raw.get("measured", False) else SHEET_REACH,
    )


def _number(raw: Mapping[str, Any], key: str, source: str, default: float | None = None) -> float:
    value = raw.get(key, default)
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    if not usable or not math.isfinite(value) or not 1e-6 <= value <= 1e9:
        raise BadDevice(
            f"{source}: {key} must be a positive number, {_FIELDS[key]}; it is {str(value)[:60]!r}"
        )
    return float(value)
