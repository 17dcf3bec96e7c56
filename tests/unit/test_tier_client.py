"""Client and server of the second tier over a real socket: what ranks can rely on."""

import socket
import threading
import time
from collections.abc import Iterator
from hashlib import sha256

import msgspec
import pytest

from services.kvstore.tier.arena import cost
from services.kvstore.tier.server import _Peer
from shared.tier import frames
from shared.tier.client import TierClient, TierDown
from shared.wire import TierOffer
from tests.support.tier import RunningTier, block_hash, content, running_tier

SIZE = 4096
LEASE = b"l" * frames.LEASE_BYTES


@pytest.fixture
def tier() -> Iterator[RunningTier]:
    with running_tier(memory=32 * cost(SIZE)) as running:
        yield running


def client_of(
    tier: RunningTier, part: int = 0, parts: int = 1, model: str = "m", size: int = SIZE
) -> TierClient:
    return TierClient(tier.offer, model, part, parts, size, timeout_s=5.0)


@pytest.fixture
def client(tier: RunningTier) -> Iterator[TierClient]:
    one = client_of(tier)
    yield one
    one.close()


def put(client: TierClient, number: int, size: int = SIZE) -> bool:
    data = content(number, size)
    return client.put(block_hash(number), memoryview(data), sha256(data).digest())


def fetched(client: TierClient, numbers: list[int], places: int = 2) -> list[bytes]:
    into = memoryview(bytearray(client.block_bytes * places))
    return [bytes(view) for _, view in client.get([block_hash(n) for n in numbers], into)]


def test_what_was_stored_is_had_and_fetched_in_order(client: TierClient) -> None:
    assert all(put(client, n) for n in range(5))
    assert client.have([block_hash(n) for n in range(6)]) == [True] * 5 + [False]
    into = memoryview(bytearray(2 * SIZE))
    got = [(i, bytes(view)) for i, view in client.get([block_hash(n) for n in range(5)], into)]
    assert got == [(n, content(n)) for n in range(5)]


def test_a_fetch_ends_at_the_first_block_that_is_missing(client: TierClient) -> None:
    for n in (0, 1, 3):
        put(client, n)
    assert fetched(client, [0, 1, 2, 3]) == [content(0), content(1)]
    assert fetched(client, [2, 3]) == []
    assert fetched(client, [3], places=1) == [content(3)]


def test_storing_again_what_is_there_changes_nothing(tier: RunningTier, client: TierClient) -> None:
    assert put(client, 1)
    assert put(client, 1)
    assert tier.store.book.counts.stored == 1
    assert fetched(client, [1]) == [content(1)]


def test_bytes_that_do_not_have_their_digest_are_not_stored(client: TierClient) -> None:
    assert not client.put(block_hash(1), memoryview(content(1)), sha256(b"something else").digest())
    assert client.have([block_hash(1)]) == [False]
    assert put(client, 1)


def test_a_block_that_changed_in_memory_is_a_miss_and_can_be_stored_anew(
    tier: RunningTier, client: TierClient
) -> None:
    for n in range(3):
        put(client, n)

    def spoil() -> None:
        entry = next(e for e in tier.store.book._entries.values() if e.key.hash == block_hash(1))
        assert entry.block is not None
        entry.block.view[SIZE // 2] ^= 1

    tier.call(spoil)
    assert fetched(client, [0, 1, 2]) == [content(0)]
    assert client.have([block_hash(n) for n in range(3)]) == [True, False, True]
    assert tier.store.book.counts.corrupt == 1
    assert put(client, 1)
    assert fetched(client, [0, 1, 2]) == [content(0), content(1), content(2)]


def test_bytes_that_change_under_way_end_the_fetch_before_they_are_used(
    tier: RunningTier, client: TierClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(4):
        put(client, n)
    send, sent = _Peer.send, []

    async def tampered(self: _Peer, head: bytes, data: memoryview | None = None) -> None:
        if data is not None:
            sent.append(data)
            if len(sent) == 3:
                data = memoryview(bytes(data[:-1]) + b"x")
        await send(self, head, data)

    monkeypatch.setattr(_Peer, "send", tampered)
    assert fetched(client, [0, 1, 2, 3]) == [content(0), content(1)]
    assert client.corrupt == 1
    assert fetched(client, [2, 3]) == [content(2), content(3)]


def test_a_fetched_chain_leaves_the_tier_from_its_end(client: TierClient) -> None:
    for n in range(32):
        put(client, n)
    assert len(fetched(client, list(range(32)))) == 32
    for n in range(100, 105):
        put(client, n)
    assert client.have([block_hash(n) for n in range(32)]) == [True] * 27 + [False] * 5


def test_a_block_of_another_size_than_was_agreed_is_a_miss(tier: RunningTier, client: TierClient) -> None:
    put(client, 1)
    other = client_of(tier, size=SIZE // 2)
    try:
        assert fetched(other, [1]) == []
        assert other.have([block_hash(2)]) == [False]  # the connection goes on
        assert put(other, 1, SIZE // 2)
        assert fetched(other, [1]) == [content(1, SIZE // 2)]
        assert fetched(client, [1]) == []
    finally:
        other.close()


def test_each_rank_has_blocks_of_its_own_and_each_model_too(tier: RunningTier) -> None:
    clients = [client_of(tier, 0, 2), client_of(tier, 1, 2), client_of(tier, 0, 1, model="other")]
    try:
        put(clients[0], 1)
        assert [c.have([block_hash(1)]) for c in clients] == [[True], [False], [False]]
        assert tier.call(lambda: tier.store.book.complete("m")) == []
        put(clients[1], 1)
        assert tier.call(lambda: tier.store.book.complete("m")) == [block_hash(1)]
    finally:
        for each in clients:
            each.close()


def test_who_leaves_a_fetch_early_can_go_on_with_another(client: TierClient) -> None:
    for n in range(8):
        put(client, n)
    blocks = client.get([block_hash(n) for n in range(8)], memoryview(bytearray(SIZE)))
    next(blocks)
    blocks.close()  # type: ignore[attr-defined]
    assert fetched(client, [3]) == [content(3)]


def test_a_full_tier_refuses_politely_and_takes_blocks_again_when_leases_end(
    tier: RunningTier, client: TierClient
) -> None:
    for n in range(32):
        assert put(client, n)
    assert client.pin(LEASE, [block_hash(n) for n in range(32)], 60.0) == 16  # half may be pinned
    other = client_of(tier, size=20 * SIZE)
    try:
        assert not put(other, 100, 20 * SIZE)  # no room without those
        assert client.have([block_hash(n) for n in range(16)]) == [True] * 16
        client.release(LEASE)
        assert put(other, 100, 20 * SIZE)
    finally:
        other.close()


def test_a_lease_runs_out_by_itself(tier: RunningTier, client: TierClient) -> None:
    put(client, 1)
    assert client.pin(LEASE, [block_hash(1), block_hash(2)], 0.001) == 1
    deadline = time.monotonic() + 5
    while tier.call(lambda: (tier.store.book.expire(time.monotonic()), tier.store.book.leases)[1]):
        assert time.monotonic() < deadline
    for n in range(2, 40):
        assert put(client, n)
    assert client.have([block_hash(1)]) == [False]


def test_chains_longer_than_a_request_take_several(client: TierClient) -> None:
    put(client, 0)
    hashes = [block_hash(0)] * (frames.MAX_HASHES + 5)
    assert client.have(hashes) == [True] * len(hashes)
    assert sum(1 for _ in client.get(hashes, memoryview(bytearray(SIZE)))) == len(hashes)


def test_a_block_larger_than_the_tier_is_refused_in_words(tier: RunningTier) -> None:
    large = client_of(tier, size=64 * SIZE)
    with pytest.raises(TierDown, match=r"larger than the tier's memory"):
        large.have([block_hash(1)])
    large.close()


@pytest.mark.parametrize("place", ["secret", "port"])
def test_a_tier_that_is_away_or_another_one_is_down_and_not_an_error_of_another_kind(
    tier: RunningTier, place: str
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        changed = {"secret": "x" * 48} if place == "secret" else {"port": unused.getsockname()[1]}
        lost = TierClient(msgspec.structs.replace(tier.offer, **changed), "m", 0, 1, SIZE, timeout_s=2.0)
        for _ in range(2):
            with pytest.raises(TierDown, match=r"k0 at 127\.0\.0\.1"):
                lost.have([block_hash(1)])
        lost.close()


def test_a_client_connects_again_after_the_tier_has_come_back() -> None:
    with running_tier() as first:
        client = client_of(first)
        put(client, 1)
    with pytest.raises(TierDown):
        client.have([block_hash(1)])
    with pytest.raises(TierDown):
        put(client, 1)
    client.close()


def test_an_impostor_at_the_port_gets_no_block_and_is_found_out() -> None:
    heard = b""

    def impostor(listening: socket.socket) -> None:
        nonlocal heard
        with listening, listening.accept()[0] as peer:
            peer.sendall(frames.greeting(b"n" * frames.NONCE_BYTES))
            heard = peer.recv(1 << 20)
            peer.sendall(bytes(frames.PROOF_BYTES) + frames.welcome())
            heard += peer.recv(1 << 20)

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    thread = threading.Thread(target=impostor, args=(listening,))
    thread.start()
    offer = TierOffer(
        instance="k0", host="127.0.0.1", port=port, secret="s" * 40, born=1, memory_bytes=1, disk_bytes=0
    )
    client = TierClient(offer, "m", 0, 1, SIZE)
    with pytest.raises(TierDown, match="does not know the secret"):
        put(client, 1)
    thread.join(5)
    assert len(heard) == frames.OPENING_BYTES + frames.HELLO_BYTES + 1
    assert b"s" * 40 not in heard


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 50])
def test_a_listener_that_is_no_tier_or_says_nothing_costs_the_timeout_at_most(says: bytes) -> None:
    done = threading.Event()

    def listener(listening: socket.socket) -> None:
        with listening, listening.accept()[0] as peer:
            peer.sendall(says)
            done.wait(5)

    listening = socket.create_server(("127.0.0.1", 0))
    offer = TierOffer(
        instance="k0",
        host="127.0.0.1",
        port=listening.getsockname()[1],
        secret="s",
        born=1,
        memory_bytes=1,
        disk_bytes=0,
    )
    thread = threading.Thread(target=listener, args=(listening,))
    thread.start()
    client = TierClient(offer, "m", 0, 1, SIZE, timeout_s=0.3)
    began = time.monotonic()
    with pytest.raises(TierDown):
        client.have([block_hash(1)])
    assert time.monotonic() - began < 3
    done.set()
    thread.join(5)


def test_wrong_use_is_an_error_of_the_caller(client: TierClient) -> None:
    with pytest.raises(ValueError, match="room of"):
        next(client.get([block_hash(1)], memoryview(bytearray(SIZE - 1))))
    with pytest.raises(ValueError, match="a block of"):
        client.put(block_hash(1), memoryview(b"short"), sha256(b"short").digest())
    with pytest.raises(ValueError, match="hashes of 32 bytes"):
        client.have([b"short"])
    assert client.have([block_hash(1)]) == [False]
