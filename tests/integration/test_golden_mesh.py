"""Golden tokens through the whole mesh at float32: alone, all at once, cold and warm, and under pressure."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.mesh import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.model, pytest.mark.timeout(600)]

GOLDEN = json.loads((Path(__file__).parents[1] / "data/golden.json").read_text())


def complete(base_url: str, case: dict, max_tokens: int = 0, **more) -> dict:
    body = {
        "model": "smol",
        "prompt": case["ids"],
        "max_tokens": max_tokens or len(case["golden"]),
        "temperature": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
    } | more
    request = urllib.request.Request(
        f"{base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def tokens(answer: dict) -> list[int]:
    return answer["choices"][0]["token_ids"]


def at_once(base_url: str, asked: list[tuple[dict, int]]) -> list[dict]:
    """Answers to (case, max_tokens), asked by as many clients at the same moment."""
    # A pool of our own: asyncio.to_thread would run as many as the machine has cores and a few.
    with ThreadPoolExecutor(len(asked)) as clients:
        return list(clients.map(lambda one: complete(base_url, *one), asked))


def all_at_once(base_url: str, copies: int) -> None:
    cases = [case for case in GOLDEN for _ in range(copies)]
    for case, answer in zip(cases, at_once(base_url, [(case, 0) for case in cases]), strict=True):
        assert tokens(answer) == case["golden"], case["prompt"]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    with Mesh.start(tmp_path_factory.mktemp("mesh"), "--dtype", "float32") as running:
        yield running


def test_every_case_alone_with_a_cold_and_then_a_warm_cache(mesh):
    for _ in range(2):
        for case in GOLDEN:
            answer = complete(mesh.base_url, case)
            assert tokens(answer) == case["golden"], case["prompt"]
            assert answer["choices"][0]["text"] == case["text"]


def test_a_warm_cache_is_really_used(mesh):
    case = max(GOLDEN, key=lambda c: len(c["ids"]))
    complete(mesh.base_url, case)
    usage = complete(mesh.base_url, case)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= len(case["ids"]) - 32


def test_an_answer_ended_by_a_stop_string_tells_of_the_cache_too(mesh):
    case = max(GOLDEN, key=lambda c: len(c["ids"]))
    complete(mesh.base_url, case)
    stop = case["text"][4:9]
    answer = complete(mesh.base_url, case, stop=[stop])
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["text"]) == (
        "stop",
        case["text"][: case["text"].index(stop)],
    )
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(case["ids"]) - 32


def test_all_cases_at_once(mesh):
    all_at_once(mesh.base_url, copies=-(-32 // len(GOLDEN)))


@pytest.mark.parametrize("chunk", [16, 512])
def test_golden_with_that_chunk_size(tmp_path, chunk):
    with Mesh.start(tmp_path, "--dtype", "float32", "--set", f"worker.max_step_tokens={chunk}") as running:
        all_at_once(running.base_url, copies=2)


def test_golden_after_forced_preemption(tmp_path):
    """KV for a few sequences only, and a scheduler that has learnt to expect short outputs: it admits more
    than fit, so blocks run out, sequences are preempted, and nobody's tokens change."""
    tight = ("--dtype", "float32", "--kv-memory", "24MiB", "--set", "gateway.queue_timeout_s=300")
    with Mesh.start(tmp_path, *tight) as running:
        short = min(GOLDEN, key=lambda c: len(c["golden"]))
        for answer in at_once(running.base_url, [(short, 200)] * 40):
            assert tokens(answer) == short["golden"]
        assert running.metric("scheduler", "hortator_scheduler_preemptions_total") == 0
        all_at_once(running.base_url, copies=4)
        assert running.metric("scheduler", "hortator_scheduler_preemptions_total") > 0
