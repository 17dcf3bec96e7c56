"""The tier's TCP server: one task for each connection, which trusts nobody before the secret is proven."""

import asyncio
import contextlib
import secrets
import socket
from dataclasses import dataclass

import structlog

from services.kvstore.tier.arena import cost
from services.kvstore.tier.entries import Space
from services.kvstore.tier.store import TierStore
from shared.tier import frames
from shared.tier.frames import BadTierFrame, Hello, Op, Request

log = structlog.get_logger()

HELLO_S = 5.0
"""Until then a connection has to have proven the secret and said whose it is."""
MOVE_S = 10.0
"""A block or a request must have arrived, or been taken, within this; slower peers are let go."""
MAX_CONNECTIONS = 512
MAX_STRANGERS = 64
"""Connections that have not proven the secret yet."""
KEEPALIVE_S = 15
"""A peer that vanished without a word is missed after three times this."""
_WASTE = memoryview(bytearray(256 << 10))
# where bytes go that nobody wants; shared, as it is never read


@dataclass
class ServerCounts:
    connections: int = 0
    refused: int = 0
    """Turned away: too many, no secret, or no protocol."""
    requests: int = 0


class TierServer:
    """Serves `store` until `close`. `port` 0: any free one; `port` says which once started."""

    def __init__(self, store: TierStore, host: str, port: int, secret: str) -> None:
        self.counts = ServerCounts()
        self.port = port
        self._store = store
        self._host = host
        self._secret = secret
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers = 0

    @property
    def connected(self) -> int:
        return len(self._connections)

    async def start(self) -> None:
        """Raises `OSError` if the address cannot be had."""
        found = await asyncio.get_running_loop().getaddrinfo(self._host, self.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        self._socket = socket.socket(family, kind, protocol)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(128)
            self._socket.setblocking(False)
        except OSError:
            self._socket.close()
            raise
        self.port = self._socket.getsockname()[1]
        self._accepting = asyncio.ensure_future(self._accept(self._socket))

    async def close(self) -> None:
        if self._accepting is not None and self._socket is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
            self._socket.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # out of descriptors, for example
                log.warning("second tier cannot accept", error=str(error))
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) >= MAX_CONNECTIONS or self._strangers >= MAX_STRANGERS:
                self.counts.refused += 1
                connection.close()
                continue
            self.counts.connections += 1
            task = asyncio.ensure_future(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        peer = _Peer(connection)
        try:
            peer.tune()
            said = await self._meet(peer)
            while said is not None:
                head = await peer.receive(frames.REQUEST_BYTES, None)
                request = frames.read_request(head, said.block_bytes)
                body = await peer.receive(request.body_bytes, MOVE_S)
                self.counts.requests += 1
                await self._answer(peer, said, request, body)
                # What never waits for its socket would never let anybody else work.
                await asyncio.sleep(0)
        except BadTierFrame as error:
            self.counts.refused += 1
            log.warning("second tier ends a connection", peer=peer.name, reason=str(error))
        except (TimeoutError, OSError, EOFError) as error:
            log.debug("connection to the second tier is over", peer=peer.name, reason=str(error))
        finally:
            connection.close()

    async def _meet(self, peer: "_Peer") -> Hello | None:
        """Whose connection it is; None: refused politely."""
        self._strangers += 1
        try:
            async with asyncio.timeout(HELLO_S):
                nonce = secrets.token_bytes(frames.NONCE_BYTES)
                await peer.send(frames.greeting(nonce))
                theirs = frames.check_opening(
                    await peer.receive(frames.OPENING_BYTES, HELLO_S), self._secret, nonce
                )
                head = await peer.receive(frames.HELLO_BYTES, HELLO_S)
                said = frames.read_hello(head, await peer.receive(frames.model_bytes(head), HELLO_S))
                refusal = self._refusal(said)
                proof = frames.prove(self._secret, b"tier", nonce, theirs)
                await peer.send(proof + frames.welcome(refusal))
        finally:
            self._strangers -= 1
        return None if refusal else said

    def _refusal(self, said: Hello) -> str:
        budget = self._store.book.arena.budget
        if cost(said.block_bytes) > budget:
            return f"a block of {said.block_bytes} bytes is larger than the tier's memory of {budget}"
        return ""

    async def _answer(self, peer: "_Peer", said: Hello, request: Request, body: bytes) -> None:
        store, space = self._store, Space(said.model, said.part, said.parts)
        match request.op:
            case Op.HAVE:
                await peer.send(frames.have_answer(store.have(space, frames.split_hashes(body))))
            case Op.PUT:
                block_hash, digest, link = frames.read_put_head(body)

                async def receive(room: memoryview | None) -> None:
                    if room is None:
                        await peer.throw_away(said.block_bytes)
                    else:
                        await peer.receive_into(room, MOVE_S)

                ended = await store.put(space, block_hash, digest, said.block_bytes, receive, link)
                await peer.send(frames.put_answer(ended))
            case Op.GET:
                await self._send_blocks(peer, said, space, frames.split_hashes(body))
            case Op.PIN:
                lease, lease_s, hashes = frames.read_pin(body)
                await peer.send(frames.count_answer(store.pin(space, lease, hashes, lease_s)))
            case Op.RELEASE:
                store.book.release(body)
                await peer.send(frames.count_answer(0))

    async def _send_blocks(self, peer: "_Peer", said: Hello, space: Space, hashes: list[bytes]) -> None:
        sent: list[bytes] = []
        for block_hash in hashes:
            async with self._store.reading(space, block_hash) as entry:
                if entry is None or entry.block is None or entry.size != said.block_bytes:
                    await peer.send(frames.block_head(None))
                    break
                await peer.send(frames.block_head(entry.digest), entry.block.view)
            sent.append(block_hash)
            await asyncio.sleep(0)
        # The first of the chain last: it is the one to keep longest.
        self._store.have(space, sent)


class _Peer:
    """A connected socket in straight lines; raises `EOFError` when the peer has closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            self.name = str(connection.getpeername()[:2])

    name = "gone"

    def tune(self) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)

    async def receive(self, length: int, within_s: float | None) -> bytes:
        raw = bytearray(length)
        await self.receive_into(memoryview(raw), within_s)
        return bytes(raw)

    async def receive_into(self, room: memoryview, within_s: float | None) -> None:
        room = room[self._take(room) :]
        if len(room):
            async with asyncio.timeout(within_s):
                while len(room):
                    got = await self._loop.sock_recv_into(self._socket, room)
                    if not got:
                        raise EOFError("closed by the peer")
                    room = room[got:]

    def _take(self, room: memoryview) -> int:
        """What is there already: asking the loop to wait for it takes a tenth of a millisecond."""
        taken = 0
        with contextlib.suppress(BlockingIOError):
            while taken < len(room):
                got = self._socket.recv_into(room[taken:])
                if not got:
                    raise EOFError("closed by the peer")
                taken += got
        return taken

    async def throw_away(self, length: int) -> None:
        async with asyncio.timeout(MOVE_S):
            while length:
                got = await self._loop.sock_recv_into(self._socket, _WASTE[: min(length, len(_WASTE))])
                if not got:
                    raise EOFError("closed by the peer")
                length -= got

    async def send(self, head: bytes, data: memoryview | None = None) -> None:
        parts = [memoryview(head)] if data is None else [memoryview(head), data]
        try:
            # One call for both: on its own the head would travel, and wake the peer, alone.
            sent = self._socket.sendmsg(parts)
        except BlockingIOError:
            sent = 0
        for part in parts:
            if sent < len(part):
                async with asyncio.timeout(MOVE_S):
                    await self._loop.sock_sendall(self._socket, part[sent:])
            sent = max(0, sent - len(part))
