"""Requests made to hurt: each is answered with an error that names the field, and hurts nobody else."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from shared.runtime.http_limits import LimitedHttpProtocol
from tests.support.fake_backend import Script
from tests.support.gateway_harness import MODEL, Harness, Reply, gateway_on, read_reply

pytest_plugins = ("tests.support.gateway_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

HUGE = 2**63


def raw_completion(fields: str) -> bytes:
    """A body whose JSON the json module would not write."""
    return b'{"prompt": "hi", ' + fields.encode() + b"}"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [10**9, 0, -1, 1.5, "2", True, HUGE]),
        ("max_tokens", [HUGE, -1, 0, 1.5, "5", True, [5]]),
        ("min_tokens", [-1, 17, HUGE]),
        ("logprobs", [10**6, -1, "1", True]),
        ("temperature", [-0.1, 2.1, "1", 1e308, True]),
        ("top_p", [0, -1, 1.1, "x"]),
        ("top_k", [-2, 1.5, "x"]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0, -1, 11]),
        ("seed", [2**64, -(2**63) - 1, 1.5, "1"]),
        ("logit_bias", [{"600": 1}, {"-1": 1}, {"x": 1}, {"5": 101}, {"5": "1"}, {"٣": 1}, [1]]),
        ("logit_bias", [{str(i): 1 for i in range(2000)}, {"1" * 5000: 1}]),
        ("stop", [[""], "", ["x"] * 17, ["x"] * 10_000, "x" * 2000, ["x" * (1 << 20)], 5, [5], {"a": 1}]),
        ("stop_token_ids", [[600], [-1], [True], ["5"], [5] * 1000, 5, [HUGE]]),
        ("prompt", ["", [], [""], [[]], [600], [-1], [True], [5, "a"], [[5], "a"], [1.5], {"a": 1}]),
        ("prompt", [[[600]], [None]]),
        ("prompt", [["x"] * 100_000, [[HUGE]], [[["x"]]]]),
        ("stream", ["yes", 1]),
        ("stream_options", [True, {"include_usage": 5}]),
        ("echo", [1]),
        ("priority", [HUGE, "1"]),
        ("cache_salt", ["x" * 129, 5, "a\0b"]),
        ("request_id", ["x" * 129]),
        ("suffix", ["x"]),
        ("model", [5]),
    ],
)  # fmt: skip
async def test_a_bad_value_is_400_and_names_its_field(
    tiny_mesh: Harness, field: str, values: list[Any]
) -> None:
    for value in values:
        reply = await tiny_mesh.completion(**{field: value})
        assert reply.status == 400, (value, reply.body)
        expected = {"min_tokens": ("min_tokens",), "max_tokens": ("max_tokens", "prompt")}.get(
            field, (field,)
        )
        assert (reply.error["param"] or "").startswith(expected), (value, reply.error)
        assert len(reply.error["message"]) < 400
    assert not tiny_mesh.submits


@pytest.mark.parametrize(
    "fields",
    ['"temperature": NaN', '"top_p": Infinity', '"presence_penalty": -Infinity', '"temperature": 1e999',
     '"max_tokens": 1e999', '"seed": 0x10', '"logit_bias": {"5": NaN}', '"a": 1,', '"stop": "\\ud800"'],
)  # fmt: skip
async def test_what_is_not_json_is_400(tiny_mesh: Harness, fields: str) -> None:
    reply = await tiny_mesh.post("/v1/completions", raw_completion(fields))
    assert reply.status == 400
    assert reply.error


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b'"x"', b"5", b"{", b"\xff\xfe", b"[" * 100_000, b'{"prompt":' + b"[" * 100_000,
     b'{"x":' * 100_000, b'{"unknown":' + b'[{"a":' * 50_000, b"{}garbage", b"\0" * 100],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_a_body_that_is_no_request_is_400(tiny_mesh: Harness, body: bytes, path: str) -> None:
    reply = await tiny_mesh.post(path, body)
    assert reply.status == 400
    assert reply.error


@pytest.mark.parametrize(
    "messages",
    [
        None, [], "hi", [{}], [{"role": "user"}], [{"role": "user", "content": 5}],
        [{"role": "wizard", "content": "x"}], [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [5]}], [{"role": "user", "content": "x"}] * 5000,
        [{"role": "assistant", "tool_calls": [{"id": "1"}]}], [5],
        [{"role": "user", "content": None}],
    ],
)  # fmt: skip
async def test_bad_messages_are_400(tiny_mesh: Harness, messages: Any) -> None:
    reply = await tiny_mesh.post("/v1/chat/completions", {"messages": messages})
    assert reply.status == 400
    assert reply.error["param"].startswith("messages")


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        "http://127.0.0.1\\@evil/",
        "data:image/png;base64,",
    ],
)  # fmt: skip
async def test_media_are_refused_without_a_connection(tiny_mesh: Harness, url: str) -> None:
    reached = asyncio.Event()
    server = await asyncio.start_server(lambda *_: reached.set(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for target in (url, f"http://127.0.0.1:{port}/"):
        for part in (
            {"type": "image_url", "image_url": {"url": target}},
            {"type": "input_audio", "url": target},
        ):
            reply = await tiny_mesh.chat([part])
            assert reply.status == 400
            assert reply.error["param"] == "messages[0].content[0]"
    assert not reached.is_set()
    server.close()


async def test_a_body_above_the_limit_is_413_before_it_is_sent(tiny_folder: Path) -> None:
    async with gateway_on(tiny_folder, max_body_bytes=1000) as mesh:
        reader, writer = await mesh.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 10000000\r\n\r\n{")
        reply = await asyncio.wait_for(read_reply(reader), 2)
        assert reply.status == 413
        assert reply.error["code"] == "request_too_large"
        writer.close()


async def test_a_chunked_body_above_the_limit_is_413(tiny_folder: Path) -> None:
    async with gateway_on(tiny_folder, max_body_bytes=100_000) as mesh:
        reader, writer = await mesh.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(20):
            writer.write(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        reply = await asyncio.wait_for(read_reply(reader), 2)
        assert reply.status == 413
        writer.close()


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate"])
async def test_compressed_bodies_are_415(tiny_mesh: Harness, encoding: str) -> None:
    reply = await tiny_mesh.post("/v1/completions", b"\x1f\x8b" + b"\0" * 100, content_encoding=encoding)
    assert reply.status == 415


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_bodies_a_web_page_could_send_unasked_are_415(tiny_mesh: Harness, kind: str) -> None:
    reply = await tiny_mesh.post("/v1/completions", {"prompt": "hi"}, content_type=kind)
    assert reply.status == 415
    message = json.loads(reply.body)["error"]["message"]
    assert f"came as {kind}." in message
    assert "'Content-Type: application/json'" in message


async def test_a_required_field_of_a_wrong_type_is_not_offered_null(tiny_mesh: Harness) -> None:
    for path, body in (("/v1/completions", {"prompt": 5}), ("/v1/chat/completions", {"messages": "hi"})):
        error = json.loads((await tiny_mesh.post(path, body)).body)["error"]
        assert error["code"] == "invalid_type"
        assert "null" not in error["message"]


async def test_an_unknown_path_is_404_and_says_where_the_description_is(tiny_mesh: Harness) -> None:
    reply = await tiny_mesh.post("/v2/completions", {})
    assert reply.status == 404
    assert "/docs" in json.loads(reply.body)["error"]["message"]


@pytest.mark.parametrize(
    "head",
    [
        b"x-a: " + b"y" * (1 << 20),
        b"\r\n".join(b"x-%d: y" % n for n in range(10_000)),
        b"x-a: y\r\n" * 200,
    ],
)
async def test_too_many_or_too_large_headers_are_431(tiny_mesh: Harness, head: bytes) -> None:
    reader, writer = await tiny_mesh.connect()
    writer.write(b"GET /health HTTP/1.1\r\n" + head)
    reply = await asyncio.wait_for(read_reply(reader), 5)
    assert reply.status == 431
    assert reply.error["code"] == "headers_too_large"
    assert await reader.read() == b""
    writer.close()


async def test_a_request_line_without_end_is_431(tiny_mesh: Harness) -> None:
    reply = await tiny_mesh.raw(b"GET /" + b"a" * (1 << 18))
    assert reply.status == 431


async def test_what_is_not_http_is_400(tiny_mesh: Harness) -> None:
    reply = await tiny_mesh.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n")
    assert reply.status == 400
    assert reply.error


async def test_headers_that_do_not_come_are_408(tiny_mesh: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedHttpProtocol, "head_timeout_s", 0.2)
    for beginning in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"):
        reader, writer = await tiny_mesh.connect()
        writer.write(beginning)
        reply = await asyncio.wait_for(read_reply(reader), 5)
        assert reply.status == 408
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_a_body_that_does_not_come_is_408(tiny_folder: Path) -> None:
    async with gateway_on(tiny_folder, body_timeout_s=0.2) as mesh:
        reader, writer = await mesh.connect()
        writer.write(b'POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\n\r\n{"prompt"')
        reply = await asyncio.wait_for(read_reply(reader), 5)
        assert reply.status == 408
        assert reply.headers["connection"] == "close"
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


KEYS = {"sk-alice-0123456789": "alice", "sk-bob": "bob"}


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer sk-bo", "Bearer sk-bobx", "Basic sk-bob", "sk-bob",
     "Bearer " + "x" * 10_000, "Bearer sk-alice-012345678", "Bearer \xff\xfe"],
)  # fmt: skip
async def test_without_a_right_key_every_route_but_the_probes_is_401(tiny_folder: Path, header: str) -> None:
    async with gateway_on(tiny_folder, keys=KEYS) as mesh:
        routes = [
            ("GET", p) for p in ("/v1/models", "/metrics", "/version", "/nothing", "/openapi.json", "/docs")
        ]
        routes += [
            ("POST", p)
            for p in (
                "/v1/completions",
                "/v1/chat/completions",
                "/tokenize",
                "/detokenize",
                "//v1/completions",
            )
        ]
        for method, path in routes:
            reply = await mesh.request(method, path, b"{}", {"authorization": header} if header else {})
            assert reply.status == 401, path
            assert reply.error["code"] == "invalid_api_key"
        assert (await mesh.get("/health")).status == 200
        probe = await mesh.request("GET", "/ready", b"", {"authorization": header} if header else {})
        assert set(probe.json) == {"ready"}
        assert probe.status in (200, 503)


async def test_tenants_never_share_a_salt_whatever_they_ask_for(tiny_folder: Path) -> None:
    async with gateway_on(tiny_folder, keys=KEYS) as mesh:
        mesh.says("ok")
        for key in KEYS:
            for salt in ({}, {"cache_salt": "bob"}, {"cache_salt": "alice"}):
                reply = await mesh.post(
                    "/v1/completions", {"prompt": "hi", **salt}, authorization=f"Bearer {key}"
                )
                assert reply.status == 200
        salts = [submit.salt for submit in mesh.submits]
        assert len(set(salts)) == 6
        assert "" not in salts


async def test_errors_show_no_path_and_no_address(tiny_mesh: Harness) -> None:
    replies: list[Reply] = [
        await tiny_mesh.completion(max_tokens="x"),
        await tiny_mesh.get("/v1/models/../../etc/passwd"),
        await tiny_mesh.post("/v1/chat/completions", {"messages": [{"role": "user", "content": {}}]}),
        await tiny_mesh.completion(prompt=[600]),
    ]
    for reply in replies:
        assert reply.status in (400, 404)
        for secret in ("/work", "site-packages", "Traceback", "127.0.0.1", ".py"):
            assert secret not in reply.body.decode()


async def test_a_good_stream_beside_hostile_requests_is_undisturbed(tiny_mesh: Harness) -> None:
    ids = tiny_mesh.card.tokenizer.encode("Once upon a time there was a little mesh of services.").ids * 8
    tiny_mesh.script(Script(ids=[*ids, tiny_mesh.card.eos_ids[0]]))
    alone = await tiny_mesh.completion(stream=True, max_tokens=500)
    tiny_mesh.backend.step_s = 0.001

    async def attack() -> None:
        for _ in range(5):
            await tiny_mesh.post("/v1/completions", b"[" * 100_000)
            await tiny_mesh.completion(stop=["x" * (1 << 20)])
            await tiny_mesh.completion(prompt="hello " * 100_000)
            await tiny_mesh.completion(n=10**9)

    beside, *_ = await asyncio.gather(tiny_mesh.completion(stream=True, max_tokens=500), attack(), attack())
    assert beside.text() == alone.text()
    assert len(beside.chunks) == len(alone.chunks)
    await tiny_mesh.until(lambda: tiny_mesh.gateway.open_requests == 0)


async def test_a_text_far_too_long_is_refused_without_encoding_it(tiny_mesh: Harness) -> None:
    began = time.perf_counter()
    reply = await tiny_mesh.completion(prompt="a" * 3_000_000)
    assert reply.error["code"] == "context_length_exceeded"
    reply = await tiny_mesh.post("/tokenize", {"prompt": "a" * 3_000_000})
    assert reply.status == 400
    assert time.perf_counter() - began < 10.0


async def test_an_evil_chat_template_would_not_run(tiny_mesh: Harness) -> None:
    for field in ("chat_template", "chat_template_kwargs"):
        reply = await tiny_mesh.chat(**{field: "{{ ''.__class__ }}"})
        assert reply.error["param"] == field
    tiny_mesh.says("ok")
    assert (await tiny_mesh.chat("{{ 7 * 7 }}")).status == 200
    assert "{{ 7 * 7 }}" in tiny_mesh.card.decode(tiny_mesh.submits[-1].prompt, skip_special=False)


async def test_many_connects_and_disconnects_leave_no_ghost(tiny_mesh: Harness) -> None:
    tiny_mesh.script(Script(hang_after=1))
    body = json.dumps({"prompt": "hi", "stream": True, "model": MODEL}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    for cut in (0, 10, len(head), len(head) + 5, None):
        writers = []
        for _ in range(40):
            _, writer = await tiny_mesh.connect()
            writer.write((head + body)[:cut])
            writers.append(writer)
        await asyncio.gather(*(writer.drain() for writer in writers))
        for writer in writers:
            writer.close()
    await tiny_mesh.until(lambda: tiny_mesh.gateway.open_requests == 0 and tiny_mesh.backend.running == 0)
    tiny_mesh.says("ok")
    assert (await tiny_mesh.completion()).status == 200
