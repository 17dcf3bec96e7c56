"""What threads of a worker do with a second tier: ask, store, fetch, over one blocking connection."""

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256

from shared.tier import frames
from shared.tier.frames import NO_LINK, BadTierFrame, Hello, Link
from shared.wire import TierOffer


class TierDown(ConnectionError):
    """The tier cannot be used now: away, too slow, refused us, or spoke nonsense. What was asked may or may
    not have happened. The next call connects anew."""


class TierClient:
    """The blocks of one rank in the tier that made `offer`. For one thread; connects when first used.

    Every answer, and of a fetch every single block, must be there within `timeout_s`; a fetch as a whole is
    bounded by who iterates it.
    """

    def __init__(
        self, offer: TierOffer, model: str, part: int, parts: int, block_bytes: int, timeout_s: float = 5.0
    ) -> None:
        self._offer = offer
        self._hello = Hello(model, part, parts, block_bytes)
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self.corrupt = 0
        """Blocks that arrived other than their digest says."""

    @property
    def block_bytes(self) -> int:
        return self._hello.block_bytes

    def have(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which of these the tier holds. Asking counts as use: they stay longer. Raises `TierDown`."""
        there: list[bool] = []
        for some in _portions(hashes):
            with self._asking() as deadline:
                self._send(deadline, frames.have_request(some))
                there += frames.read_have(self._receive(len(some), deadline))
        return there

    def put(self, block_hash: bytes, data: memoryview, digest: bytes, link: Link = NO_LINK) -> bool:
        """Store a block; `digest` is the SHA-256 of `data`. Whether it is there now. Raises `TierDown`."""
        if data.nbytes != self.block_bytes:
            raise ValueError(f"a block of {data.nbytes} bytes where {self.block_bytes} are announced")
        with self._asking() as deadline:
            head = frames.put_request(block_hash, digest, self.block_bytes, link)
            self._send(deadline, head, data.cast("B"))
            return frames.read_put(self._receive(1, deadline)).kept

    def get(self, hashes: Sequence[bytes], into: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Blocks of a chain, in order, ending at the first that is missing or wrong.

        Yields the index in `hashes` and the verified content, which lies in `into` (room for one block or
        more, used in turn): it stays as it is until as many further blocks were taken. The tier waits only a
        few seconds for who does not take them. Raises `TierDown`. Leaving early closes the connection.
        """
        room = into.cast("B")
        places = len(room) // self.block_bytes
        if not places:
            raise ValueError(f"room of {len(room)} bytes for blocks of {self.block_bytes}")
        first = 0
        for some in _portions(hashes):
            with self._asking() as deadline:
                self._send(deadline, frames.get_request(some))
                for index in range(first, first + len(some)):
                    deadline = time.monotonic() + self._timeout_s
                    digest = frames.read_block_head(self._receive(frames.BLOCK_BYTES, deadline))
                    if digest is None:
                        return
                    start = index % places * self.block_bytes
                    content = room[start : start + self.block_bytes]
                    self._receive_into(content, deadline)
                    if sha256(content).digest() != digest:
                        self.corrupt += 1
                        self.close()
                        return
                    yield index, content
            first += len(some)

    def pin(self, lease: bytes, hashes: Sequence[bytes], lease_s: float) -> int:
        """Keep these from leaving the tier for `lease_s` seconds: how many of them, from the first, it could.
        The same `lease` (16 bytes) again replaces what it pinned before. Raises `TierDown`."""
        with self._asking() as deadline:
            self._send(deadline, frames.pin_request(lease, lease_s, hashes))
            return frames.read_count(self._receive(frames.COUNT_BYTES, deadline))

    def release(self, lease: bytes) -> None:
        """End a lease before its time. Raises `TierDown`."""
        with self._asking() as deadline:
            self._send(deadline, frames.release_request(lease))
            self._receive(frames.COUNT_BYTES, deadline)

    def close(self) -> None:
        """Idempotent. Another thread may call it to end what hangs."""
        open_one, self._socket = self._socket, None
        if open_one is not None:
            # Closing alone would leave a thread that receives where it is.
            with contextlib.suppress(OSError):
                open_one.shutdown(socket.SHUT_RDWR)
            open_one.close()

    @contextlib.contextmanager
    def _asking(self) -> Iterator[float]:
        """Connected; whatever goes wrong in between (or who leaves early) ends the connection, as answers
        under way would be taken for those of the next request."""
        done = False
        try:
            deadline = time.monotonic() + self._timeout_s
            if self._socket is None:
                self._connect(deadline)
            yield deadline
            done = True
        except (OSError, BadTierFrame) as error:
            where = f"{self._offer.instance} at {self._offer.host}:{self._offer.port}"
            raise TierDown(f"second tier of {where}: {error}") from error
        finally:
            if not done:
                self.close()

    def _connect(self, deadline: float) -> None:
        offer = self._offer
        self._socket = socket.create_connection((offer.host, offer.port), self._timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(frames.NONCE_BYTES)
        theirs = frames.read_greeting(self._receive(frames.GREETING_BYTES, deadline))
        self._send(deadline, frames.opening(offer.secret, theirs, nonce) + frames.hello(self._hello))
        frames.check_tier(self._receive(frames.PROOF_BYTES, deadline), offer.secret, theirs, nonce)
        welcome, length = frames.read_welcome(self._receive(frames.WELCOME_BYTES, deadline))
        text = self._receive(length, deadline).decode(errors="replace")
        if not welcome:
            raise BadTierFrame(f"it refused us: {text}")

    def _send(self, deadline: float, head: bytes, data: memoryview | None = None) -> None:
        parts = [memoryview(head)] if data is None else [memoryview(head), data]
        while parts:
            sent = self._within(deadline).sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def _receive(self, length: int, deadline: float) -> bytes:
        raw = bytearray(length)
        self._receive_into(memoryview(raw), deadline)
        return bytes(raw)

    def _receive_into(self, room: memoryview, deadline: float) -> None:
        while len(room):
            got = self._within(deadline).recv_into(room)
            if not got:
                raise ConnectionError("it closed the connection")
            room = room[got:]

    def _within(self, deadline: float) -> socket.socket:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no answer within {self._timeout_s} s")
        if self._socket is None:
            raise ConnectionError("closed")
        self._socket.settimeout(left)
        return self._socket


def _portions(hashes: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(hashes), frames.MAX_HASHES):
        yield hashes[start : start + frames.MAX_HASHES]
