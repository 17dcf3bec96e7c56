"""Frames of the second tier: whatever bytes come, they are read right or refused."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.tier import frames
from shared.tier.frames import BadTierFrame, Hello, Op, Put

HASHES = st.lists(st.binary(min_size=32, max_size=32), max_size=20)
SIZES = st.integers(1, frames.MAX_BLOCK_BYTES)


def split(raw: bytes, block_bytes: int) -> tuple[frames.Request, bytes]:
    return frames.read_request(raw[: frames.REQUEST_BYTES], block_bytes), raw[frames.REQUEST_BYTES :]


@given(HASHES, SIZES)
def test_requests_are_read_as_they_were_written(hashes: list[bytes], size: int) -> None:
    for written, op in ((frames.have_request, Op.HAVE), (frames.get_request, Op.GET)):
        request, body = split(written(hashes), size)
        assert (request.op, request.count, request.body_bytes) == (op, len(hashes), len(body))
        assert frames.split_hashes(body) == hashes
    request, body = split(frames.pin_request(b"l" * 16, 1.5, hashes), size)
    assert request.body_bytes == len(body)
    assert frames.read_pin(body) == (b"l" * 16, 1.5, hashes)
    request, body = split(frames.release_request(b"l" * 16), size)
    assert (request.op, request.body_bytes, body) == (Op.RELEASE, 16, b"l" * 16)
    link = frames.Link(b"p" * 32, size)
    request, body = split(frames.put_request(b"h" * 32, b"d" * 32, size, link), size)
    assert (request.op, request.body_bytes) == (Op.PUT, len(body))
    assert frames.read_put_head(body) == (b"h" * 32, b"d" * 32, link)


@given(st.binary(min_size=frames.REQUEST_BYTES, max_size=frames.REQUEST_BYTES), SIZES)
def test_no_header_makes_the_tier_read_more_than_a_request_may_have(raw: bytes, size: int) -> None:
    try:
        request = frames.read_request(raw, size)
    except BadTierFrame:
        return
    assert request.body_bytes <= frames.MAX_HASHES * 32 + 100


@given(st.sampled_from(list(Op)), st.integers(0, 65535), st.integers(0, 2**64 - 1), SIZES)
def test_a_length_that_does_not_fit_its_count_is_refused(op: Op, count: int, length: int, size: int) -> None:
    fitting = {
        Op.HAVE: 32 * count,
        Op.GET: 32 * count,
        Op.PUT: 100 + size,
        Op.PIN: 20 + 32 * count,
        Op.RELEASE: 16,
    }[op]
    raw = struct.pack("<BxHxxxxQ", op, count, length)
    if length == fitting and count <= frames.MAX_HASHES:
        assert frames.read_request(raw, size).op is op
    else:
        with pytest.raises(BadTierFrame):
            frames.read_request(raw, size)


@given(
    st.text(min_size=1, max_size=60),
    st.integers(1, frames.MAX_PARTS).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))),
    SIZES,
)
def test_a_hello_is_read_as_it_was_said(model: str, part: tuple[int, int], size: int) -> None:
    said = Hello(model, *part, size)
    raw = frames.hello(said)
    head, name = raw[: frames.HELLO_BYTES], raw[frames.HELLO_BYTES :]
    assert frames.model_bytes(head) == len(name)
    assert frames.read_hello(head, name) == said


@given(st.binary(min_size=frames.HELLO_BYTES, max_size=frames.HELLO_BYTES), st.binary(max_size=300))
def test_any_other_hello_is_refused(head: bytes, name: bytes) -> None:
    try:
        length = frames.model_bytes(head)
        said = frames.read_hello(head, name)
    except BadTierFrame:
        return
    assert 1 <= length <= frames.MAX_MODEL_BYTES
    assert 0 <= said.part < said.parts
    assert 0 < said.block_bytes <= frames.MAX_BLOCK_BYTES


@given(st.binary(min_size=frames.OPENING_BYTES, max_size=frames.OPENING_BYTES))
def test_nobody_gets_in_by_guessing(raw: bytes) -> None:
    with pytest.raises(BadTierFrame):
        frames.check_opening(raw, "secret", b"n" * 32)


def test_a_proof_is_good_for_one_meeting_one_side_and_one_secret() -> None:
    ours, theirs = b"a" * 32, b"b" * 32
    opening = frames.opening("secret", ours, theirs)
    assert frames.check_opening(opening, "secret", ours) == theirs
    for secret, nonce in (("other", ours), ("secret", b"c" * 32)):
        with pytest.raises(BadTierFrame):
            frames.check_opening(opening, secret, nonce)
    frames.check_tier(frames.prove("secret", b"tier", ours, theirs), "secret", ours, theirs)
    with pytest.raises(BadTierFrame, match="does not know the secret"):  # its own proof sent back
        frames.check_tier(opening[-32:], "secret", ours, theirs)
    assert b"secret" not in opening


@given(
    st.binary(min_size=1, max_size=1), st.binary(min_size=33, max_size=33), st.binary(min_size=3, max_size=3)
)
def test_answers_of_a_stranger_are_read_or_refused(put: bytes, block: bytes, welcome: bytes) -> None:
    for read, raw in (
        (frames.read_put, put),
        (frames.read_block_head, block),
        (frames.read_welcome, welcome),
    ):
        try:
            read(raw)  # type: ignore[operator]
        except BadTierFrame:
            continue


@pytest.mark.parametrize("ended", list(Put))
def test_an_answer_to_a_put_says_whether_the_block_is_there(ended: Put) -> None:
    assert frames.read_put(frames.put_answer(ended)) is ended
    assert ended.kept == (ended in (Put.STORED, Put.HAD))


def test_a_block_is_there_with_its_digest_or_not_at_all() -> None:
    assert frames.read_block_head(frames.block_head(b"d" * 32)) == b"d" * 32
    assert frames.read_block_head(frames.block_head(None)) is None
    assert frames.read_have(frames.have_answer([True, False, True])) == [True, False, True]


def test_why_somebody_is_refused_fits_a_frame_however_long_it_is() -> None:
    raw = frames.welcome("ü" * 5000)
    assert frames.read_welcome(raw[: frames.WELCOME_BYTES]) == (False, len(raw) - frames.WELCOME_BYTES)
    assert frames.read_welcome(frames.welcome()) == (True, 0)


@pytest.mark.parametrize(
    "write",
    [
        lambda: frames.have_request([b"short"]),
        lambda: frames.get_request([b"h" * 32] * (frames.MAX_HASHES + 1)),
        lambda: frames.put_request(b"h" * 32, b"short", 1),
        lambda: frames.pin_request(b"l" * 16, 0, []),
        lambda: frames.pin_request(b"l" * 16, frames.MAX_LEASE_S + 1, []),
        lambda: frames.release_request(b"short"),
        lambda: frames.hello(Hello("", 0, 1, 1)),
        lambda: frames.hello(Hello("m" * 257, 0, 1, 1)),
    ],
)
def test_what_cannot_be_said_is_not_written(write: object) -> None:
    with pytest.raises(ValueError):
        write()  # type: ignore[operator]
