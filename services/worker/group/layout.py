"""Who is in a group, and which part of its instance's machine each rank has."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.worker.parallel.pinning import Cpu, pin
from services.worker.parallel.split import deal
from services.worker.settings import WorkerSettings, parse_cores
from shared.runtime.settings import SettingsError

MOST_RANKS = 64

SPIN_US = 20.0


@dataclass(frozen=True)
class Layout:
    """Ranks [0, size), in contiguous runs on nodes [0, nodes)."""

    size: int
    nodes: int

    def node_of(self, rank: int) -> int:
        return next(node for node, run in enumerate(deal(self.size, self.nodes)) if rank < run.stop)

    def ranks_of(self, node: int) -> range:
        run = deal(self.size, self.nodes)[node]
        return range(run.start, run.stop)


def layout_of(settings: WorkerSettings) -> Layout:
    """The group these settings ask for. Raises `SettingsError` where they contradict each other."""
    s = settings
    if not 1 <= s.tp <= MOST_RANKS:
        raise SettingsError(f"tp={s.tp}: a group has 1 to {MOST_RANKS} ranks")
    if not 1 <= s.nodes <= s.tp:
        raise SettingsError(f"nodes={s.nodes}: choose 1 to {s.tp}, so that each node has a rank (tp={s.tp})")
    if s.node_rank >= s.nodes:
        raise SettingsError(f"node_rank={s.node_rank}: of {s.nodes} node(s), number them 0 to {s.nodes - 1}")
    if s.nodes == 1 and (s.rendezvous or s.group_secret):
        raise SettingsError(
            "rendezvous and group_secret are for a group on several nodes: set nodes too, or neither"
        )
    if s.nodes > 1:
        rendezvous_of(s)
        if len(s.group_secret) < 16:
            raise SettingsError(
                f"nodes={s.nodes} needs group_secret, the same on every node and 16 characters or more: "
                "ranks prove by it that they belong together (take the output of `openssl rand -hex 16`)"
            )
    return Layout(s.tp, s.nodes)


def rendezvous_of(settings: WorkerSettings) -> tuple[str, int]:
    """Where rank 0 listens for the others. Raises `SettingsError`."""
    host, _, port = settings.rendezvous.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 65536:
        raise SettingsError(
            f"rendezvous={settings.rendezvous!r}: nodes={settings.nodes} needs HOST:PORT of node 0, the same "
            "on every node, for example 10.0.0.1:29400"
        )
    return host, int(port)


def rank_settings(
    settings: WorkerSettings, layout: Layout, rank: int, spare: int, cpus: Sequence[Cpu] = ()
) -> WorkerSettings:
    """What `rank` computes with: its share of the cores this node's part of the instance has, and its device.

    `spare`: how many cores the process may run on, for when the instance has none to itself. `cpus`: what is
    known of the machine, so that a rank gets cores of one cache and a group of one NUMA node.
    """
    here = layout.ranks_of(settings.node_rank)
    place = here.index(rank)
    own = parse_cores(settings.cores)
    share: Sequence[int] = ()
    if len(own) >= len(here):
        share = _shares(own, len(here), settings.threads or None, cpus)[place]
    threads = settings.threads or max(1, len(share) or spare // len(here))
    return replace(
        settings,
        threads=threads,
        cores=",".join(map(str, share)),
        device=devices_of(settings.device, len(here))[place],
    )


def _shares(
    own: Sequence[int], ranks: int, threads: int | None, cpus: Sequence[Cpu]
) -> Sequence[Sequence[int]]:
    known = [cpu for cpu in cpus if cpu.id in own]
    if len(known) < len(own):
        return [own[run.start : run.stop] for run in deal(len(own), ranks)]
    return [sorted(rank) for rank in pin(known, ranks, threads=threads).cores[0]]


def cores_here(settings: WorkerSettings) -> Sequence[int]:
    """Cores on which this node's part of the instance may compute. Raises `SettingsError` for others."""
    allowed, own = os.sched_getaffinity(0), parse_cores(settings.cores)
    if beyond := sorted(set(own) - allowed):
        raise SettingsError(
            f"cores={settings.cores!r}: this process may not use {beyond}, only {sorted(allowed)}"
        )
    return own or sorted(allowed)


def spin_us(own: WorkerSettings, layout: Layout) -> float:
    """How long this rank looks for the others before it sleeps: not at all where cores are to be shared.

    `own`: what `rank_settings` made of the settings.
    """
    if own.cores:
        return SPIN_US if own.threads <= len(parse_cores(own.cores)) else 0.0
    computing = own.threads * len(layout.ranks_of(own.node_rank))
    return SPIN_US if computing <= len(os.sched_getaffinity(0)) else 0.0


def devices_of(text: str, ranks: int) -> list[str]:
    """A device for each rank of a node: `cuda` counts them, a list names them. Raises `SettingsError`."""
    named = [part.strip() for part in text.split(",")]
    if named == ["cuda"] and ranks > 1:
        return [f"cuda:{rank}" for rank in range(ranks)]
    if named == ["cpu"]:
        return named * ranks
    if len(named) != ranks or len(set(named)) != ranks:
        raise SettingsError(f"device={text!r}: name one device for each of {ranks} rank(s) of this node")
    return named
