"""The load generator against a small server of our own that misbehaves on request."""

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from itertools import pairwise
from time import perf_counter

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deploy.bench.cli import _target, app
from deploy.bench.client import RequestFailed, Target
from deploy.bench.plots import plot_all
from deploy.bench.records import Record, percentile, summarise
from deploy.bench.results import Result, tables
from deploy.bench.runner import Conditions, Run, closed_loop, open_loop, served_model, warm_up
from deploy.bench.workload import Job, Shape, poisson, random_jobs

SHAPE = Shape(prompt_tokens=16, output_tokens=5)


class FakeServer:
    """Answers /v1/completions with `max_tokens` events, unless the prompt's first id asks for trouble."""

    REFUSED, BROKEN, SHORT, ERROR_EVENT, HANGS, GARBAGE = range(6)

    def __init__(self) -> None:
        self.active = self.most_active = 0
        self.bodies: list[dict] = []
        self.gate = asyncio.Event()
        self.gate.set()

    @asynccontextmanager
    async def listening(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield Target("fake", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "m")

    async def _serve(self, reader, writer):
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        try:
            await self._answer(reader, writer)
        finally:
            self.active -= 1
            writer.close()

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /v1/models "):
            body = json.dumps({"data": [{"id": "other"}, {"id": "m", "max_model_len": 128}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            return
        assert head.startswith("POST /v1/completions ")
        length = next(
            int(x.split(":")[1]) for x in head.split("\r\n") if x.lower().startswith("content-length")
        )
        request = json.loads(await reader.readexactly(length))
        self.bodies.append(request)
        await self.gate.wait()
        trouble = request["prompt"][0]
        if trouble == self.REFUSED:
            body = b'{"error": {"message": "queue full"}}'
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        if trouble == self.HANGS:
            await asyncio.Event().wait()
        count = request["max_tokens"] - (trouble == self.SHORT)
        for i in range(count):
            self._chunk(writer, {"choices": [{"index": 0, "text": f"t{i}"}]})
            await writer.drain()
        if trouble == self.GARBAGE:
            self._chunk(writer, [1])
        if trouble == self.ERROR_EVENT:
            self._chunk(writer, {"error": {"message": "instance lost"}})
        if trouble == self.BROKEN:
            return
        usage = {"completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 4}}
        self._chunk(writer, {"choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _chunk(self, writer, event):
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def quiet(record):
    pass


async def test_a_closed_loop_keeps_its_clients_busy_and_counts_every_token():
    fake = FakeServer()
    async with fake.listening() as target:
        run = await closed_loop(target, random_jobs(12, SHAPE, "1"), 4, Conditions(), quiet)
    summary = summarise(run.records, run.wall_s)
    assert (summary.requests, summary.errors) == (12, 0)
    assert fake.most_active <= 4
    assert [r.tokens for r in run.records] == [5] * 12
    assert [len(r.gaps) for r in run.records] == [4] * 12
    assert summary.output_tok_s == pytest.approx(60 / run.wall_s)
    assert summary.cached_share == 4 / 16
    assert all(0 < r.ttft <= r.e2e for r in run.records)
    assert all(b["ignore_eos"] and b["temperature"] == 0 for b in fake.bodies)
    assert len({tuple(b["prompt"]) for b in fake.bodies}) == 12


async def test_an_open_loop_sends_though_nothing_is_answered():
    fake = FakeServer()
    fake.gate.clear()
    jobs = poisson(random_jobs(5, SHAPE, "1"), 1000.0, "1")
    async with fake.listening() as target:
        running = asyncio.create_task(open_loop(target, jobs, Conditions(), quiet))
        async with asyncio.timeout(10):
            while len(fake.bodies) < 5:
                await asyncio.sleep(0)
        fake.gate.set()
        run = await running
    assert [r.start for r in sorted(run.records, key=lambda r: r.start)] == [j.at for j in jobs]
    assert not any(r.error for r in run.records)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (FakeServer.REFUSED, "HTTP 429.*queue full"),
        (FakeServer.BROKEN, "middle of the response"),
        (FakeServer.SHORT, "4 tokens came, 5 were asked for"),
        (FakeServer.ERROR_EVENT, "instance lost"),
        (FakeServer.HANGS, "within 0.2 s"),
        (FakeServer.GARBAGE, "cannot be read"),
    ],
)
async def test_every_kind_of_failure_is_counted_and_named(trouble, words):
    jobs = [Job([trouble, 1000], 2, 5), Job([1000, 1000], 2, 5)]
    async with FakeServer().listening() as target:
        run = await closed_loop(target, jobs, 1, Conditions(timeout_s=0.2), quiet)
    bad, good = run.records
    assert re.search(words, bad.error)
    assert not good.error
    assert summarise(run.records, run.wall_s).errors == 1


async def test_the_servers_model_and_context_are_found():
    async with FakeServer().listening() as target:
        assert await served_model(target) == ("m", 128)
        assert await served_model(Target("x", target.url, "")) == ("other", None)
        await warm_up(target, SHAPE, Conditions())


async def test_a_server_that_is_not_there_is_a_clear_failure():
    async with FakeServer().listening() as target:
        pass
    with pytest.raises(RequestFailed, match=r"[Cc]onnect"):
        await served_model(target)


def test_figures_follow_their_written_definitions():
    def record(start, times, tokens, error=""):
        gaps = [b - a for a, b in pairwise(times)]
        return Record(start, 10, tokens, start, times[0], times[-1], tokens, 0, gaps, error)

    records = [
        record(1.0, [1.5, 1.6, 1.9], 3),
        record(2.0, [2.1, 2.2], 2),
        record(0.0, [9.0, 99.0], 2, "broken"),
    ]
    summary = summarise(records, 4.0)
    assert (summary.requests, summary.errors) == (3, 1)
    assert summary.output_tok_s == 5 / 4
    assert summary.request_s == 2 / 4
    # Positions min(n - 1, floor(n p)): of two values the larger is the median.
    assert summary.ttft_p50_ms == pytest.approx(500)
    assert summary.gap_p50_ms == pytest.approx(100)
    assert summary.gap_max_ms == pytest.approx(300)
    assert summary.e2e_p99_ms == pytest.approx(900)
    assert math.isnan(percentile([], 0.5))
    assert [percentile(range(100), p) for p in (0.0, 0.5, 0.99, 1.0)] == [0, 50, 99, 99]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-t", "a=ftp://x"], "write [NAME=]URL[,MODEL]"),
        (["-t", "ftp://x"], "not a http"),
        (["--trace", "nofile"], "--trace nofile: No such file or directory"),
        (["-c", "0"], "above 0"),
        (["-c", "1,x"], "above 0"),
        (["--rate", " "], "above 0"),
        (["-t", "a=http://127.0.0.1:9", "-c", "1"], "a (http://127.0.0.1:9): cannot connect to 127.0.0.1:9"),
        (["-t", "http://127.0.0.1:9", "-c", "1"], "Is a mesh up? `hortator up` starts one"),
        (["--shared-prefix", "300"], "does not fit"),
    ],
)
def test_a_wrong_option_is_answered_in_words(arguments, words):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert words in str(result.exception) + result.output


def _results(concurrencies, targets=("hortator",)):
    run = Run([Record(0.0, 4, 2, 0.0, 0.1, 0.3, 2, 0, [0.2])], 1.0)
    return [Result(t, f"concurrency {c}", (run,)) for c in concurrencies for t in targets]


def _shown(results, width):
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for table in tables(results, console):
        console.print(table)
    console.file.close()
    return console.export_text()


def test_a_table_of_one_target_names_neither_it_nor_what_has_no_figures():
    text = _shown(_results([1, 8]), 200)
    assert "c=8" in text
    for word in ("hortator", "cached", "rounds"):
        assert word not in text


@pytest.mark.parametrize("targets", [("hortator",), ("hortator", "other-server")])
def test_every_figure_can_be_read_in_a_terminal_of_80_columns(targets):
    text = _shown(_results([1, 8, 32, 64, 128, 256], targets), 80)
    assert "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    for word in (*(f"c={c}" for c in (1, 8, 32, 64, 128, 256)), "tokens/s", "gap p99", "end to end p99"):
        assert word in text


def test_a_target_is_called_by_its_address_unless_it_has_a_name():
    assert _target("http://127.0.0.1:8000/v1", "").name == "127.0.0.1:8000"
    assert _target("127.0.0.1:8000,m", "").model == "m"
    assert _target("b=http://127.0.0.1:8000", "").name == "b"


def test_an_interrupted_run_shows_the_requests_that_had_ended():
    # Whoever runs the tests in the background has SIGINT ignored, and a child inherits that.
    code = "import signal; from deploy.bench.cli import app; "
    code += "signal.signal(signal.SIGINT, signal.default_int_handler); app()"

    class Stuck(FakeServer):
        """Answers the warm-up and two requests."""

        async def _answer(self, reader, writer):
            if len(self.bodies) == 3:
                waiting.set()
                await asyncio.Event().wait()
            await super()._answer(reader, writer)

    waiting = asyncio.Event()

    async def serve_and_interrupt():
        async with Stuck().listening() as target:
            options = ["-t", target.url, "-c", "1", "--requests", "9", "--prompt-tokens", "4"]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", code, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            try:
                await asyncio.wait_for(waiting.wait(), 60)
                process.send_signal(signal.SIGINT)
                out, err = await asyncio.wait_for(process.communicate(), 30)
            finally:
                if process.returncode is None:
                    process.kill()
            return process.returncode, out.decode(), err.decode()

    status, out, err = asyncio.run(serve_and_interrupt())
    assert status == 130, err
    assert "0/2" in out
    assert "interrupted" in out
    assert err == ""


def test_two_targets_take_turns_and_give_a_table_and_json(tmp_path):
    order = []

    class Noting(FakeServer):
        def __init__(self, name):
            super().__init__()
            self.name = name

        async def _answer(self, reader, writer):
            before = len(self.bodies)
            await super()._answer(reader, writer)
            if len(self.bodies) > before and self.bodies[-1]["max_tokens"] == 5:
                order.append(self.name)

    async def serve_and_run():
        async with Noting("a").listening() as a, Noting("b").listening() as b:
            options = [
                "-c",
                "1,2",
                "--rounds",
                "2",
                "--requests",
                "2",
                "--prompt-tokens",
                "8",
                "--output-tokens",
                "5",
                "--seed",
                "3",
            ]
            files = ["--json", str(tmp_path / "r.json")]
            targets = ["-t", f"a={a.url}", "-t", f"b={b.url},m"]
            return await asyncio.to_thread(CliRunner().invoke, app, targets + options + files)

    began = perf_counter()
    result = asyncio.run(serve_and_run())
    assert result.exit_code == 0, result.output
    assert order == list("aabbaabb" * 2)
    assert "seed 3" in result.output
    body = json.loads((tmp_path / "r.json").read_text())
    assert [(r["target"], r["setting"], r["requests"], r["errors"]) for r in body["results"]] == [
        ("a", "concurrency 1", 4, 0),
        ("b", "concurrency 1", 4, 0),
        ("a", "concurrency 2", 4, 0),
        ("b", "concurrency 2", 4, 0),
    ]
    assert all(0 < r["wall_s"] < perf_counter() - began for r in body["results"])


@pytest.mark.slow
def test_plots_are_drawn_whatever_is_missing(tmp_path):
    good = Run([Record(0.0, 4, 2, 0.0, 0.1, 0.3, 2, 0, [0.2])], 1.0)
    failed = Run([Record(0.0, 4, 2, error="HTTP 500")], 1.0)
    results = [Result("a", "concurrency 1", (good, failed)), Result("b", "rate 2/s", (failed,))]
    written = plot_all(results, tmp_path)
    assert [p.name for p in written] == ["throughput.png", "latency.png", "over_time.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in written)


def test_a_trace_is_replayed_within_the_servers_context(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:46.7805900,3000,5\n"
    )
    fake = FakeServer()

    async def serve_and_run():
        async with fake.listening() as a:
            arguments = ["-t", f"a={a.url},m", "--trace", str(trace), "--speed", "10"]
            return await asyncio.to_thread(CliRunner().invoke, app, arguments)

    result = asyncio.run(serve_and_run())
    assert result.exit_code == 0, result.output
    assert "context of 128" in result.output
    assert all(len(b["prompt"]) + b["max_tokens"] <= 128 for b in fake.bodies)
    assert len(fake.bodies) == 3  # the warm-up and the trace's two
