"""What `hortator status` makes of what workers tell."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from deploy.rundir import RunDir
from deploy.status import collect, engine, engine_line, group_lines, print_for_people, tier_line
from deploy.tap import wrong_subject
from deploy.up import missing_ranks, why_not_ready

CANDIDATES = [
    {"kernels": "native", "threads": 2, "decode_ms": 13.5, "prefill_tok_s": 701.2, "chosen": True},
    {"kernels": "torch", "threads": 2, "decode_ms": 24.0, "prefill_tok_s": 598.0, "chosen": False},
]
DETAIL = {
    "choice": "native, 2 threads: the fastest of 2 measured",
    "dtype": "float16",
    "kv_dtype": "float32",
    "deterministic": "yes",
    "candidates": json.dumps(CANDIDATES),
}


def test_an_instance_says_in_one_line_how_it_computes_and_why():
    assert engine_line("w0", engine(DETAIL)) == (
        "w0: native, 2 threads: the fastest of 2 measured; decode 13.5 ms, prefill 701 tok/s; "
        "float16 weights, float32 KV; deterministic"
    )


def test_for_programs_the_table_of_candidates_is_a_table():
    assert engine(DETAIL)["candidates"] == CANDIDATES


def test_a_mock_or_a_worker_of_another_version_is_shown_with_what_it_tells():
    assert engine_line("w1", engine({"executor": "mock"})) == "w1: mock"
    slow = engine({"choice": "torch, 1 thread: the only candidate", "kernels_reason": "no compiler"})
    assert (
        engine_line("w1", slow) == "w1: torch, 1 thread: the only candidate; no native kernels: no compiler"
    )
    assert engine({"candidates": "{"})["candidates"] == []
    assert engine_line("w2", engine({"candidates": "3"})) == ""


def _for_people(report):
    console = Console(width=80, file=io.StringIO())
    print_for_people(report, console)
    return console.file.getvalue()


def test_what_a_group_waited_for_is_not_told_as_a_part_of_what_its_messages_take():
    decode = {"steps": 9, "compute_us": 48.2, "communication_us": 3.1, "exposed_us": 970.4, "share": 0.06}
    (line,) = group_lines("w0", {"tp": 2, "recent": {"decode": decode, "prompt": decode | {"steps": 0}}})
    assert line == (
        "w0: 2 ranks, decode steps: a layer computes 48 µs, its messages take 3 µs (6%); "
        "970 µs were waited for them and for slower ranks"
    )


def test_status_fits_80_columns_whole():
    service = {
        "service": "scheduler",
        "instance": "scheduler",
        "pid": 4_194_303,
        "state": "starting",
        "uptime_s": 123_456.0,
        "restarts": 12,
        "http": "127.0.0.1:65535",
    }
    instance = {
        "id": "w10",
        "role": "prefill",
        "state": "DRAINING",
        "running": 512,
        "waiting": 1024,
        "blocks_total": 65_536,
        "blocks_free": 65_535,
        "blocks_cached": 65_534,
        "prefill_tok_s": 12_345.6,
        "decode_tok_s": 1234.5,
        "engine": {},
    }
    text = _for_people(
        {
            "state": "ready",
            "url": "http://127.0.0.1:8000",
            "model": "m",
            "run_dir": "/r",
            "mock": True,
            "services": [service],
            "instances": [instance],
        }
    )
    assert "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    for word in ("4194303", "123456 s", "65535", "65535/65536", "65534", "12,346", "1,234", "random words"):
        assert word in text


def test_a_second_tier_is_told_in_one_line():
    tier = {
        "id": "kvstore",
        "complete": {"m": 1200, "other": 34},
        "memory_bytes": 400 << 20,
        "memory_budget": 512 << 20,
        "disk_bytes": 0,
        "disk_budget": 0,
        "connections": 2,
        "hits": 90,
        "misses": 10,
        "corrupt": 0,
        "received_bytes_per_s": 3 << 20,
        "sent_bytes_per_s": 0,
    }
    assert tier_line(tier) == (
        "second tier of kvstore: 1234 blocks, 400 MiB of 512 MiB memory, 2 connection(s), "
        "fetches found 90 of 100 blocks, 3 MiB/s in, 0 B/s out"
    )
    spilled = tier | {"disk_bytes": 3 << 29, "disk_budget": 2 << 40, "corrupt": 1}
    assert "1.5 GiB of 2 TiB disk" in tier_line(spilled)
    assert "no worker connected" in tier_line(tier | {"connections": 0})
    assert "0.987 MiB/s out" in tier_line(tier | {"sent_bytes_per_s": 1011 << 10})
    assert "blocks, 1 corrupt," in tier_line(spilled)


@pytest.mark.parametrize("state", ["stopped", "failed", "ready"])
def test_status_of_a_mesh_that_does_not_run_says_how_to_start_one(tmp_path, state):
    run = RunDir(tmp_path)
    stopped = {"state": state, "error": "w0 cannot start: no weights", "supervisor": None, "services": []}
    run.write_state(stopped)
    text = _for_people(collect(run))
    assert text.startswith("dead" if state == "ready" else state)
    assert "`hortator up`" in text
    assert ("w0 cannot start: no weights" in text) == (state == "failed")


@pytest.mark.parametrize("subject", ["a b", "hortator.v1.>.x", "a..b", ".a", "a.", "", "a\tb"])
def test_a_subject_that_nats_would_refuse_is_told_before(subject):
    assert wrong_subject(subject)


@pytest.mark.parametrize("subject", [">", "hortator.v1.step.*", "hortator.>", "$SRV.>", "a.*.b"])
def test_a_subject_that_nats_takes_is_passed_on(subject):
    assert wrong_subject(subject) is None


def test_while_workers_load_nobody_is_told_to_start_one():
    """The gateway's advice, `start one with hortator worker`, is for meshes started by hand."""
    body = json.dumps({"reason": "the canary was refused (no_instance): no worker has been there for 20 s"})
    found = why_not_ready(body, Path("/run/log/w0.log"))
    assert "no worker has its model yet" in found
    assert "/run/log/w0.log" in found
    assert "start one" not in found
    assert why_not_ready('{"reason": "no canary"}', Path("x")) == "no canary"
    assert why_not_ready("<html>", Path("x")) == "<html>"
    assert why_not_ready("", Path("x")) == "the gateway does not answer yet"


def test_the_ranks_that_a_worker_waits_for_are_named_until_the_group_is_formed(tmp_path):
    log = tmp_path / "w0.log"
    waiting = (
        '{"event": "waiting for ranks", "missing": "rank 2 (node 1)", "why": "has not connected to a:1"}'
    )
    log.write_text(f"no json\n{waiting}\n[1]\n")
    found = why_not_ready('{"reason": "no_instance"}', log)
    assert found == f"rank 2 (node 1): has not connected to a:1: {log}"
    assert missing_ranks(f'{waiting}\n{{"event": "group formed"}}\n') == ""
