"""Where ranks of several nodes meet: doors that let in who knows the secret, and the way to them."""

import contextlib
import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Callable

import structlog

from services.worker.group.handshake import Caller, NotOfTheGroup, Purpose, examine, introduce
from shared.runtime.settings import CannotStart

MOST_AT_ONCE = 64
"""Callers that are examined at the same time; who comes on top is turned away at once."""

_LOST_AFTER_MS = 5000
_RETRY_S = 0.2
_NEWS_EVERY_S = 10.0


class Door:
    """Listens; `admit(caller, sock)` is called from a thread for each caller that has proved itself.

    Whoever has not is turned away, and said so in the log; what `admit` raises of `NotOfTheGroup` likewise.
    """

    def __init__(
        self, listener: socket.socket, secret: str, admit: Callable[[Caller, socket.socket], None]
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._admit = admit
        self._inside: set[threading.Thread] = set()
        self._unproved: set[socket.socket] = set()
        # callers at the door, each in a thread of its own, and the connections of those not yet believed
        self._changing = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="rendezvous", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Nobody is let in any more, and who is under examination is turned away. Idempotent."""
        with contextlib.suppress(OSError):
            # Closing alone would not wake the thread.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._changing:
            inside = list(self._inside)
            for sock in self._unproved:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in inside:
            thread.join()

    def _listen(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    time.sleep(_RETRY_S)
                    continue
                return
            thread = threading.Thread(
                target=self._examine, args=(sock, address[0]), name="rendezvous", daemon=True
            )
            with self._changing:
                if len(self._inside) >= MOST_AT_ONCE:
                    sock.close()
                    continue
                self._inside.add(thread)
                self._unproved.add(sock)
                thread.start()

    def _examine(self, sock: socket.socket, host: str) -> None:
        try:
            keep_watch(sock)
            caller = examine(sock, self._secret)
            with self._changing:
                self._unproved.discard(sock)
            self._admit(caller, sock)
        except (OSError, NotOfTheGroup) as error:
            structlog.get_logger().warning("turned away at the rendezvous", host=host, why=str(error))
            with self._changing:
                self._unproved.discard(sock)
                sock.close()
        finally:
            with self._changing:
                self._inside.discard(threading.current_thread())


def open_door(host: str, port: int, secret: str, admit: Callable[[Caller, socket.socket], None]) -> Door:
    """Raises `CannotStart` if nobody can listen there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        bound = listener.getsockname()[0]
        if ipaddress.ip_address(bound.partition("%")[0]).is_loopback and host not in (bound, "localhost"):
            structlog.get_logger().warning(
                "the rendezvous is an address that other machines cannot reach", host=host, address=bound
            )
    except OSError as error:
        raise CannotStart(
            f"rendezvous {host}:{port}: nobody can listen there ({error.strerror or error}); name an address "
            "of node 0 and a free port"
        ) from error
    return Door(listener, secret, admit)


def connect(
    address: tuple[str, int], secret: str, caller: Caller, whom: str, limit_s: float
) -> socket.socket:
    """A connection to `whom`, proved on both ends; tried again until it is there.

    Raises `CannotStart`: after `limit_s`, or at once if the secrets differ.
    """
    began = news_at = time.monotonic()
    while True:
        try:
            sock = socket.create_connection(
                address, timeout=max(0.1, min(5.0, began + limit_s - time.monotonic()))
            )
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
        else:
            try:
                keep_watch(sock)
                introduce(sock, secret, caller)
                sock.settimeout(None)
                return sock
            except CannotStart:
                sock.close()
                raise
            except OSError as error:
                sock.close()
                why = str(error)
        now = time.monotonic()
        if now > began + limit_s:
            raise CannotStart(
                f"rank {caller.rank} cannot reach {whom} at {address[0]}:{address[1]} within {limit_s:.0f} s "
                f"({why}): see that it runs and that no firewall is in between"
            )
        if now > news_at + _NEWS_EVERY_S:
            news_at = now
            structlog.get_logger().info(
                "waiting", whom=whom, at=f"{address[0]}:{address[1]}", waited_s=round(now - began), why=why
            )
        time.sleep(_RETRY_S)


def keep_watch(sock: socket.socket) -> None:
    """Have the system notice within seconds that the machine at the other end is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", _LOST_AFTER_MS),
    ):
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Peers:
    """Data connections of one rank to all others: made to lower ranks, taken from higher ones."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._taken: dict[int, socket.socket] = {}
        self._changed = threading.Condition()

    def take(self, caller: Caller, sock: socket.socket) -> None:
        """A higher rank has connected. Raises `NotOfTheGroup`."""
        with self._changed:
            if not self._rank < caller.rank < self._size or caller.rank in self._taken:
                raise NotOfTheGroup(f"rank {caller.rank} is not expected here, or is here already")
            sock.settimeout(None)
            self._taken[caller.rank] = sock
            self._changed.notify_all()

    def close(self) -> None:
        """Close what has connected."""
        with self._changed:
            for sock in self._taken.values():
                sock.close()

    def connected(self, addresses: list[str], secret: str, limit_s: float) -> dict[int, socket.socket]:
        """The connections to all other ranks, of which those below are made here. Raises `CannotStart`."""
        deadline = time.monotonic() + limit_s
        caller = Caller(Purpose.DATA, self._rank)
        for rank in range(self._rank):
            host, _, port = addresses[rank].rpartition(":")
            sock = connect(
                (host, int(port)), secret, caller, f"rank {rank}", max(1.0, deadline - time.monotonic())
            )
            with self._changed:
                self._taken[rank] = sock
        with self._changed:
            while missing := [
                rank for rank in range(self._size) if rank not in self._taken | {self._rank: None}
            ]:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise CannotStart(
                        f"rank(s) {missing} have not connected to rank {self._rank} within {limit_s:.0f} s: "
                        "ranks connect to each other directly, on ports that the system picks"
                    )
                self._changed.wait(left_s)
            return dict(self._taken)
