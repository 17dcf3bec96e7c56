"""How two ends of a TCP connection prove to each other that they know the group's secret.

    connector → acceptor   MAGIC, purpose, rank, 32 random bytes c
    acceptor → connector   32 random bytes a, HMAC-SHA256(secret, "acceptor" opening a)
    connector → acceptor   HMAC-SHA256(secret, "connector" opening a)

`opening` is all that the connector sent first. Nothing more is read of whoever sends something else, and
nobody gets longer than `LIMIT_S`. What follows is neither encrypted nor signed: the network between nodes has
to be trusted.
"""

import hmac
import os
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

from shared.runtime.settings import CannotStart

MAGIC = b"HORTGRP1"
LIMIT_S = 5.0

_NONCE = 32
_OPENING = struct.Struct(f"<{len(MAGIC)}sBH{_NONCE}s")


class Purpose(IntEnum):
    CONTROL = 0
    """Rank 0 will command the connector."""
    DATA = 1
    """Parts of sums go both ways."""


@dataclass(frozen=True)
class Caller:
    """Who has connected, proved."""

    purpose: Purpose
    rank: int


class NotOfTheGroup(ConnectionError):
    """The other end is none of the group; says how that showed."""


class OtherSecret(CannotStart):
    """The acceptor is a rank, but of a group with another secret."""


def introduce(sock: socket.socket, secret: str, caller: Caller) -> None:
    """The connector's part. Raises `OtherSecret`, `NotOfTheGroup`, OSError."""
    opening = _OPENING.pack(MAGIC, caller.purpose, caller.rank, os.urandom(_NONCE))
    deadline = time.monotonic() + LIMIT_S
    sock.settimeout(LIMIT_S)
    sock.sendall(opening)
    answer = _exactly(sock, _NONCE + 32, deadline)
    nonce, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"acceptor", opening, nonce)):
        raise OtherSecret(
            "group_secret is not the one of the rank that answers there: set the same on all nodes"
        )
    sock.sendall(_proof(secret, b"connector", opening, nonce))


def examine(sock: socket.socket, secret: str) -> Caller:
    """The acceptor's part. Raises `NotOfTheGroup`, OSError."""
    deadline = time.monotonic() + LIMIT_S
    opening = _exactly(sock, len(MAGIC), deadline)
    if opening != MAGIC:
        raise NotOfTheGroup("it does not speak as ranks do")
    opening += _exactly(sock, _OPENING.size - len(MAGIC), deadline)
    _, purpose, rank, _ = _OPENING.unpack(opening)
    nonce = os.urandom(_NONCE)
    sock.sendall(nonce + _proof(secret, b"acceptor", opening, nonce))
    try:
        proof = _exactly(sock, 32, deadline)
    except NotOfTheGroup:
        raise NotOfTheGroup(f"it says it is rank {rank}, but has another group_secret") from None
    if not hmac.compare_digest(proof, _proof(secret, b"connector", opening, nonce)):
        raise NotOfTheGroup(f"it says it is rank {rank}, but does not know the group_secret")
    try:
        return Caller(Purpose(purpose), rank)
    except ValueError:
        raise NotOfTheGroup(f"it connects for purpose {purpose}, which this version does not know") from None


def _proof(secret: str, side: bytes, opening: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(), side + opening + nonce, "sha256")


def _exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    got = b""
    while len(got) < count:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise NotOfTheGroup("it was too slow")
        sock.settimeout(left_s)
        try:
            part = sock.recv(count - len(got))
        except TimeoutError:
            raise NotOfTheGroup("it was too slow") from None
        if not part:
            raise NotOfTheGroup("it closed the connection")
        got += part
    return got
