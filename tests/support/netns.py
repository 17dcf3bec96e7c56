"""Network namespaces of this machine joined by links of limited bandwidth, for as long as a `with` lasts.

Needs root and `ip` and `tc`. Every name carries this process's id; what is made is removed, also on errors.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BURST = "128kb"
"""What may leave at once at full speed: little against a message, but more than the largest packet that the
system hands over whole, which would be cut up and timed piece by piece: that takes more of a core than
sending it."""
_QUEUE = "60ms"
"""How long a packet may wait before it is dropped: more than senders have in flight."""


def unavailable() -> str | None:
    """Why namespaces cannot be had here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"{' and '.join(missing)} not installed (apt: iproute2)" if missing else None


@dataclass(frozen=True)
class Namespace:
    name: str
    address: str
    """Its IPv4 address towards all others."""

    def command(self, *command: str, core: int | None = None) -> list[str]:
        """`command` as run inside, on one core if given."""
        pinned = [] if core is None else ["taskset", "-c", str(core)]
        return ["ip", "netns", "exec", self.name, *pinned, *command]


@contextlib.contextmanager
def islands(sizes: Sequence[int], inside: str, between: str | None = None) -> Iterator[list[Namespace]]:
    """Namespaces in islands of `sizes`, all in one list.

    Every namespace sends at most `inside` (a rate as `tc` writes it, "1gbit") and its island sends at most
    `between` to the others.
    """
    tag = f"h{os.getpid() % 100_000}"
    made: list[str] = []
    try:
        hub = _add_namespace(f"{tag}-hub", made)
        _run("ip", "-n", hub, "link", "add", "trunk", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "trunk", "up")
        spaces: list[Namespace] = []
        for number, size in enumerate(sizes):
            bridge = f"island{number}"
            _run("ip", "-n", hub, "link", "add", bridge, "type", "bridge")
            _run("ip", "-n", hub, "link", "set", bridge, "up")
            ends = f"up{number}", f"down{number}"
            _run("ip", "-n", hub, "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for end, master in zip(ends, (bridge, "trunk")):
                _run("ip", "-n", hub, "link", "set", end, "master", master, "up")
            if between is not None:
                _limit(hub, ends[0], between)
            for _ in range(size):
                spaces.append(_join(tag, hub, bridge, len(spaces), inside, made))
        yield spaces
    finally:
        for name in reversed(made):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@contextlib.contextmanager
def pair(rate: str) -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces joined directly; each sends at most `rate`."""
    tag = f"h{os.getpid() % 100_000}"
    made: list[str] = []
    try:
        names = [_add_namespace(f"{tag}-{side}", made) for side in "ab"]
        _run(
            "ip",
            "-n",
            names[0],
            "link",
            "add",
            "eth",
            "type",
            "veth",
            "peer",
            "name",
            "eth",
            "netns",
            names[1],
        )
        for number, name in enumerate(names):
            _bring_up(name, f"10.77.0.{number + 1}/24", rate)
        yield Namespace(names[0], "10.77.0.1"), Namespace(names[1], "10.77.0.2")
    finally:
        for name in reversed(made):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _join(tag: str, hub: str, bridge: str, number: int, rate: str, made: list[str]) -> Namespace:
    name, port = _add_namespace(f"{tag}-{number}", made), f"port{number}"
    address = f"10.77.0.{number + 1}"
    _run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth", "netns", name)
    _run("ip", "-n", hub, "link", "set", port, "master", bridge, "up")
    _bring_up(name, f"{address}/24", rate)
    return Namespace(name, address)


def _bring_up(name: str, address: str, rate: str) -> None:
    _run("ip", "-n", name, "link", "set", "lo", "up")
    _run("ip", "-n", name, "address", "add", address, "dev", "eth")
    _run("ip", "-n", name, "link", "set", "eth", "up")
    _limit(name, "eth", rate)


def _limit(namespace: str, device: str, rate: str) -> None:
    limit = ("tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE)
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *limit)


def _add_namespace(name: str, made: list[str]) -> str:
    _run("ip", "netns", "add", name)
    made.append(name)
    return name


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
