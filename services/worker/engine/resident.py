"""What this process has in memory, as Linux accounts for it, and how much more there is. No torch."""

import ctypes
import mmap
import re
from dataclasses import dataclass
from pathlib import Path

_PRESENT, _SWAPPED = 1 << 63, 1 << 62
_ENTRIES = 1 << 16
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Resident:
    """Bytes in memory now."""

    private: int
    """Nobody else's: heap, stacks, arenas."""
    files: int
    """Mapped files, libraries above all; other processes may share them."""
    shared: int
    """This process's proportional share of memory that several write to, as ranks of a group do."""

    @property
    def total(self) -> int:
        return self.private + self.files + self.shared


def resident() -> Resident:
    """Of this process. Raises OSError where the system does not tell."""
    status = _kilobytes(Path("/proc/self/status"))
    shared = status.get("RssShmem", 0)
    if shared:
        shared = _kilobytes(Path("/proc/self/smaps_rollup")).get("Pss_Shmem", shared)
    return Resident(status.get("RssAnon", 0), status.get("RssFile", 0), shared)


def resident_in(address: int, size: int) -> int:
    """Bytes of [address, address + size) of this process that have a page. Raises OSError."""
    import numpy as np

    page = mmap.PAGESIZE
    first, stop = address // page, -(-(address + size) // page)
    pages = 0
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        for begin in range(first, stop, _ENTRIES):
            table.seek(8 * begin)
            entries = np.frombuffer(table.read(8 * min(_ENTRIES, stop - begin)), np.uint64)
            pages += int(np.count_nonzero(entries & np.uint64(_PRESENT | _SWAPPED)))
    return min(pages * page, size)


class Peak:
    """The highest that resident memory comes to since this was made; where the system keeps no such mark,
    what is resident when asked; where it tells nothing at all, 0: ranks of a group must not stop half-way.
    """

    _CLEAR = Path("/proc/self/clear_refs")

    def __init__(self) -> None:
        self.before = Resident(0, 0, 0)
        try:
            self.before = resident()
            self._CLEAR.write_text("5")
            self._marked = True
        except OSError:
            self._marked = False

    def grown(self) -> int:
        """Bytes by which private memory was larger than before at its highest; files do not count."""
        try:
            now = resident()
        except OSError:
            return 0
        after = now.private - self.before.private
        if not self._marked:
            return max(0, after)
        status = _kilobytes(Path("/proc/self/status"))
        others = now.total - now.private + status.get("RssShmem", 0) - now.shared
        return max(0, after, status.get("VmHWM", 0) - others - self.before.private)


def give_back() -> None:
    """Return to the system what the allocator of C keeps for later: after loading, that is much."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # not everywhere is glibc
        trim(0)


@dataclass(frozen=True)
class Room:
    """Memory that may still be taken."""

    bytes: int
    origin: str
    """Who says so, for people."""
    relief: str = "free memory"
    """What would make it more, for people."""


def room_here() -> Room:
    """What this process may still take: what the machine has, and what its control groups allow."""
    info = _kilobytes(Path("/proc/meminfo"))
    found = [Room(info.get("MemAvailable", _UNLIMITED), "available on this machine")]
    found += [Room(left, f"left below the limit of {where}") for left, where in _control_groups()]
    return min(found, key=lambda room: room.bytes)


def _control_groups() -> list[tuple[int, str]]:
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, root = ("memory.max", "memory.current", "inactive_file"), Path("/sys/fs/cgroup")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            root = Path("/sys/fs/cgroup/memory")
        else:
            continue
        at = root / path.lstrip("/")
        # A container sees its own group as the root, whatever the path says.
        for group in (at, *at.parents) if at != root else (root,):
            if group == root.parent:
                break
            if (left := left_in(group, *names)) is not None:
                found.append((left, f"control group {group}"))
    return found


def left_in(group: Path, limit: str, usage: str, cache: str) -> int | None:
    """What a control group may still take, by its files of these names; None: no limit, or not told."""
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        if most == "max" or int(most) >= _UNLIMITED:
            return None
        stat = dict(line.split()[:2] for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(most) - used + int(stat.get(cache, 0)))
    except (OSError, ValueError):
        return None


def _kilobytes(path: Path) -> dict[str, int]:
    """`Name:  123 kB` lines in bytes."""
    text = path.read_text()
    return {name: int(count) << 10 for name, count in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
