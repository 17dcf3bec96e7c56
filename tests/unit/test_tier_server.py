"""Hostile and broken peers of the second tier's server: they get nothing, and disturb nobody."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator
from hashlib import sha256

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.kvstore.tier import server as shell
from services.kvstore.tier.arena import cost
from services.kvstore.tier.entries import Counts
from shared.tier import frames
from shared.tier.client import TierClient
from shared.tier.frames import Hello, Op
from tests.support.tier import SECRET, RunningTier, block_hash, content, running_tier

SIZE = 4096


@pytest.fixture(scope="module")
def tier() -> Iterator[RunningTier]:
    with running_tier(memory=64 * cost(SIZE)) as running:
        yield running


@pytest.fixture
def good(tier: RunningTier) -> Iterator[TierClient]:
    """A client like any other, which must not notice anything."""
    client = TierClient(tier.offer, "m", 0, 1, SIZE, timeout_s=5.0)
    assert client.put(block_hash(1), memoryview(content(1)), sha256(content(1)).digest())
    yield client
    into = memoryview(bytearray(SIZE))
    assert [bytes(view) for _, view in client.get([block_hash(1)], into)] == [content(1)]
    client.close()


def connect(tier: RunningTier) -> socket.socket:
    return socket.create_connection(("127.0.0.1", tier.server.port), 5)


def receive(peer: socket.socket, length: int) -> bytes:
    """Less where the connection ends before."""
    raw = b""
    try:
        while len(raw) < length and (part := peer.recv(length - len(raw))):
            raw += part
    except ConnectionResetError:
        pass
    return raw


def meet(tier: RunningTier, hello: bytes, secret: str = SECRET) -> socket.socket:
    peer = connect(tier)
    nonce = frames.read_greeting(receive(peer, frames.GREETING_BYTES))
    peer.sendall(frames.opening(secret, nonce, b"n" * 32) + hello)
    return peer


def inside(tier: RunningTier, size: int = SIZE) -> socket.socket:
    peer = meet(tier, frames.hello(Hello("m", 0, 1, size)))
    receive(peer, frames.PROOF_BYTES + frames.WELCOME_BYTES)
    return peer


def say_no_more(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side may be gone already
        peer.shutdown(socket.SHUT_WR)


def is_closed(peer: socket.socket) -> bool:
    """Whatever was still under way, the end of it comes."""
    try:
        while peer.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_wrong_secret_learns_nothing_but_a_nonce(tier: RunningTier, good: TierClient) -> None:
    with meet(tier, frames.hello(Hello("m", 0, 1, SIZE)), "another secret") as peer:
        assert receive(peer, 1) == b""


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b" " * 100,
        b"\0" * 4096,
        b"\xff" * 4096,
        frames.MAGIC,
        frames.MAGIC + b"x" * 1000,
    ],
)
def test_who_does_not_speak_the_protocol_is_let_go(tier: RunningTier, good: TierClient, raw: bytes) -> None:
    with connect(tier) as peer:
        peer.sendall(raw)
        say_no_more(peer)
        assert is_closed(peer)


@pytest.mark.parametrize(
    "hello",
    [
        struct.pack("<HHQH", 0, 1, 0, 1) + b"m",
        struct.pack("<HHQH", 0, 1, 2**63, 1) + b"m",
        struct.pack("<HHQH", 0, 1, frames.MAX_BLOCK_BYTES + 1, 1) + b"m",
        struct.pack("<HHQH", 1, 1, SIZE, 1) + b"m",
        struct.pack("<HHQH", 0, 0, SIZE, 1) + b"m",
        struct.pack("<HHQH", 0, 65535, SIZE, 1) + b"m",
        struct.pack("<HHQH", 0, 1, SIZE, 0),
        struct.pack("<HHQH", 0, 1, SIZE, 65535) + b"m" * 65535,
        struct.pack("<HHQH", 0, 1, SIZE, 2) + b"\xff\xfe",
    ],
)
def test_a_hello_that_makes_no_sense_ends_the_connection(
    tier: RunningTier, good: TierClient, hello: bytes
) -> None:
    with meet(tier, hello) as peer:
        assert is_closed(peer)


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<BxHxxxxQ", 0, 1, 32),
        struct.pack("<BxHxxxxQ", 99, 1, 32),
        struct.pack("<BxHxxxxQ", Op.HAVE, 1, 31),
        struct.pack("<BxHxxxxQ", Op.GET, 1, 2**63),
        struct.pack("<BxHxxxxQ", Op.GET, 65535, 65535 * 32),
        struct.pack("<BxHxxxxQ", Op.PUT, 1, 64 + SIZE - 1),
        struct.pack("<BxHxxxxQ", Op.PUT, 1, 2**64 - 1),
        struct.pack("<BxHxxxxQ", Op.PIN, 0, 20) + bytes(16) + struct.pack("<I", 0),
        struct.pack("<BxHxxxxQ", Op.PIN, 0, 20) + bytes(16) + struct.pack("<I", 2**32 - 1),
        struct.pack("<BxHxxxxQ", Op.RELEASE, 0, 15),
    ],
)
def test_lengths_that_lie_end_the_connection_before_anything_is_read(
    tier: RunningTier, good: TierClient, head: bytes
) -> None:
    with inside(tier) as peer:
        peer.sendall(head)
        assert is_closed(peer)


def test_a_payload_that_ends_early_leaves_neither_a_block_nor_its_memory(
    tier: RunningTier, good: TierClient
) -> None:
    used = tier.call(lambda: tier.store.book.arena.used)
    with inside(tier) as peer:
        peer.sendall(frames.put_request(block_hash(7), bytes(32), SIZE) + content(7)[:-1])
        say_no_more(peer)
        assert receive(peer, 1) == b""
    assert good.have([block_hash(7)]) == [False]
    assert tier.call(lambda: tier.store.book.arena.used) == used


def test_a_digest_that_does_not_fit_is_told_and_the_connection_goes_on(
    tier: RunningTier, good: TierClient
) -> None:
    with inside(tier) as peer:
        peer.sendall(frames.put_request(block_hash(8), bytes(32), SIZE) + content(8))
        assert frames.read_put(receive(peer, 1)) is frames.Put.WRONG
        peer.sendall(frames.put_request(block_hash(8), sha256(content(8)).digest(), SIZE) + content(8))
        assert frames.read_put(receive(peer, 1)) is frames.Put.STORED


def test_half_open_and_slow_peers_are_let_go_in_time(
    tier: RunningTier, good: TierClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "HELLO_S", 0.05)
    with connect(tier) as silent:
        silent.settimeout(5)
        assert is_closed(silent)
    monkeypatch.undo()
    monkeypatch.setattr(shell, "MOVE_S", 0.05)
    used = tier.call(lambda: tier.store.book.arena.used)
    with inside(tier) as stuck:
        stuck.settimeout(5)
        stuck.sendall(frames.put_request(block_hash(9), bytes(32), SIZE) + b"x")
        assert is_closed(stuck)
    with inside(tier) as half:
        half.settimeout(5)
        half.sendall(frames.get_request([block_hash(1)])[:-1])
        assert is_closed(half)
    assert tier.call(lambda: tier.store.book.arena.used) == used


def test_a_reader_that_takes_nothing_holds_one_block_for_a_while_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 8 << 20
    monkeypatch.setattr(shell, "MOVE_S", 0.3)
    with running_tier(memory=4 * cost(size)) as tier:
        client = TierClient(tier.offer, "m", 0, 1, size)
        data = content(1, size)
        assert client.put(block_hash(1), memoryview(data), sha256(data).digest())
        with inside(tier, size) as lazy:
            lazy.sendall(frames.get_request([block_hash(1)] * 100))
            lazy.settimeout(5)
            lazy.recv(1)
            assert client.have([block_hash(1)]) == [True]  # nobody else waits for it
            while tier.call(lambda: sum(e.readers for e in tier.store.book._entries.values())):
                pass
        client.close()


def test_a_long_fetch_lets_the_process_do_its_other_work(tier: RunningTier, good: TierClient) -> None:
    turns = tier.call(lambda: _Turns(tier.store.book.counts))
    into = memoryview(bytearray(SIZE))
    assert sum(1 for _ in good.get([block_hash(1)] * 500, into)) == 500
    assert tier.call(turns.stop) <= 2


class _Turns:
    """How many blocks are read at most in one turn of the loop it is made in."""

    def __init__(self, counts: Counts) -> None:
        self._loop = asyncio.get_running_loop()
        self._counts, self._hits = counts, counts.hits
        self._most, self._over = 0, False
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._most = max(self._most, self._counts.hits - self._hits)
        self._hits = self._counts.hits
        if not self._over:
            self._loop.call_soon(self._turn)

    def stop(self) -> int:
        self._over = True
        return self._most


def test_strangers_are_counted_and_too_many_are_turned_away(
    tier: RunningTier, good: TierClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "MAX_STRANGERS", 3)
    strangers = [connect(tier) for _ in range(8)]
    turned_away = 0
    for peer in strangers:
        peer.settimeout(5)
        turned_away += receive(peer, frames.GREETING_BYTES) == b""
    assert turned_away == 5
    for peer in strangers:
        peer.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_from_inside_break_the_server(tier: RunningTier, raw: bytes, known_op: bool) -> None:
    with inside(tier) as peer:
        if known_op and raw:
            raw = struct.pack("<BxHxxxxQ", raw[0] % 6, 1, len(raw)) + raw
        peer.sendall(raw)
        say_no_more(peer)
        assert is_closed(peer)
    tier.call(tier.store.book.check)
