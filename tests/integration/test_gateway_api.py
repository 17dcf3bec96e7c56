"""What clients can ask of the HTTP interface, over real sockets; the mesh behind it is scripted."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from shared.wire import Answer, Submit
from tests.support.fake_backend import Script
from tests.support.gateway_harness import MODEL, Harness, gateway_on

pytest_plugins = ("tests.support.gateway_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

SENTENCE = "The capital of France is Paris, naïve 日本 😀."


async def test_a_completion_comes_whole(tiny_mesh: Harness) -> None:
    ids = tiny_mesh.says(SENTENCE)
    reply = await tiny_mesh.completion(max_tokens=100)
    body = reply.json
    assert reply.status == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == MODEL
    assert body["choices"] == [
        {"index": 0, "text": SENTENCE, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    # End of sequence is counted, and hidden.
    assert body["usage"]["completion_tokens"] == len(ids) + 1
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + len(ids) + 1


async def test_a_streamed_completion_is_one_event_per_token(tiny_mesh: Harness) -> None:
    tiny_mesh.says(SENTENCE)
    whole = await tiny_mesh.completion(max_tokens=6, ignore_eos=True)
    stream = await tiny_mesh.completion(max_tokens=6, ignore_eos=True, stream=True)
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.text() == whole.json["choices"][0]["text"]
    assert len(stream.chunks) == 7
    assert {chunk["id"] for chunk in stream.chunks} == {stream.chunks[0]["id"]}


async def test_chat_streams_role_text_finish_and_done(tiny_mesh: Harness) -> None:
    tiny_mesh.says(SENTENCE)
    stream = await tiny_mesh.chat(stream=True, max_completion_tokens=100)
    deltas = [chunk["choices"][0]["delta"] for chunk in stream.chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert stream.text() == SENTENCE
    assert stream.chunks[0]["object"] == "chat.completion.chunk"


async def test_a_chat_message_comes_whole(tiny_mesh: Harness) -> None:
    tiny_mesh.says(SENTENCE)
    body = (await tiny_mesh.chat()).json
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": SENTENCE, "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", 1),
        ([5, 6, 7], 1),
        (["hi", "there", "you"], 3),
        ([[5, 6], [7]], 2),
    ],
)
async def test_every_form_of_prompt_is_understood(tiny_mesh: Harness, prompt: Any, prompts: int) -> None:
    tiny_mesh.says("ok")
    body = (await tiny_mesh.completion(prompt=prompt, n=2)).json
    assert [choice["index"] for choice in body["choices"]] == list(range(prompts * 2))
    assert {choice["text"] for choice in body["choices"]} == {"ok"}
    assert len(tiny_mesh.submits) == prompts
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        assert tiny_mesh.submits[0].prompt == prompt
    assert body["usage"]["prompt_tokens"] == sum(len(submit.prompt) for submit in tiny_mesh.submits)


async def test_several_choices_stream_side_by_side(tiny_mesh: Harness) -> None:
    tiny_mesh.says(SENTENCE)
    stream = await tiny_mesh.chat(n=3, stream=True)
    for index in range(3):
        assert stream.text(index) == SENTENCE
        mine = [c for chunk in stream.chunks for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in mine].count("stop") == 1
        assert mine[-1]["finish_reason"] == "stop"


async def test_sampling_reaches_the_scheduler_as_asked(tiny_mesh: Harness) -> None:
    await tiny_mesh.completion(
        max_tokens=7, min_tokens=2, temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, seed=-1, n=2,
        presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.1, logit_bias={"5": 2.5, "9": -100},
        stop_token_ids=[9], priority=3, cache_salt="s",
    )  # fmt: skip
    submit = tiny_mesh.submits[0]
    sampling = submit.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k) == (7, 2, 5)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.9, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.3, 0.2)
    assert sampling.repetition_penalty == 1.1
    assert sampling.logit_bias == ((5, 2.5), (9, -100.0))
    assert sampling.stop_token_ids == (9, *tiny_mesh.card.eos_ids)
    assert sampling.seed == (1 << 64) - 1
    assert [(seq.choice, seq.accepted) for seq in submit.seqs] == [(0, []), (1, [])]
    assert submit.priority == 3
    assert submit.salt == "\0s"


async def test_a_request_without_a_seed_gets_one_of_its_own(tiny_mesh: Harness) -> None:
    await tiny_mesh.completion(max_tokens=1)
    await tiny_mesh.completion(max_tokens=1)
    first, second = tiny_mesh.submits
    assert first.sampling.seed != second.sampling.seed


async def test_chat_may_fill_the_context_by_default_and_completions_get_16_tokens(tiny_mesh: Harness) -> None:
    tiny_mesh.says("ok")
    await tiny_mesh.completion()
    await tiny_mesh.chat()
    completion, chat = tiny_mesh.submits
    assert completion.sampling.max_tokens == 16
    assert chat.sampling.max_tokens == tiny_mesh.card.max_len - len(chat.prompt)


async def test_ignore_eos_leaves_no_stop_ids(tiny_mesh: Harness) -> None:
    await tiny_mesh.completion(max_tokens=3, ignore_eos=True)
    assert tiny_mesh.submits[0].sampling.stop_token_ids == ()


@pytest.mark.parametrize("stream", [False, True])
async def test_special_tokens_are_shown_only_when_asked(tiny_mesh: Harness, stream: bool) -> None:
    tiny_mesh.says("ok")
    hidden = await tiny_mesh.completion(stream=stream)
    shown = await tiny_mesh.completion(stream=stream, skip_special_tokens=False)
    texts = [reply.text() if stream else reply.json["choices"][0]["text"] for reply in (hidden, shown)]
    assert texts == ["ok", "ok<|im_end|>"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_text_and_generation(tiny_mesh: Harness, stream: bool) -> None:
    tiny_mesh.says(SENTENCE, hang_after=len(tiny_mesh.card.tokenizer.encode(SENTENCE).ids))
    tiny_mesh.backend.step_s = 0.002
    reply = await tiny_mesh.completion(max_tokens=200, stop=["Paris,", "zzz"], stream=stream)
    if stream:
        assert reply.text() == "The capital of France is "
        end = reply.chunks[-1]["choices"][0]
    else:
        end = reply.json["choices"][0]
        assert end["text"] == "The capital of France is "
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", "Paris,")
    await tiny_mesh.until(lambda: tiny_mesh.backend.running == 0)
    assert tiny_mesh.backend.cancels


async def test_the_stop_string_is_included_when_asked(tiny_mesh: Harness) -> None:
    tiny_mesh.says(SENTENCE)
    reply = await tiny_mesh.completion(max_tokens=100, stop="Paris", include_stop_str_in_output=True)
    assert reply.json["choices"][0]["text"] == "The capital of France is Paris"


async def test_stop_strings_wait_for_min_tokens(tiny_mesh: Harness) -> None:
    tiny_mesh.script(Script(ids=tiny_mesh.card.tokenizer.encode("xxxxxxxx").ids))
    reply = await tiny_mesh.completion(max_tokens=20, min_tokens=4, stop="x")
    assert reply.json["usage"]["completion_tokens"] == 5
    assert reply.json["choices"][0]["text"] == "xxxx"


async def test_a_stop_token_id_ends_generation_and_is_not_shown(tiny_mesh: Harness) -> None:
    ids = tiny_mesh.says(SENTENCE)
    end = (await tiny_mesh.completion(max_tokens=100, stop_token_ids=[ids[4]])).json["choices"][0]
    assert end["text"] == tiny_mesh.card.tokenizer.decode(ids[:4])
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", ids[4])


async def test_max_tokens_ends_in_length(tiny_mesh: Harness) -> None:
    tiny_mesh.says(SENTENCE)
    assert (await tiny_mesh.completion(max_tokens=3)).json["choices"][0]["finish_reason"] == "length"


async def test_token_ids_are_returned_when_asked(tiny_mesh: Harness) -> None:
    ids = tiny_mesh.says("ok then")
    whole = (await tiny_mesh.completion(return_token_ids=True)).json["choices"][0]
    assert whole["token_ids"] == [*ids, tiny_mesh.card.eos_ids[0]]
    assert whole["prompt_token_ids"] == tiny_mesh.submits[0].prompt
    stream = await tiny_mesh.completion(return_token_ids=True, stream=True)
    choices = [chunk["choices"][0] for chunk in stream.chunks]
    assert choices[0]["prompt_token_ids"] == tiny_mesh.submits[1].prompt
    assert [i for c in choices for i in c.get("token_ids", [])] == [*ids, tiny_mesh.card.eos_ids[0]]
    chat = (await tiny_mesh.chat(return_token_ids=True)).json
    assert chat["prompt_token_ids"] == tiny_mesh.submits[2].prompt
    assert chat["choices"][0]["token_ids"] == [*ids, tiny_mesh.card.eos_ids[0]]


async def test_echo_puts_the_prompt_before_the_text(tiny_mesh: Harness) -> None:
    tiny_mesh.says(" you")
    assert (await tiny_mesh.completion(echo=True)).json["choices"][0]["text"] == "hi you"
    assert (await tiny_mesh.completion(echo=True, stream=True)).text() == "hi you"
    ids = tiny_mesh.card.tokenizer.encode("so").ids
    assert (await tiny_mesh.completion(prompt=ids, echo=True)).json["choices"][0]["text"] == "so you"


async def test_log_probabilities_of_completions_cover_an_echoed_prompt(tiny_mesh: Harness) -> None:
    ids = tiny_mesh.says("Hello 日本")
    choice = (await tiny_mesh.completion(prompt="The capital", echo=True, logprobs=2, max_tokens=100)).json[
        "choices"
    ][0]
    logprobs = choice["logprobs"]
    prompt = tiny_mesh.submits[0].prompt
    assert tiny_mesh.submits[0].sampling.prompt_logprobs == 2
    assert len(logprobs["tokens"]) == len(prompt) + len(ids) + 1
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1] == -0.25
    assert all(token in top for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:]))
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    at = logprobs["text_offset"][len(prompt)]
    assert choice["text"][at:] == "Hello 日本"


async def test_log_probabilities_of_chat_come_with_bytes_whole_and_streamed(tiny_mesh: Harness) -> None:
    tiny_mesh.says("日")
    whole = (await tiny_mesh.chat(logprobs=True, top_logprobs=2)).json["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in whole[:-1] for b in entry["bytes"]).decode() == "日"
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole)
    stream = await tiny_mesh.chat(logprobs=True, top_logprobs=2, stream=True)
    parts = [c["logprobs"]["content"] for ch in stream.chunks for c in ch["choices"] if c["logprobs"]]
    assert [entry for part in parts for entry in part] == whole


async def test_continuous_usage_counts_up(tiny_mesh: Harness) -> None:
    tiny_mesh.says("one two")
    wishes = {"include_usage": True, "continuous_usage_stats": True}
    stream = await tiny_mesh.completion(stream=True, stream_options=wishes)
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream.chunks]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert stream.chunks[-1]["choices"] == []


async def test_a_message_can_be_continued(tiny_mesh: Harness) -> None:
    tiny_mesh.says(" Paris")
    messages = [
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "It is"},
    ]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    reply = await tiny_mesh.post("/v1/chat/completions", {**body, "echo": True})
    assert reply.json["choices"][0]["message"]["content"] == "It is Paris"
    assert tiny_mesh.card.decode(tiny_mesh.submits[0].prompt, skip_special=False).endswith(
        "<|im_start|>assistant\nIt is"
    )


async def test_the_time_ledger_sums_to_the_whole_when_asked(tiny_mesh: Harness) -> None:
    tiny_mesh.says("ok")
    reply = await tiny_mesh.post("/v1/completions", {"prompt": "hi"}, x_hortator_timing="1")
    timing = reply.json["choices"][0]["timing"]
    assert timing["queue_s"] == 0.001
    assert sum(v for k, v in timing.items() if k != "total_s") == pytest.approx(timing["total_s"], abs=1e-5)
    assert "timing" not in (await tiny_mesh.completion()).json["choices"][0]


async def test_models_tell_their_limits(tiny_mesh: Harness) -> None:
    listed = (await tiny_mesh.get("/v1/models")).json
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model["id"] == MODEL
    assert model["max_model_len"] == model["context_length"] == tiny_mesh.card.max_len
    assert (await tiny_mesh.get(f"/v1/models/{MODEL}")).json == model
    assert (await tiny_mesh.get("/v1/models/tiny")).json == model
    assert (await tiny_mesh.get("/v1/models/gpt-9")).error["code"] == "model_not_found"


@pytest.mark.parametrize("name", [MODEL, "tiny", "TINY", "tiny-folder", None])
async def test_the_model_has_aliases(tiny_mesh: Harness, name: str | None) -> None:
    tiny_mesh.says("ok")
    assert (await tiny_mesh.completion(model=name)).status == 200


async def test_an_unknown_model_is_404(tiny_mesh: Harness) -> None:
    reply = await tiny_mesh.completion(model="gpt-9")
    assert reply.status == 404
    assert reply.error["code"] == "model_not_found"
    assert reply.error["param"] == "model"


async def test_tokenize_and_detokenize_are_inverse(tiny_mesh: Harness) -> None:
    tokens = (await tiny_mesh.post("/tokenize", {"prompt": SENTENCE, "return_token_strs": True})).json
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == tiny_mesh.card.max_len
    assert (await tiny_mesh.post("/detokenize", {"tokens": tokens["tokens"]})).json == {"prompt": SENTENCE}


async def test_tokenize_applies_the_chat_template(tiny_mesh: Harness) -> None:
    tiny_mesh.says("ok")
    messages = [{"role": "user", "content": "hi"}]
    tokens = (await tiny_mesh.post("/tokenize", {"messages": messages})).json["tokens"]
    await tiny_mesh.post("/v1/chat/completions", {"messages": messages})
    assert tiny_mesh.submits[0].prompt == tokens


async def test_health_ready_version_and_metrics_answer(tiny_mesh: Harness) -> None:
    tiny_mesh.says("one two three")
    await tiny_mesh.completion(stream=True)
    assert (await tiny_mesh.get("/health")).json["ok"] is True
    assert (await tiny_mesh.get("/version")).json["version"]
    await tiny_mesh.until(lambda: tiny_mesh.gateway.canary.readiness().ok)
    assert (await tiny_mesh.get("/ready")).json["ready"] is True
    metrics = (await tiny_mesh.get("/metrics")).body.decode()
    for family in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "prompt_tokens_total",
        "generation_tokens_total",
        "num_requests_running",
        "num_requests_waiting",
        "request_success_total",
    ):
        assert f"hortator_{family}" in metrics, family


async def test_every_answer_carries_the_request_id_it_was_given(tiny_mesh: Harness) -> None:
    for path in ("/v1/models", "/nothing"):
        assert (await tiny_mesh.get(path, x_request_id="abc-1")).headers["x-request-id"] == "abc-1"
    assert (await tiny_mesh.post("/v1/completions", {}, x_request_id="abc-2")).headers[
        "x-request-id"
    ] == "abc-2"
    assert len((await tiny_mesh.completion(stream=True)).headers["x-request-id"]) == 16


async def test_doubled_slashes_in_paths_are_forgiven(tiny_mesh: Harness) -> None:
    assert (await tiny_mesh.get("/v1//models/")).status == 200
    tiny_mesh.says("ok")
    assert (await tiny_mesh.post("//v1//completions", {"prompt": "hi"})).status == 200


async def test_unknown_fields_are_ignored(tiny_mesh: Harness) -> None:
    tiny_mesh.says("ok")
    assert (await tiny_mesh.completion(no_such_field={"a": [1]}, store=True, metadata={})).status == 200


async def test_a_long_prompt_is_encoded_without_stopping_other_streams(tiny_mesh: Harness) -> None:
    text = "The capital of France is Paris. " * 300
    ids = await tiny_mesh.card.encode(text)
    assert ids == tiny_mesh.card.tokenizer.encode(text).ids


async def test_the_openai_client_works_unmodified(tiny_mesh: Harness) -> None:
    tiny_mesh.says(SENTENCE)
    async with openai.AsyncOpenAI(
        base_url=f"http://{tiny_mesh.host}:{tiny_mesh.port}/v1", api_key="x"
    ) as client:
        assert [m.id async for m in client.models.list()] == [MODEL]
        user: Any = [{"role": "user", "content": "hi"}]
        chat = await client.chat.completions.create(model=MODEL, messages=user, n=2, logprobs=True)
        assert [c.message.content for c in chat.choices] == [SENTENCE] * 2
        assert chat.choices[0].logprobs is not None
        stream = await client.chat.completions.create(
            model=MODEL, messages=user, stream=True, stream_options={"include_usage": True}
        )
        text, usage = "", None
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == SENTENCE
        assert usage is not None
        completion = await client.completions.create(model=MODEL, prompt="hi", max_tokens=100, logprobs=1)
        assert completion.choices[0].text == SENTENCE
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="gpt-9", prompt="hi")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=MODEL, prompt="hi", max_tokens=10**6)
        assert bad.value.code == "context_length_exceeded"


async def test_an_idle_stream_is_kept_alive_by_comments(tiny_folder: Path) -> None:
    async with gateway_on(tiny_folder, ping_s=0.1) as tiny_mesh:
        tiny_mesh.script(Script(hang_after=1))
        reader, writer = await tiny_mesh.connect()
        body = b'{"prompt": "hi", "stream": true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(5):
            await reader.readuntil(b": ping\n\n")
            await reader.readuntil(b": ping\n\n")
        writer.close()


async def test_the_interface_describes_itself(tiny_mesh: Harness) -> None:
    document = (await tiny_mesh.get("/openapi.json")).json
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert "requestBody" in document["paths"][path]["post"]
    assert "/v1/models" in document["paths"]
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "max_completion_tokens", "temperature"} <= set(fields)


async def test_lm_eval_finds_what_its_remote_tokenizer_needs(tiny_mesh: Harness) -> None:
    info = (await tiny_mesh.get("/tokenizer_info")).json
    assert info["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in info["chat_template"]


async def test_an_open_ended_answer_is_shortened_to_what_the_instances_can_hold(tiny_mesh: Harness) -> None:
    def script(submit: Submit) -> Script:
        if len(submit.prompt) + submit.sampling.max_tokens > 200:
            return Script(refuse=Answer("", "too_long", "KV memory holds 200 tokens"))
        return Script(ids=(5, 6, 7))

    tiny_mesh.script(script)
    reply = await tiny_mesh.chat(n=2)
    assert reply.status == 200
    assert [c["finish_reason"] for c in reply.json["choices"]] == ["length", "length"]
    assert len(tiny_mesh.submits[-1].prompt) + tiny_mesh.submits[-1].sampling.max_tokens <= 200
    # Whoever asks for a length gets it or an error.
    asked = await tiny_mesh.chat(max_tokens=200)
    assert asked.error["code"] == "context_length_exceeded"
    await tiny_mesh.until(lambda: tiny_mesh.gateway.open_requests == 0)
