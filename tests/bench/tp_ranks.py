"""Groups of ranks that a benchmark starts: a process each, on one core, by memory, by sockets or over links.

A script calls `on_host` or `on_links`, which run `python -m MODULE --rank TOLD` for each rank and return what
rank 0 printed as JSON; there, `join` makes the rank's end of the group out of TOLD.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from services.worker.collective.native import SPIN_US, NativeCollective, make_memory
from services.worker.group.machine import cpus_here
from services.worker.parallel.pinning import pin
from tests.support.collective_groups import mesh
from tests.support.netns import Namespace
from tests.support.tp_sockets import connect_all

PORT = 29_410


def cores_of(size: int) -> list[int]:
    """A core for each of `size` ranks, as a worker would pin them; shared only if there are too few."""
    allowed = sorted(os.sched_getaffinity(0))
    cpus = [cpu for cpu in cpus_here() if cpu.id in allowed]
    if not cpus:
        return [allowed[rank % len(allowed)] for rank in range(size)]
    return [cores[0] for cores in pin(cpus, size, threads=1).cores[0]]


def on_host(module: str, size: int, most_floats: int, told: Mapping[str, Any], sockets: bool = False) -> Any:
    """Ranks that share memory, and with `sockets` also have a Unix socket for each pair."""
    memory = make_memory(size, most_floats)
    peers: Sequence[dict[int, socket.socket]] = mesh(size) if sockets else [{} for _ in range(size)]
    cores = cores_of(size)
    ranks = []
    for rank in range(size):
        own = {peer: end.fileno() for peer, end in peers[rank].items()}
        place = {"rank": rank, "size": size, "core": cores[rank], "floats": most_floats}
        body = json.dumps({**told, **place, "memory": memory, "peers": own})
        command = [sys.executable, "-m", module, "--rank", body]
        ranks.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[memory, *own.values()])
        )
    os.close(memory)
    for ends in peers:
        for end in ends.values():
            end.close()
    return _said(ranks, f"{size} ranks of one host")


def on_links(module: str, spaces: Sequence[Namespace], most_floats: int, told: Mapping[str, Any]) -> Any:
    """Ranks in `spaces`, which share nothing but the network between them."""
    addresses, cores = [space.address for space in spaces], cores_of(len(spaces))
    ranks = []
    for rank, space in enumerate(spaces):
        place = {"rank": rank, "size": len(spaces), "core": cores[rank], "floats": most_floats}
        body = json.dumps({**told, **place, "addresses": addresses})
        command = space.command(sys.executable, "-m", module, "--rank", body)
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    return _said(ranks, f"{len(spaces)} ranks over links")


def join(told: Mapping[str, Any]) -> NativeCollective:
    """This rank's end of the group, its process on its core from now on."""
    rank, size = told["rank"], told["size"]
    spin_us = SPIN_US if size <= len(os.sched_getaffinity(0)) else 0.0
    os.sched_setaffinity(0, {told["core"]})
    if "addresses" in told:
        peers = connect_all(rank, told["addresses"], PORT)
        return NativeCollective(rank, size, None, peers, told["floats"], spin_us)
    peers = {int(peer): socket.socket(fileno=fd) for peer, fd in told["peers"].items()}
    end = NativeCollective(rank, size, told["memory"], peers, told["floats"], spin_us)
    os.close(told["memory"])
    return end


def _said(ranks: Sequence["subprocess.Popen[str]"], what: str) -> Any:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        said = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if failed := [number for number, rank in enumerate(ranks) if rank.returncode]:
        sys.exit(f"{what}: rank {', '.join(map(str, failed))} failed")
    return json.loads(said[0])
