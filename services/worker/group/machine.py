"""What the system tells of this machine's processors."""

from pathlib import Path

from services.worker.parallel.pinning import CPU_FILES, Cpu, cpus_of

_DEVICES = Path("/sys/devices/system")


def cpus_here() -> tuple[Cpu, ...]:
    """The processors with their cores, last-level caches and NUMA nodes; none where it is not told."""
    patterns = (*(f"cpu/cpu[0-9]*/{file}" for file in CPU_FILES), "node/node*/cpulist")
    files: dict[str, str] = {}
    for pattern in patterns:
        for path in _DEVICES.glob(pattern):
            try:
                files[str(path.relative_to(_DEVICES))] = path.read_text()
            except OSError:
                continue
    return cpus_of(files)
