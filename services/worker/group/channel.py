"""Messages over one connected stream socket, each behind its length: how rank 0 commands another rank."""

import select
import socket
import threading
import time
from typing import Any

from services.worker.group.messages import Message, encode
from shared.wire.base import BadFrame, Codec

MOST_BYTES = 256 << 20
"""A message larger than this is none of ours."""

STRANGERS_BYTES = 64 << 10
"""A message of whom we do not know yet."""

SEND_LIMIT_S = 20.0
"""A rank that takes nothing for so long is lost."""

_BUFFER_BYTES = 4 << 20
_HEAD = 4


class ChannelLost(ConnectionError):
    """The other end is gone, does not take anything, or does not speak our language."""


class Channel:
    """Several threads may send while one receives. Closing the socket is losing the other end."""

    def __init__(self, sock: socket.socket, codec: Codec, most_bytes: int = MOST_BYTES) -> None:
        """`codec` reads what the other end sends."""
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self.sock = sock
        self.most_bytes = most_bytes
        self._codec = codec
        self._received = bytearray()
        self._sending = threading.Lock()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, body: bytes) -> None:
        """Returns when the system has taken all of it: at once, unless the other end is far behind.

        Raises `ChannelLost`, also after `SEND_LIMIT_S`.
        """
        with self._sending:
            self._send_all(memoryview(len(body).to_bytes(_HEAD, "little") + body))

    def _send_all(self, left: memoryview) -> None:
        deadline = 0.0
        while left:
            try:
                left = left[self.sock.send(left) :]
            except BlockingIOError:
                now = time.monotonic()
                deadline = deadline or now + SEND_LIMIT_S
                if now >= deadline:
                    raise ChannelLost(f"it has taken nothing for {SEND_LIMIT_S:.0f} s") from None
                self._writable.poll(100)
            except OSError as error:
                raise ChannelLost(f"its connection ended ({error.strerror})") from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message. Raises `ChannelLost`, and TimeoutError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self.received()) is None:
            wait_s = None if deadline is None else deadline - time.monotonic()
            if wait_s is not None and wait_s <= 0:
                raise TimeoutError
            self._readable.poll(None if wait_s is None else max(1, int(wait_s * 1000)))
        return message

    def received(self) -> Any:
        """The next message if all of it is there, else None. Raises `ChannelLost`."""
        while (message := self._taken()) is None:
            try:
                part = self.sock.recv(1 << 16)
            except BlockingIOError:
                return None
            except OSError as error:
                raise ChannelLost(f"its connection ended ({error.strerror})") from error
            if not part:
                raise ChannelLost("its connection ended")
            self._received += part
        return message

    def close(self) -> None:
        self.sock.close()

    def _taken(self) -> Any:
        buffer = self._received
        if len(buffer) < _HEAD:
            return None
        size = int.from_bytes(buffer[:_HEAD], "little")
        if size > self.most_bytes:
            raise ChannelLost(f"it sent a message of {size} bytes, {self.most_bytes} are allowed")
        if len(buffer) < _HEAD + size:
            return None
        body = bytes(buffer[_HEAD : _HEAD + size])
        del buffer[: _HEAD + size]
        try:
            return self._codec.decode(body)
        except BadFrame as error:
            raise ChannelLost(f"it sent something else than a message: {error.reason}") from error
