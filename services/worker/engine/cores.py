"""Cores that an instance takes for itself: no two instances of this node pin threads to the same one."""

import fcntl
from collections.abc import Sequence
from typing import IO

from services.worker.engine.native import build

_held: dict[int, IO[bytes]] = {}
"""Core → lock file of this process, open until it ends; the system frees the locks of a process that dies."""


def claim(cores: Sequence[int]) -> bool:
    """Take `cores` for this process; False, and none is taken, if another has one or locks cannot be had."""
    taken: dict[int, IO[bytes]] = {}
    lock: IO[bytes]
    folder = build.cache_dir().parent / "cores"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for core in set(cores) - _held.keys():
            lock = taken[core] = (folder / f"{core}.lock").open("wb")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        for lock in taken.values():
            lock.close()
        return False
    _held.update(taken)
    return True


def release() -> None:
    """Give back what `claim` took."""
    while _held:
        _held.popitem()[1].close()
