"""Which devices are linked well to which, and on which of them a group's ranks belong (design §7).

Links between devices differ in kind, by several times, and within a kind hardly. Domains are found by these
gaps between measured bandwidths, whatever the bandwidths are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

GAP = 2.0
"""Times one link's bandwidth must be another's for them to differ in kind."""

Partition = tuple[tuple[int, ...], ...]
"""All devices in groups, each ascending, by their first."""


@dataclass(frozen=True)
class Links:
    """What was measured between each two of some devices. Raises ValueError if it is no such matrix."""

    bytes_per_s: tuple[tuple[float, ...], ...]
    """[from][to]; from a device to itself counts for nothing."""
    latency_s: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        size = len(self.bytes_per_s)
        for what, rows in (("bandwidths", self.bytes_per_s), ("latencies", self.latency_s)):
            if not size or len(rows) != size or any(len(row) != size for row in rows):
                raise ValueError(f"{what} of {size} devices must be as many rows of as many numbers")
        for a, b in combinations(range(size), 2):
            if not self.bandwidth(a, b) > 0:
                raise ValueError(f"devices {a} and {b} have no bandwidth between them")

    @property
    def size(self) -> int:
        return len(self.bytes_per_s)

    def bandwidth(self, a: int, b: int) -> float:
        """Bytes/s between two devices, by the slower direction."""
        return min(self.bytes_per_s[a][b], self.bytes_per_s[b][a])

    def latency(self, a: int, b: int) -> float:
        """Seconds between two devices, by the slower direction."""
        return max(self.latency_s[a][b], self.latency_s[b][a])


def levels(links: Links) -> tuple[Partition, ...]:
    """Domains within domains: the finest first, all devices last. Links within a domain of a level are of its
    kind or better; each kind of link found makes a level unless it connects nothing new."""
    found = [_connected(links, least) for _, least in sorted(_gaps(links), key=lambda gap: -gap[1])]
    every = (tuple(range(links.size)),)
    return tuple(dict.fromkeys((*found, every)))


def domains(links: Links) -> Partition:
    """Devices that are linked better than these groups among each other by the largest factor found; all
    devices, if links hardly differ."""
    gaps = _gaps(links)
    return _connected(links, max(gaps)[1]) if gaps else (tuple(range(links.size)),)


def place(links: Links, size: int, groups: int = 1) -> tuple[tuple[int, ...], ...]:
    """Devices of `groups` groups of `size` ranks, in rank order: as many groups as can be inside the finest
    domains, the next inside the next finest; a group across domains is in as few as can be, with those of
    each side by side. Raises ValueError if there are too few devices."""
    if size < 1 or groups < 1 or size * groups > links.size:
        raise ValueError(f"{groups} group(s) of {size} need {size * groups} devices; there are {links.size}")
    all_levels = levels(links)
    free = set(range(links.size))
    placed: list[tuple[int, ...]] = []
    for depth, partition in enumerate(all_levels):
        inner = all_levels[depth - 1] if depth else tuple((device,) for device in range(links.size))
        while len(placed) < groups:
            fitting = [part for domain in partition if len(part := free & set(domain)) >= size]
            if not fitting:
                break
            # Of the domains that leave fewest devices over, the smallest: larger ones may fit more.
            best = min(fitting, key=lambda part: (len(part) % size, len(part), min(part)))
            chosen = _take(best, size, inner)
            free -= set(chosen)
            placed.append(chosen)
    return tuple(placed)


@dataclass(frozen=True)
class Straddle:
    """That a group's ranks are in several domains, and what that costs."""

    parts: tuple[tuple[int, ...], ...]
    """Ranks of each domain."""
    inside: float
    """Bytes/s of the slowest link within a domain."""
    across: tuple[int, int]
    """The ranks of different domains that are linked worst."""
    across_bytes_per_s: float
    across_latency_s: float
    fitting: int
    """Devices of the largest domain: the most ranks that need not straddle."""

    @property
    def ratio(self) -> float:
        """How many times slower the worst link is than those within a domain."""
        return self.inside / self.across_bytes_per_s

    def describe(self) -> str:
        """A warning for people, with figures and what to do."""
        within, (a, b) = max(self.parts, key=len), self.across
        who = f"ranks {_runs(within)}" if len(within) > 1 else "devices of one domain"
        ranks = sum(map(len, self.parts))
        if ranks > self.fitting:
            instead = f"--tp {self.fitting} or less fits into one domain"
        else:
            instead = f"a domain of {self.fitting} devices would hold all {ranks} ranks"
        return (
            f"{who} are linked at {rate(self.inside)}, ranks {a} and {b} at {rate(self.across_bytes_per_s)} "
            f"({self.across_latency_s * 1e6:.0f} µs): {self.ratio:.1f}× slower, and every sum waits for it; "
            f"{instead}"
        )


def straddle(group: Sequence[int], links: Links) -> Straddle | None:
    """Whether the devices `group`, in rank order, lie in several domains: at the largest gap between kinds of
    links at which they do; None if they do at none."""
    for _, least in sorted(_gaps(links), reverse=True):
        partition = _connected(links, least)
        members = [tuple(rank for rank, at in enumerate(group) if at in domain) for domain in partition]
        parts = tuple(part for part in members if part)
        if len(parts) < 2:
            continue
        own = [pair for part in parts for pair in combinations((group[rank] for rank in part), 2)]
        any_domain = [pair for domain in partition for pair in combinations(domain, 2)]
        inside = min(links.bandwidth(a, b) for a, b in own or any_domain)
        apart = (
            (a, b)
            for a, b in combinations(range(len(group)), 2)
            if not any(a in part and b in part for part in parts)
        )
        a, b = min(apart, key=lambda pair: links.bandwidth(group[pair[0]], group[pair[1]]))
        between = links.bandwidth(group[a], group[b]), links.latency(group[a], group[b])
        return Straddle(parts, inside, (a, b), *between, max(map(len, partition)))
    return None


def describe(links: Links) -> str:
    """What links the devices of one group, in rank order, for people: or what straddling domains costs."""
    across = straddle(range(links.size), links)
    if across is not None:
        return across.describe()
    pairs = [*combinations(range(links.size), 2)]
    slowest = min(links.bandwidth(a, b) for a, b in pairs)
    latency_s = max(links.latency(a, b) for a, b in pairs)
    return f"all ranks are linked at {rate(slowest)} or better, {latency_s * 1e6:.0f} µs or less"


def rate(bytes_per_s: float) -> str:
    """For people, three digits."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s / 1e3:.3g} kB/s"


def _gaps(links: Links) -> list[tuple[float, float]]:
    """(factor, least bandwidth above) of each gap between kinds of links."""
    speeds = sorted(links.bandwidth(a, b) for a, b in combinations(range(links.size), 2))
    return [(high / low, high) for low, high in pairwise(speeds) if high >= GAP * low]


def _connected(links: Links, least: float) -> Partition:
    """Devices that reach each other over links of at least `least` bytes/s."""
    left = set(range(links.size))
    found = []
    while left:
        domain, edge = set(), {min(left)}
        while edge:
            domain |= edge
            left -= edge
            edge = {b for b in left if any(links.bandwidth(a, b) >= least for a in edge)}
        found.append(tuple(sorted(domain)))
    return tuple(found)


def _take(free: set[int], size: int, inner: Partition) -> tuple[int, ...]:
    """`size` of the devices `free`, from as few `inner` domains as can be; those of each side by side."""
    chosen: list[int] = []
    parts = [sorted(free & set(domain)) for domain in inner]
    while len(chosen) < size:
        need = size - len(chosen)
        # The tightest part that holds all the rest, or else the largest.
        part = min(parts, key=lambda part: (len(part) < need, len(part) if len(part) >= need else -len(part)))
        parts.remove(part)
        chosen += part[:need]
    return tuple(chosen)


def _runs(ranks: Sequence[int]) -> str:
    """`0-3, 6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
