"""What a process has of its group once it is formed."""

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from services.worker.collective.library import library
from services.worker.collective.native import NativeCollective
from services.worker.collective.port import Collective, GroupLost
from services.worker.engine.config import ModelConfig, parse_config
from services.worker.engine.native.build import KernelsUnavailable
from services.worker.group.messages import Welcome
from services.worker.group.pairwise import measure_links
from services.worker.group.plain import PlainCollective
from services.worker.parallel.split import plan_shards
from services.worker.parallel.topology import Links
from services.worker.settings import WorkerSettings

LIMIT_S = 20.0
"""A rank that is alive but does not come to a collective for so long is lost, once all are loaded."""

_LEAST_FLOATS = 1 << 18


@dataclass
class Membership:
    """One rank's place and its connections to the other ranks. `abort` may be called from any thread."""

    rank: int
    size: int
    peers: dict[int, socket.socket] = field(default_factory=dict)
    """A connected stream socket for each other rank."""
    memory_fd: int | None = None
    """Memory that all ranks share, if all are on one host."""
    links: Links | None = None
    """What was measured between the ranks of several hosts."""
    _collective: NativeCollective | PlainCollective | None = None
    _reason: str = ""

    def join(self, welcome: Welcome, spin_us: float, limit_s: float) -> Collective:
        """What the ranks compute through; it owns the connections from now on. Raises ValueError.

        `limit_s`: a rank that is alive but does not come to a collective for so long is lost.
        """
        if welcome.addresses:
            try:
                self.links = measure_links(self.rank, self.size, self.peers, limit_s)
            except OSError as error:
                raise GroupLost(f"the links between ranks could not be measured: {error}") from error
        collective: NativeCollective | PlainCollective
        if welcome.native:
            collective = self._native(welcome.most_floats, spin_us, limit_s)
        else:
            collective = PlainCollective(self.rank, self.size, self.peers, limit_s)
        self._collective = collective
        if self._reason:
            collective.abort(self._reason)
        return collective

    def hurry(self, limit_s: float) -> None:
        """All have loaded what they compute with, so that nobody needs to wait longer than this."""
        if self._collective is not None:
            self._collective.set_limit(limit_s)

    def abort(self, reason: str) -> None:
        """Free whoever waits in the collective, also if it is only made afterwards."""
        self._reason = self._reason or reason
        if self._collective is not None:
            self._collective.abort(self._reason)

    def close(self) -> None:
        """Idempotent."""
        if self._collective is not None:
            self._collective.close()
        for sock in self.peers.values():
            sock.close()
        self._close_memory()

    def _native(self, most_floats: int, spin_us: float, limit_s: float) -> NativeCollective:
        collective = NativeCollective(
            self.rank,
            self.size,
            self.memory_fd,
            self.peers,
            most_floats=most_floats,
            spin_us=spin_us,
            limit_s=limit_s,
        )
        self._close_memory()
        return collective

    def _close_memory(self) -> None:
        if self.memory_fd is not None:
            os.close(self.memory_fd)
            self.memory_fd = None


def can_native() -> bool:
    """Whether this machine has the compiled transports, compiling them if need be."""
    try:
        library()
    except KernelsUnavailable:
        return False
    return True


def most_floats(settings: WorkerSettings) -> int:
    """Floats that may be in flight at once: the widest thing summed, for all tokens of a step, twice.

    Raises ValueError for a model that cannot be computed, or not by so many ranks: before any is started.
    """
    config = None if settings.mock else _config(Path(settings.model_dir) / "config.json", settings)
    if config is None:
        return _LEAST_FLOATS
    plan_shards(config, settings.tp)
    return max(_LEAST_FLOATS, 2 * config.hidden * settings.max_step_tokens)


def _config(path: Path, settings: WorkerSettings) -> ModelConfig | None:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # whoever loads the model says what is wrong with the folder
    return parse_config(raw, str(path), settings.max_len or None) if isinstance(raw, dict) else None
