"""A collective in Python over sockets, for mocks and for machines without a compiler. Slow, and without room
for native passes."""

import select
import socket
import threading
import time
from dataclasses import dataclass, field

import numpy as np

from services.worker.collective.abi import Exchange
from services.worker.collective.port import BYTES, F32, GroupLost

_HEAD = 12
_SLICE_MS = 50
"""How often whoever waits looks whether the group was aborted."""


@dataclass
class _Peer:
    """What is still to be sent to a peer and to be received from it, of one message."""

    sock: socket.socket
    out: memoryview = field(default_factory=lambda: memoryview(b""))
    got: bytearray = field(default_factory=bytearray)


class PlainCollective:
    """`Collective` over one connected stream socket a peer, which it owns: all send all others their part.

    `limit_s`: a rank that is alive but does not come for so long is lost.
    """

    def __init__(self, rank: int, size: int, peers: dict[int, socket.socket], limit_s: float) -> None:
        self.rank, self.size = rank, size
        self._peers = {peer: _Peer(sock) for peer, sock in peers.items()}
        self._limit_s = limit_s
        self._number = 0
        self._lost = ""
        self._lock = threading.Lock()
        for sock in peers.values():
            sock.setblocking(False)

    def set_limit(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def exchange(self) -> Exchange | None:
        return None

    def all_reduce(self, values: F32) -> None:
        parts = self.gather(values.reshape(-1).view(np.uint8)).view(np.float32)
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        values.reshape(-1)[:] = total

    def gather(self, mine: BYTES) -> BYTES:
        self.check()
        rows = np.empty((self.size, len(mine)), np.uint8)
        rows[self.rank] = mine
        self._number += 1
        head = self._number.to_bytes(4, "little") + len(mine).to_bytes(8, "little")
        message = head + mine.tobytes()
        for peer in self._peers.values():
            peer.out = memoryview(message)
        self._swap(len(message))
        for number, peer in self._peers.items():
            if peer.got[:_HEAD] != head:
                self._lose(f"rank {number} takes part in another collective than this rank")
            rows[number] = np.frombuffer(peer.got, np.uint8, len(mine), _HEAD)
            del peer.got[: len(message)]
        return rows

    def check(self) -> None:
        if self._lost:
            raise GroupLost(self._lost)

    def abort(self, reason: str) -> None:
        with self._lock:
            self._lost = self._lost or reason

    def close(self) -> None:
        self.abort("this rank has left the group")
        for peer in self._peers.values():
            peer.sock.close()

    def _lose(self, reason: str) -> None:
        self.abort(reason)
        raise GroupLost(self._lost)

    def _swap(self, size: int) -> None:
        """Until every peer has our message and we have `size` bytes of each."""
        deadline = time.monotonic() + self._limit_s
        while True:
            waiting = select.poll()
            by_fd = {}
            for number, peer in self._peers.items():
                self._advance(number, peer, size)
                events = (select.POLLIN if len(peer.got) < size else 0) | (select.POLLOUT if peer.out else 0)
                if events:
                    waiting.register(peer.sock, events)
                    by_fd[peer.sock.fileno()] = number
            if not by_fd:
                return
            waiting.poll(_SLICE_MS)
            self.check()
            if time.monotonic() > deadline:
                self._lose(f"rank {min(by_fd.values())} has not come for {self._limit_s:g} s")

    def _advance(self, number: int, peer: _Peer, size: int) -> None:
        try:
            while peer.out:
                peer.out = peer.out[peer.sock.send(peer.out) :]
        except BlockingIOError:
            pass
        except OSError:
            self._lose(f"rank {number} has ended")
        try:
            while (missing := size - len(peer.got)) > 0:
                part = peer.sock.recv(min(missing, 1 << 20))
                if not part:
                    self._lose(f"rank {number} has ended")
                peer.got += part
        except BlockingIOError:
            pass
        except OSError:
            self._lose(f"rank {number} has ended")
