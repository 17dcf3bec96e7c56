"""What happens to requests when clients leave, schedulers change and the gateway stops."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_backend import Script
from tests.support.gateway_harness import Harness, gateway_on, read_reply

pytest_plugins = ("tests.support.gateway_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

SENTENCE = "Once upon a time there was a little mesh of services that liked to row together."


def post(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    raw = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["queued", "running"])
async def test_a_disconnect_cancels_within_a_second(tiny_mesh: Harness, stream: bool, stage: str) -> None:
    if stage == "queued":
        tiny_mesh.script(Script(hang_after=0))
    else:
        tiny_mesh.script(Script(ids=(5, 6, 7)))
        tiny_mesh.backend.step_s = 0.01
    _, writer = await tiny_mesh.connect()
    writer.write(post({"prompt": "hi", "max_tokens": 400, "n": 2, "stream": stream}))
    await tiny_mesh.until(lambda: len(tiny_mesh.submits) == 1)
    writer.close()
    await tiny_mesh.until(lambda: tiny_mesh.backend.running == 0, within_s=1.0)
    await tiny_mesh.until(lambda: tiny_mesh.gateway.open_requests == 0, within_s=1.0)
    assert tiny_mesh.backend.cancels[-1].request_id == tiny_mesh.submits[0].request_id


async def test_a_client_that_leaves_while_sending_its_body_leaves_nothing_behind(tiny_mesh: Harness) -> None:
    _, writer = await tiny_mesh.connect()
    writer.write(post({"prompt": "hi"})[:-3])
    await writer.drain()
    writer.close()
    tiny_mesh.says("ok")
    assert (await tiny_mesh.completion()).status == 200
    assert tiny_mesh.gateway.open_requests == 0
    assert len(tiny_mesh.submits) == 1


@pytest.mark.parametrize("wishes", [{}, {"stop": ["zzz"]}, {"logprobs": 1}])
async def test_a_stream_goes_on_without_a_seam_under_a_new_scheduler(
    tiny_mesh: Harness, wishes: dict[str, Any]
) -> None:
    ids = tiny_mesh.says(SENTENCE)
    tiny_mesh.backend.step_s = 0.005
    reply = asyncio.create_task(tiny_mesh.completion(stream=True, max_tokens=200, **wishes))
    await tiny_mesh.until(lambda: any(len(s.done) > 5 for s in tiny_mesh.backend._seqs.values()))
    tiny_mesh.backend.take_over()
    stream = await reply
    assert stream.text() == SENTENCE
    resumed = tiny_mesh.submits[-1]
    assert len(tiny_mesh.submits) == 2
    assert resumed.seqs[0].accepted == ids[: len(resumed.seqs[0].accepted)]
    assert len(resumed.seqs[0].accepted) >= 3
    assert resumed.sampling == tiny_mesh.submits[0].sampling


async def test_streams_outlive_a_broker_that_was_away(tiny_mesh: Harness) -> None:
    tiny_mesh.says(SENTENCE)
    tiny_mesh.backend.step_s = 0.005
    reply = asyncio.create_task(tiny_mesh.completion(stream=True, max_tokens=200))
    await tiny_mesh.until(lambda: any(len(s.done) > 5 for s in tiny_mesh.backend._seqs.values()))
    gateway_bus = tiny_mesh.gateway.client._bus
    gateway_bus.disconnect()  # type: ignore[attr-defined]
    await asyncio.sleep(0.05)
    tiny_mesh.backend.take_over()  # it kept no frame for us meanwhile
    gateway_bus.reconnect()  # type: ignore[attr-defined]
    assert (await reply).text() == SENTENCE


async def test_stopping_refuses_new_requests_and_finishes_open_streams(tiny_folder: Path) -> None:
    async with gateway_on(tiny_folder) as mesh:
        mesh.says(SENTENCE)
        mesh.backend.step_s = 0.01
        reader, writer = await mesh.connect()
        writer.write(post({"prompt": "hi", "max_tokens": 200, "stream": True}))
        await mesh.until(lambda: mesh.backend.running > 0)
        stopping = asyncio.create_task(mesh.gateway.stop(5.0))
        await mesh.until(lambda: mesh.gateway.draining)
        refused = await mesh.completion()
        assert refused.status == 503
        assert refused.error["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        assert (await mesh.get("/ready")).status == 503
        assert (await read_reply(reader)).text() == SENTENCE
        await stopping
        writer.close()


async def test_a_stream_still_open_after_the_grace_time_ends_in_an_error(tiny_folder: Path) -> None:
    async with gateway_on(tiny_folder) as mesh:
        mesh.script(Script(hang_after=1))
        reader, writer = await mesh.connect()
        writer.write(post({"prompt": "hi", "stream": True}))
        await reader.readuntil(b"data: ")
        await mesh.gateway.stop(0.05)
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert b'"shutting_down"' in rest
        assert b"[DONE]" not in rest
        writer.close()


async def test_more_open_requests_than_allowed_are_429(tiny_folder: Path) -> None:
    async with gateway_on(tiny_folder, max_open_requests=1) as mesh:
        mesh.script(Script(hang_after=0))
        _, writer = await mesh.connect()
        writer.write(post({"prompt": "hi"}))
        await mesh.until(lambda: mesh.gateway.open_requests == 1)
        reply = await mesh.completion()
        assert reply.status == 429
        assert int(reply.headers["retry-after"]) >= 1
        writer.close()


async def test_one_refused_prompt_of_several_ends_the_others(tiny_mesh: Harness) -> None:
    from shared.wire import Answer

    def script(submit: Any) -> Script:
        if submit.request_id.endswith("-1"):
            return Script(refuse=Answer("", "queue_full"))
        return Script(hang_after=0)

    tiny_mesh.script(script)
    reply = await tiny_mesh.completion(prompt=["a", "b", "c"])
    assert reply.status == 429
    await tiny_mesh.until(lambda: tiny_mesh.backend.running == 0)


async def test_a_client_that_reads_slowly_gets_everything_in_order(tiny_folder: Path) -> None:
    async with gateway_on(tiny_folder, max_model_len=10**6, max_unread_bytes=64 << 20) as mesh:
        mesh.script(Script(ids=list(range(5, 205)), per_frame=2000))
        body = {"prompt": "hi", "max_tokens": 60_000, "ignore_eos": True}
        reader, writer = await asyncio.open_connection(mesh.host, mesh.port, limit=1 << 12)
        writer.write(post({**body, "stream": True}))
        await mesh.until(lambda: mesh.backend.running > 0)
        # The whole stream, some 10 MB, is made while nobody reads.
        await mesh.until(lambda: mesh.backend.running == 0, within_s=30)
        stream = await read_reply(reader)
        assert stream.text() == (await mesh.completion(**body)).json["choices"][0]["text"]
        writer.close()


async def test_a_client_that_does_not_read_is_cut_off_and_cancelled(tiny_folder: Path) -> None:
    async with gateway_on(tiny_folder, max_unread_bytes=10_000, max_model_len=10**6) as mesh:
        mesh.script(Script(ids=(5,) * 100, per_frame=5000))
        reader, writer = await asyncio.open_connection(mesh.host, mesh.port, limit=1)
        writer.write(post({"prompt": "hi", "max_tokens": 900_000, "ignore_eos": True, "stream": True}))
        await mesh.until(lambda: mesh.backend.running > 0)
        await mesh.until(lambda: mesh.backend.running == 0, within_s=30)
        assert mesh.backend.cancels
        writer.transport.abort()
        assert reader is not None


async def test_a_second_request_on_the_same_connection_is_answered(tiny_mesh: Harness) -> None:
    tiny_mesh.says("ok")
    reader, writer = await tiny_mesh.connect()
    for stream in (True, False, True):
        writer.write(post({"prompt": "hi", "stream": stream}))
        reply = await read_reply(reader)
        assert (reply.text() if stream else reply.json["choices"][0]["text"]) == "ok"
    writer.close()


async def test_choices_of_different_requests_never_mix(tiny_mesh: Harness) -> None:
    def script(submit: Any) -> Script:
        text = tiny_mesh.card.decode(submit.prompt, skip_special=False)
        return Script(
            ids=[*tiny_mesh.card.tokenizer.encode(f"answer to {text}").ids, tiny_mesh.card.eos_ids[0]]
        )

    tiny_mesh.script(script)
    names = [f"request {number}" for number in range(40)]
    replies = await asyncio.gather(
        *(
            tiny_mesh.completion(prompt=name, stream=number % 2 == 0, max_tokens=100)
            for number, name in enumerate(names)
        )
    )
    for number, (name, reply) in enumerate(zip(names, replies)):
        text = reply.text() if number % 2 == 0 else reply.json["choices"][0]["text"]
        assert text == f"answer to {name}"
