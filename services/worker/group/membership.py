"""What a process has of its group once it is formed."""

import json
import socket
from dataclasses import dataclass, field
from pathlib import Path

from services.worker.collective.port import Collective
from services.worker.group.messages import Welcome
from services.worker.group.plain import PlainCollective
from services.worker.settings import WorkerSettings

LIMIT_S = 20.0
"""A rank that is alive but does not come to a collective for so long is lost."""

_LEAST_FLOATS = 1 << 18


@dataclass
class Membership:
    """One rank's place, and its connections to the others' ranks, which the collective takes over."""

    rank: int
    size: int
    peers: dict[int, socket.socket] = field(default_factory=dict)
    """A connected stream socket for each other rank."""
    memory_fd: int | None = None
    """Memory that all ranks share, if all are on one host."""

    def collective(self, welcome: Welcome) -> Collective:
        return PlainCollective(self.rank, self.size, self.peers, welcome.limit_s)


def can_native() -> bool:
    """Whether this machine has the compiled transports, compiling them if need be."""
    return False


def most_floats(settings: WorkerSettings) -> int:
    """Floats that may be in flight at once: the widest thing summed, for all tokens of a step, twice."""
    hidden = 0
    if settings.model_dir:
        try:
            hidden = int(json.loads((Path(settings.model_dir) / "config.json").read_text())["hidden_size"])
        except (OSError, ValueError, KeyError, TypeError):
            hidden = 0  # whoever loads the model says what is wrong with it
    return max(_LEAST_FLOATS, 2 * hidden * settings.max_step_tokens)


@dataclass
class Abort:
    """Frees whoever waits in the collective, also if the collective is made only after the loss."""

    reason: str = ""
    _collective: Collective | None = None

    def __call__(self, reason: str) -> None:
        self.reason = self.reason or reason
        if self._collective is not None:
            self._collective.abort(self.reason)

    def of(self, collective: Collective) -> Collective:
        self._collective = collective
        if self.reason:
            collective.abort(self.reason)
        return collective

    def close(self) -> None:
        """Close the collective, if there is one."""
        if self._collective is not None:
            self._collective.close()
