"""The response and event parsers: however the bytes are cut, the same comes out."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.bench.sse import BadResponse, EventParser, ResponseParser

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(p % (len(data) + 1) for p in places)})
    return [data[a:z] for a, z in pairwise(at)]


cuts = st.lists(st.integers(0, 10_000), max_size=30)
bodies = st.binary(max_size=300)


@settings(deadline=None, max_examples=100)
@given(parts=st.lists(st.binary(min_size=1, max_size=100), max_size=10), places=cuts)
def test_a_chunked_body_comes_out_whole_however_it_is_cut(parts, places):
    wire = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"
    parser = ResponseParser()
    got = b"".join(parser.feed(p) for p in cut(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + wire, places))
    assert got == b"".join(parts)
    assert parser.finished
    parser.end()


@settings(deadline=None, max_examples=100)
@given(body=bodies, places=cuts)
def test_a_body_of_known_length_ends_by_itself(body, places):
    parser = ResponseParser()
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
    assert b"".join(parser.feed(p) for p in cut(head + body, places)) == body
    assert parser.finished


@settings(deadline=None, max_examples=100)
@given(body=bodies, places=cuts)
def test_a_body_without_length_ends_with_the_connection(body, places):
    parser = ResponseParser()
    assert b"".join(parser.feed(p) for p in cut(HEAD + b"\r\n" + body, places)) == body
    assert not parser.finished
    parser.end()
    assert parser.finished


def test_an_informational_head_is_passed_over():
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 2\r\n\r\nok") == b"ok"
    assert parser.status == 200


@pytest.mark.parametrize(
    "wire",
    [b"", HEAD, HEAD + b"Content-Length: 5\r\n\r\nabc", HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc"],
)
def test_an_answer_that_ends_early_is_an_error(wire):
    parser = ResponseParser()
    parser.feed(wire)
    with pytest.raises(BadResponse):
        parser.end()


@pytest.mark.parametrize(
    "wire", [b"SSH-2.0-x\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"x" * 70_000]
)
def test_bytes_that_are_not_http_are_an_error(wire):
    with pytest.raises(BadResponse):
        ResponseParser().feed(wire)


# What may stand in one data line: no line ends.
lines = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=20)


@settings(deadline=None, max_examples=100)
@given(
    events=st.lists(st.lists(lines, min_size=1, max_size=3), max_size=8),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    noise=st.sampled_from(["", ": ping", "event: x", "id: 7", "retry"]),
    places=cuts,
)
def test_events_come_out_the_same_however_they_are_cut_and_whatever_ends_their_lines(
    events, end, noise, places
):
    text = ""
    for event in events:
        text += noise + end if noise else ""
        text += "".join(f"data: {line}{end}" for line in event) + end
    wire = text.encode()
    parser = EventParser()
    got = [e for p in cut(wire, places) for e in parser.feed(p)]
    if end == "\r":
        got += parser.feed(b"\n")  # a lone CR at the very end may be the half of CRLF until more comes
    assert got == ["\n".join(event).encode() for event in events]


def test_comments_alone_are_no_events():
    assert EventParser().feed(b": ping\n\n: ping\n\ndata:x\n\n") == [b"x"]
