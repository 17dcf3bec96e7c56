"""Which cores of a node each rank of a group computes on (design §7).

A rank's threads share data all the time, ranks of a group twice in every layer: a rank belongs on cores of
one last-level cache, a group on one NUMA node. Threads of one core share its arithmetic, so that two ranks on
one core are each half as fast.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from services.worker.settings import parse_cores

CPU_FILES = ("topology/core_cpus_list", "cache/index3/shared_cpu_list")
"""Beneath /sys/devices/system/cpu/cpu*/; with node/node*/cpulist, what `cpus_of` reads from."""


@dataclass(frozen=True)
class Cpu:
    """A processor as the system counts them. Two that have the same `core` share one's arithmetic."""

    id: int
    core: int
    cache: int
    """Which last-level cache."""
    node: int
    """Which NUMA node."""


def cpus_of(files: Mapping[str, str], allowed: Collection[int] | None = None) -> tuple[Cpu, ...]:
    """The processors that `files` tell of: texts by their paths beneath /sys/devices/system, `CPU_FILES` and
    node/node*/cpulist. Only `allowed` ones, if given. What a system does not tell is taken as one for all."""
    nodes = {
        cpu: int(path.split("/")[1].removeprefix("node"))
        for path, text in files.items()
        if path.startswith("node/node") and path.endswith("/cpulist")
        for cpu in parse_cores(text)
    }
    found = []
    for path, text in files.items():
        folder, _, rest = path.partition("/topology/")
        if rest != "core_cpus_list":
            continue
        cpu = int(folder.removeprefix("cpu/cpu"))
        if allowed is not None and cpu not in allowed:
            continue
        node = nodes.get(cpu, 0)
        shared = parse_cores(files.get(f"{folder}/cache/index3/shared_cpu_list", ""))
        cache = shared or [other for other, its in nodes.items() if its == node] or (0,)
        found.append(Cpu(cpu, min(parse_cores(text) or (cpu,)), min(cache), node))
    return tuple(sorted(found, key=lambda cpu: cpu.id))


@dataclass(frozen=True)
class Pinning:
    """Processors of each rank of each group."""

    cores: tuple[tuple[tuple[int, ...], ...], ...]
    """[group][rank], each as many as the rank has threads where there are enough."""
    crowded: bool
    """There are more threads than processors: ranks take turns, and none should spin."""
    straddling: tuple[int, ...]
    """Groups whose ranks are on several NUMA nodes."""


def pin(cpus: Sequence[Cpu], size: int, groups: int = 1, threads: int | None = None) -> Pinning:
    """Processors for `groups` groups of `size` ranks of `threads` threads each, by default one for each core.

    A rank has cores of its own, of one cache if they fit, else of one node; a group is on one node if it can
    be. Two ranks share a core only where there are more ranks than cores. Raises ValueError of a group of
    none, and where there are no processors.
    """
    if size < 1 or groups < 1 or not cpus or (threads is not None and threads < 1):
        raise ValueError(f"{groups} group(s) of {size} ranks cannot be pinned to {len(cpus)} processors")
    siblings: dict[int, list[Cpu]] = {}
    for cpu in cpus:
        siblings.setdefault(cpu.core, []).append(cpu)
    cores = [its[0] for its in siblings.values()]
    ranks = size * groups
    each = len(cores) // ranks
    wanted = threads or max(1, each)
    crowded = ranks * wanted > len(cpus)
    if not each:
        pinned = _taking_turns(cores, siblings, size, groups)
    else:
        pinned = [
            tuple(_threads_of(rank, siblings, wanted) for rank in group)
            for group in _deal(cores, size, groups, min(each, wanted))
        ]
    node_of = {cpu.id: cpu.node for cpu in cpus}
    straddling = tuple(
        i for i, group in enumerate(pinned) if len({node_of[cpu] for rank in group for cpu in rank}) > 1
    )
    return Pinning(tuple(pinned), crowded, straddling)


def _deal(cores: Sequence[Cpu], size: int, groups: int, each: int) -> list[list[list[Cpu]]]:
    """[group][rank] `each` cores, of which there are enough."""
    free = sorted(cores, key=lambda core: (core.node, core.cache, core.id))
    dealt = []
    for _ in range(groups):
        group = []
        home = _home(free, size, each)
        for _ in range(size):
            rank = _of_one_cache([core for core in free if home is None or core.node == home], each)
            if rank is None:
                rank = _nearest(free, each, home)
            free = [core for core in free if core not in rank]
            group.append(rank)
        dealt.append(group)
    return dealt


def _home(free: Sequence[Cpu], size: int, each: int) -> int | None:
    """The node that a group of `size` ranks of `each` cores fits into, with each rank in one cache if one can
    have that, and the fewest cores left over; None if none can have it."""
    best = None
    for node in sorted({core.node for core in free}):
        here = [core for core in free if core.node == node]
        if len(here) >= size * each:
            split = sum(len(its) // each for its in _by_cache(here).values()) < size
            best = min(best or (split, len(here), node), (split, len(here), node))
    return best[2] if best else None


def _of_one_cache(free: Sequence[Cpu], each: int) -> list[Cpu] | None:
    """`each` cores of the cache that has most of them free: ranks side by side get caches of their own."""
    fitting = [its for its in _by_cache(free).values() if len(its) >= each]
    return max(fitting, key=len)[:each] if fitting else None


def _nearest(free: Sequence[Cpu], each: int, home: int | None) -> list[Cpu]:
    """`each` cores of several caches: of the home node, else of the node with most, then of others."""
    counts: dict[int, int] = {}
    for core in free:
        counts[core.node] = counts.get(core.node, 0) + 1
    caches = {cache: len(its) for cache, its in _by_cache(free).items()}
    order = sorted(
        free, key=lambda c: (c.node != home, -counts[c.node], c.node, -caches[c.cache], c.cache, c.id)
    )
    return order[:each]


def _by_cache(cores: Sequence[Cpu]) -> dict[int, list[Cpu]]:
    found: dict[int, list[Cpu]] = {}
    for core in cores:
        found.setdefault(core.cache, []).append(core)
    return found


def _threads_of(cores: Sequence[Cpu], siblings: Mapping[int, list[Cpu]], threads: int) -> tuple[int, ...]:
    """A processor for each thread: every core's first before any core's second; all, if threads are more."""
    return tuple(_in_turn(cores, siblings)[:threads])


def _taking_turns(
    cores: Sequence[Cpu], siblings: Mapping[int, list[Cpu]], size: int, groups: int
) -> list[tuple[tuple[int, ...], ...]]:
    """One processor for each rank where ranks are more than cores: every core's first before its second."""
    order = _in_turn(sorted(cores, key=lambda core: (core.node, core.cache, core.id)), siblings)
    at = [(order[i % len(order)],) for i in range(size * groups)]
    return [tuple(at[group * size : (group + 1) * size]) for group in range(groups)]


def _in_turn(cores: Sequence[Cpu], siblings: Mapping[int, list[Cpu]]) -> list[int]:
    most = max(len(siblings[core.core]) for core in cores)
    return [siblings[core.core][i].id for i in range(most) for core in cores if i < len(siblings[core.core])]
