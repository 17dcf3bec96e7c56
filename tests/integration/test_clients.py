"""Clients nobody of this project wrote: openai-python over HTTP, and forty lines of msgpack over NATS."""

import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.support.mesh import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.model, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m-instruct"
GOLDEN = json.loads((ROOT / "tests/data/golden.json").read_text())


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    with Mesh.start(tmp_path_factory.mktemp("mesh"), "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def client(mesh):
    with openai.OpenAI(base_url=f"{mesh.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat_answers_paris(client):
    answer = client.chat.completions.create(
        model=MODEL, temperature=0, messages=[{"role": "user", "content": "What is the capital of France?"}]
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_chat_streams_the_same_text_with_one_finish_and_usage_at_the_end(client):
    chunks = list(
        client.chat.completions.create(
            model="smol",
            temperature=0,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "The capital of France is Paris."
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "stop"
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8


def test_completions_give_n_choices_that_differ_by_seeded_chance_and_repeat(client):
    def ask():
        answer = client.completions.create(
            model=MODEL, prompt="Once upon a time", n=3, max_tokens=12, temperature=1.0, seed=7
        )
        return [c.text for c in sorted(answer.choices, key=lambda c: c.index)]

    first = ask()
    assert len(set(first)) == 3
    assert ask() == first


def test_logprobs_belong_to_the_greedy_tokens(client):
    answer = client.chat.completions.create(
        model=MODEL,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        max_tokens=5,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
    )
    content = answer.choices[0].logprobs.content
    assert "".join(item.token for item in content) == answer.choices[0].message.content
    for item in content:
        assert len(item.top_logprobs) == 3
        assert item.top_logprobs[0].token == item.token, "greedy takes the most likely token"
        assert item.logprob <= 0


def test_completion_logprobs_and_echo_cover_the_prompt(client):
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=1, temperature=0, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text == "The capital of France is Paris"
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


def test_errors_are_the_types_the_client_knows(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-4", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 9000, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as hot:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert hot.value.param == "temperature"


def test_stop_strings_end_the_text_before_them(client):
    answer = client.chat.completions.create(
        model=MODEL,
        temperature=0,
        stop=[" Paris"],
        messages=[{"role": "user", "content": "What is the capital of France?"}],
    )
    assert answer.choices[0].message.content == "The capital of France is"
    assert answer.choices[0].finish_reason == "stop"


def test_a_plain_msgpack_client_over_nats_gets_the_golden_tokens(mesh):
    case = GOLDEN[0]
    url, user, password = mesh.nats_operator()
    result = subprocess.run(
        [sys.executable, ROOT / "docs/examples/nats_client.py", url, MODEL, *map(str, case["ids"])],
        env={**os.environ, "NATS_USER": user, "NATS_PASSWORD": password},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    ids = [int(word) for word in result.stdout.splitlines()[0].split()]
    # The example names no stop ids, so it runs to its 16 tokens; the golden text is how it begins.
    assert ids[: len(case["golden"])] == case["golden"]
    assert result.stdout.splitlines()[-1] == "ended: length"
