"""`hortator chat` without a server, and as a process against a small one."""

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import sys

import pytest

from deploy.bench.client import RequestFailed
from deploy.chat import Conversation, answer_line


class Scripted:
    """Answers with the pieces given; an exception among them is raised there."""

    def __init__(self, *pieces):
        self.pieces = pieces
        self.asked = []

    async def __call__(self, messages, on_text):
        self.asked.append([dict(m) for m in messages])
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            on_text(piece)


async def take(line, talk, answer):
    shown, said = [], []
    try:
        going = await answer_line(line, talk, answer, shown.append, said.append)
    except (RequestFailed, asyncio.CancelledError) as error:
        going = error
    return going, "".join(shown), said


async def test_the_whole_conversation_goes_along_with_each_question():
    talk, answer = Conversation("Be brief."), Scripted("Par", "is")
    assert await take("capital?\n", talk, answer) == (True, "Paris\n", [])
    await take("and of Italy?", talk, answer)
    assert [m["role"] for m in answer.asked[1]] == ["system", "user", "assistant", "user"]
    assert answer.asked[1][2]["content"] == "Paris"


async def test_reset_forgets_and_exit_ends():
    talk, answer = Conversation(), Scripted("a")
    await take("one", talk, answer)
    assert (await take("/reset", talk, answer))[0] is True
    assert talk.messages == []
    await take("/system You are a parrot.", talk, answer)
    await take("two", talk, answer)
    assert answer.asked[-1] == [
        {"role": "system", "content": "You are a parrot."},
        {"role": "user", "content": "two"},
    ]
    assert (await take("/exit", talk, answer))[0] is False
    assert len((await take("/what", talk, answer))[2]) == 1


async def test_a_stopped_answer_stays_as_far_as_it_came():
    talk = Conversation()
    going, shown, _ = await take("tell", talk, Scripted("Once upon", asyncio.CancelledError()))
    assert isinstance(going, asyncio.CancelledError)
    assert shown == "Once upon\n"
    assert [m["content"] for m in talk.messages] == ["tell", "Once upon"]


async def test_a_question_that_failed_can_simply_be_sent_again():
    talk = Conversation()
    going, _, _ = await take("hello", talk, Scripted(RequestFailed("HTTP 429")))
    assert isinstance(going, RequestFailed)
    assert talk.messages == []


@contextlib.asynccontextmanager
async def server(hang_after_first=False):
    """Answers each chat with its last message in capitals. `seen` notes a client that went away."""
    seen = {"questions": [], "hung": asyncio.Event(), "left": asyncio.Event()}

    async def serve(reader, writer):
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("GET"):
                body = b'{"data": [{"id": "tiny"}]}'
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            else:
                request = json.loads(await reader.readexactly(int(re.search(r"gth: (\d+)", head)[1])))
                seen["questions"].append(request["messages"])
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                for letter in request["messages"][-1]["content"].upper():
                    event = {"choices": [{"index": 0, "delta": {"content": letter}}]}
                    writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                    if hang_after_first:
                        await writer.drain()
                        seen["hung"].set()
                        with contextlib.suppress(ConnectionError):  # a reset is a way of leaving too
                            await reader.read()
                        seen["left"].set()
                        return
                writer.write(b"data: [DONE]\n\n")

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", seen


# Whoever runs the tests in the background has SIGINT ignored, and a child inherits that.
CHAT = """
import signal
from deploy.chat import app
signal.signal(signal.SIGINT, signal.default_int_handler)
app()
"""


def start(url):
    pipe = asyncio.subprocess.PIPE
    return asyncio.create_subprocess_exec(
        sys.executable, "-c", CHAT, "--url", url, stdin=pipe, stdout=pipe, stderr=pipe
    )


async def test_from_a_pipe_only_the_answers_are_printed():
    async with server() as (url, seen):
        process = await start(url)
        out, err = await process.communicate("hello\n\nhéllo wörld\n".encode())
    assert (process.returncode, out.decode(), err) == (0, "HELLO\nHÉLLO WÖRLD\n", b"")
    assert len(seen["questions"][1]) == 3


async def test_an_interrupt_closes_the_connection_of_a_running_answer():
    async with server(hang_after_first=True) as (url, seen):
        process = await start(url)
        process.stdin.write(b"hello\n")
        async with asyncio.timeout(30):
            await seen["hung"].wait()
            assert await process.stdout.readexactly(1) == b"H"
            process.send_signal(signal.SIGINT)
            await seen["left"].wait()
            assert await process.wait() == 130
        process.stdin.close()


async def test_at_a_terminal_an_interrupt_stops_the_answer_and_the_session_goes_on():
    async with server(hang_after_first=True) as (url, seen):
        ours, theirs = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHAT, "--url", url, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        shown = b""

        async def until(words):
            nonlocal shown
            while words not in shown:
                shown += await asyncio.to_thread(os.read, ours, 1000)

        async with asyncio.timeout(30):
            await until("› ".encode())
            os.write(ours, b"hello\n")
            await seen["hung"].wait()
            process.send_signal(signal.SIGINT)
            await seen["left"].wait()
            await until(b"stopped")
            os.write(ours, b"/reset\n")
            await until(b"forgotten")
            os.write(ours, b"/exit\n")
            assert await process.wait() == 0
        os.close(ours)


@pytest.mark.parametrize(
    ("url", "words"), [("http://127.0.0.1:9", b"`hortator up` starts one"), ("ftp://x", b"not a http")]
)
async def test_without_a_server_it_says_what_to_do(url, words):
    process = await start(url)
    _, err = await process.communicate(b"")
    assert process.returncode == 1
    assert words in err


async def test_a_refusal_is_told_in_the_servers_words_with_what_helps_against_it():
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"error": {"message": "A valid API key is needed.", "code": "invalid_api_key"}}'
        head = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        process = await start(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        _, err = await process.communicate(b"")
    assert b"HTTP 401: A valid API key is needed. Pass --api-key KEY" in err
    assert b"hortator up" not in err
    assert b"{" not in err
