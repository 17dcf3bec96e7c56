"""Ranks of this machine: started as processes of their own and handed their connections."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

from services.worker.group.channel import Channel
from services.worker.group.facts import rank_env
from services.worker.group.members import Members
from services.worker.group.membership import Membership
from services.worker.group.messages import FROM_RANK
from services.worker.settings import WorkerSettings

MODULE = "services.worker.group.rank"


def start_local(members: Members, own: Mapping[int, WorkerSettings], membership: Membership) -> None:
    """Start every rank above 0 of a group that is all on this machine, and connect `membership` to them.

    `own`: what each computes with.
    """
    size = len(own)
    pairs: dict[int, dict[int, socket.socket]] = {rank: {} for rank in own}
    pairs[0], memory = membership.peers, membership.memory_fd
    for a, b in combinations(own, 2):
        pairs[a][b], pairs[b][a] = socket.socketpair()
    for rank in range(1, size):
        ours, theirs = socket.socketpair()
        members.connected(rank, Channel(ours, FROM_RANK))
        argv = ["--rank", str(rank), "--control", str(theirs.fileno())]
        argv += ["--peers", ",".join(f"{peer}:{sock.fileno()}" for peer, sock in pairs[rank].items())]
        handed = [theirs.fileno(), *(sock.fileno() for sock in pairs[rank].values())]
        if memory is not None:
            argv += ["--memory", str(memory)]
            handed.append(memory)
        members.started(rank, start_rank(own[rank], argv, tuple(handed)))
        theirs.close()
        for sock in pairs[rank].values():
            sock.close()


def start_rank(
    settings: WorkerSettings, argv: list[str], handed: tuple[int, ...] = ()
) -> "subprocess.Popen[bytes]":
    """The process of one rank, which dies with this thread. It needs no credentials of the mesh."""
    own = replace(settings, nats_user="", nats_password="", redis_url="", parent_pid=os.getpid())
    return subprocess.Popen(
        # -P as we were started: a folder called `services` where the operator stands is none of ours.
        [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", MODULE, *argv],
        env=rank_env(own, os.environ),
        stdin=subprocess.DEVNULL,
        pass_fds=handed,
        # Ctrl-C in the terminal is for rank 0, which tells the others.
        start_new_session=True,
    )
