"""The load generator, the chat and the bench books against a real mesh with a mock worker."""

import asyncio
import json
import subprocess
import sys

import pytest

from deploy.bench.client import Target
from deploy.bench.records import summarise
from deploy.bench.runner import Conditions, closed_loop
from deploy.bench.workload import Shape, random_jobs
from tests.bench.books import Books
from tests.bench.common import block_tokens, watching
from tests.bench.flood import flood
from tests.support.mesh import HORTATOR, Mesh

pytestmark = pytest.mark.mesh


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    with Mesh.start(tmp_path_factory.mktemp("bench"), "--mock") as running:
        yield running


def hortator(*args, stdin=""):
    return subprocess.run(
        [*HORTATOR, *args], input=stdin, capture_output=True, text=True, timeout=90, check=False
    )


def test_bench_measures_the_mesh_without_an_error(mesh, tmp_path):
    out = tmp_path / "bench.json"
    done = hortator(
        "bench", "-t", f"m={mesh.base_url}", "-c", "1,8", "--output-tokens", "8", "--json", str(out)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())["results"]
    assert [(r["requests"], r["errors"]) for r in results] == [(2, 0), (16, 0)]
    assert all(r["output_tok_s"] > 0 and r["ttft_p50_ms"] > 0 for r in results)


def test_a_mooncake_trace_finds_its_shared_prefixes_cached(mesh, tmp_path):
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 1024, "output_length": 4, "hash_ids": [0, 1]}
    later = {"timestamp": 1000, "input_length": 1100, "output_length": 4, "hash_ids": [0, 1, 2]}
    trace.write_text(json.dumps(row) + "\n" + json.dumps(later) + "\n")
    out = tmp_path / "bench.json"
    arguments = ["--trace", str(trace), "--seed", "11", "--json", str(out)]
    done = hortator("bench", "-t", f"m={mesh.base_url}", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(out.read_text())["results"]
    assert result["cached_share"] == pytest.approx(1024 / 2124, abs=0.02)


def test_chat_answers_from_a_pipe(mesh):
    done = hortator(
        "chat", "--url", mesh.base_url, "--model", "smol", "--max-tokens", "8", stdin="hello\n/exit\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_books_kept_from_the_bus_agree_with_what_clients_got(mesh):
    books = Books(block_tokens(mesh))
    target = Target("m", mesh.base_url, "smol")
    jobs = random_jobs(12, Shape(40, 16), "books")

    async def run():
        async with watching(mesh, books):
            return await closed_loop(target, jobs, 6, Conditions(), lambda record: None)

    made = asyncio.run(run())
    assert summarise(made.records, made.wall_s).errors == 0
    # One token of each comes with its last prompt chunk. A canary may have run meanwhile.
    assert books.decode_tokens >= 12 * 15
    assert books.prefill_tokens >= 12 * 40
    assert books.interruptions == books.stalls == 0
    assert 1 < books.max_running <= 7


def test_the_flood_counts_one_event_per_token(mesh):
    result = asyncio.run(flood(Target("m", mesh.base_url, "smol"), 8, 24, 16, 20, 0))
    assert result.bad == 0
    assert 20 <= result.events / result.requests <= 22


def test_the_module_of_each_experiment_explains_itself():
    for name in ("iteration_vs_static", "paged_vs_reserved", "prefix_ttft", "mesh_overhead", "flood"):
        done = subprocess.run(
            [sys.executable, "-m", f"tests.bench.{name}", "--help"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "--seed" in done.stdout
        assert "--out" in done.stdout
