"""Blocks run out under running sequences: some are preempted, and nobody's tokens change."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.mesh import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(180)]

BLOCKS = 34
PROMPT = list(range(500, 537))


def complete(mesh: Mesh, seed: int, max_tokens: int, stop: int = -1) -> list[int]:
    body = {
        "model": "smol",
        "prompt": [seed + 1, *PROMPT],
        "max_tokens": max_tokens,
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
        "stop_token_ids": [] if stop < 0 else [stop],
    }
    request = urllib.request.Request(
        f"{mesh.base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


def test_preempted_sequences_end_with_the_tokens_they_would_have_had(tmp_path):
    settings = ("--set", f"worker.mock_blocks={BLOCKS}", "--set", "worker.mock_step_s=0.004")
    with Mesh.start(tmp_path, "--mock", *settings) as mesh, ThreadPoolExecutor(60) as clients:
        expected = [complete(mesh, seed, 64) for seed in range(24)]
        # Many that may write 400 tokens and stop after 8 teach the scheduler to expect little,
        # so that it admits more of what follows than fits.
        stop = expected[0][7]
        for answer in clients.map(lambda _: complete(mesh, 0, 400, stop), range(60)):
            assert answer == expected[0][:8]
        before = mesh.metric("scheduler", "hortator_scheduler_preemptions_total")
        assert list(clients.map(lambda seed: complete(mesh, seed, 64), range(24))) == expected
        assert mesh.metric("scheduler", "hortator_scheduler_preemptions_total") > before
        (instance,) = mesh.status()["instances"]
        assert instance["blocks_free"] == instance["blocks_total"] == BLOCKS
