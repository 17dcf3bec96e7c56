"""Tenants over HTTP: KV that one tenant computed serves no other, and nothing shows others that it is there.

Two mock instances whose steps take half a millisecond a token, and a second tier: enough for a cached prompt
of 1,000 tokens to be told from a cold one by the clock.
"""

import json
import os
import random
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.bench.holders import in_tier, wait_for
from tests.support.mesh import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

KEYS = """
# key [tenant]
alice-laptop alice
alice-server alice
bob-laptop   bob
guest-one
guest-two
"""
PROMPT_TOKENS = 1000
TOKEN_S = 0.0005

_prompts = random.Random(11)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("tenants")
    keys = folder / "keys"
    keys.write_text(KEYS)
    flags = (
        "--mock",
        "--instances",
        "2",
        "--set",
        f"worker.mock_token_s={TOKEN_S}",
        "--tier-memory",
        "64MiB",
    )
    with Mesh.start(folder, *flags, "--api-key-file", str(keys)) as running:
        yield running


@pytest.fixture
def prompt() -> list[int]:
    """One that nobody has asked before."""
    return [_prompts.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]


@dataclass(frozen=True)
class Answer:
    """`seconds` of a request for one token: the time to it, as any client can measure it."""

    tokens: list[int]
    cached: int
    timing: dict[str, float]
    seconds: float


def post(mesh: Mesh, path: str, key: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        mesh.base_url + path,
        json.dumps(body).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {key}",
            "X-Hortator-Timing": "1",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def ask(mesh: Mesh, key: str, prompt: list[int], **more: Any) -> Answer:
    body = {"prompt": prompt, "max_tokens": 1, "seed": 1, "ignore_eos": True, "return_token_ids": True}
    began = time.monotonic()
    status, answer = post(mesh, "/v1/completions", key, body | more)
    seconds = time.monotonic() - began
    assert status == 200, answer
    choice, usage = answer["choices"][0], answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(choice["token_ids"], cached, choice["timing"], seconds)


def test_a_tenant_finds_its_prompt_again_under_each_of_its_keys(mesh: Mesh, prompt: list[int]) -> None:
    assert ask(mesh, "alice-laptop", prompt).cached == 0
    assert ask(mesh, "alice-laptop", prompt).cached >= PROMPT_TOKENS - 100
    assert ask(mesh, "alice-server", prompt).cached >= PROMPT_TOKENS - 100


def test_another_tenant_finds_nothing_whatever_salt_it_sends(mesh: Mesh, prompt: list[int]) -> None:
    first = ask(mesh, "alice-laptop", prompt)
    salted = ask(mesh, "alice-laptop", prompt, cache_salt="alice")
    assert salted.cached == 0
    for key in ("bob-laptop", "guest-one"):
        for salt in ("", "alice", "alice-laptop", "alice:", "\u2400alice"):
            answer = ask(mesh, key, prompt, cache_salt=salt)
            assert answer.cached == 0, (key, salt)
            # The answer itself does not depend on whose KV was there.
            assert answer.tokens == first.tokens == salted.tokens


def test_a_salt_that_could_end_a_tenants_name_is_refused(mesh: Mesh, prompt: list[int]) -> None:
    for salt in ("\0", "alice\0", "\0alice", "bob\0alice\0"):
        status, answer = post(mesh, "/v1/completions", "bob-laptop", {"prompt": prompt, "cache_salt": salt})
        assert (status, answer["error"]["param"]) == (400, "cache_salt")


def test_the_same_salt_under_two_tenants_is_not_the_same(mesh: Mesh, prompt: list[int]) -> None:
    assert ask(mesh, "alice-laptop", prompt, cache_salt="shared").cached == 0
    assert ask(mesh, "bob-laptop", prompt, cache_salt="shared").cached == 0
    assert ask(mesh, "guest-one", prompt, cache_salt="shared").cached == 0
    for key in ("alice-server", "bob-laptop", "guest-two"):
        assert ask(mesh, key, prompt, cache_salt="shared").cached >= PROMPT_TOKENS - 100
        assert ask(mesh, key, prompt, cache_salt="own").cached == 0


def test_keys_without_a_tenant_are_one_tenant(mesh: Mesh, prompt: list[int]) -> None:
    assert ask(mesh, "guest-one", prompt).cached == 0
    assert ask(mesh, "guest-two", prompt).cached >= PROMPT_TOKENS - 100


def test_a_system_prompt_in_a_chat_is_shared_within_a_tenant_only(mesh: Mesh) -> None:
    words = " ".join(f"rule {number}" for number in _prompts.sample(range(1_000_000), 150))

    def chat(key: str, question: str) -> int:
        messages = [{"role": "system", "content": words}, {"role": "user", "content": question}]
        status, answer = post(mesh, "/v1/chat/completions", key, {"messages": messages, "max_tokens": 1})
        assert status == 200, answer
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert chat("alice-laptop", "Who are you?") == 0
    assert chat("alice-server", "What is this?") > 300
    assert chat("bob-laptop", "What is this?") == 0


def test_the_clock_does_not_tell_a_tenant_what_another_one_asked(mesh: Mesh) -> None:
    cold, probed, warm = [], [], []
    for _ in range(3):
        asked = [_prompts.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
        unasked = [_prompts.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
        ask(mesh, "alice-laptop", asked)
        warm.append(ask(mesh, "alice-laptop", asked))
        cold.append(ask(mesh, "bob-laptop", unasked))
        probed.append(ask(mesh, "bob-laptop", asked))
    # What it shows where KV is shared, so that the next line could fail.
    assert min(a.seconds for a in warm) < PROMPT_TOKENS * TOKEN_S / 2
    assert min(a.seconds for a in probed) >= PROMPT_TOKENS * TOKEN_S
    assert min(a.seconds for a in cold) >= PROMPT_TOKENS * TOKEN_S
    assert {a.cached for a in probed} == {a.cached for a in cold} == {0}
    assert [a.timing.keys() for a in probed] == [a.timing.keys() for a in cold]


def test_the_second_tier_gives_a_tenant_nothing_of_another_ones(mesh: Mesh, prompt: list[int]) -> None:
    ask(mesh, "alice-laptop", prompt)
    wait_for(mesh, prompt, lambda rows, blocks: 0 < blocks <= in_tier(rows), salt="alice\0")
    workers = [mesh.processes()[name] for name in ("w0", "w1")]
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
    wait_for(mesh, prompt, lambda rows, _: set(rows).isdisjoint({"w0", "w1"}), salt="alice\0")
    mesh.wait_ready()
    assert [ask(mesh, key, prompt).cached for key in ("bob-laptop", "guest-one")] == [0, 0]
    # Nobody but the tier has it now.
    assert ask(mesh, "alice-server", prompt).cached >= PROMPT_TOKENS - 100


def test_a_key_nobody_has_gets_no_answer(mesh: Mesh, prompt: list[int]) -> None:
    status, answer = post(mesh, "/v1/completions", "alice", {"prompt": prompt})
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
