"""The second tier through the mesh: prefixes survive their worker, victims come back, damage does no harm.

Mocks refuse to go on from blocks that hold anything but what their ids make of them, so a wrong restore ends
the instance; of the model, tokens tell.
"""

import json
import os
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deploy.rundir import RunDir
from tests.support.mesh import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]

GOLDEN = json.loads((Path(__file__).parents[1] / "data/golden.json").read_text())
TOKEN_S = 0.001
PREFIX = [500 + i % 997 for i in range(1500)]


def complete(mesh: Mesh, ids: list[int], max_tokens: int, **more: Any) -> tuple[list[int], float]:
    """Tokens, and seconds until all were there."""
    body = {
        "model": "smol",
        "prompt": ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
    } | more
    request = urllib.request.Request(
        f"{mesh.base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)["choices"][0]["token_ids"], time.monotonic() - began


def sample(mesh: Mesh, instance: str, beginning: str) -> float:
    """Of the first metric of a process whose line begins so; 0 if there is none, or nobody answers."""
    try:
        address = json.loads(RunDir(mesh.run_dir).ready_file(instance).read_text())["http"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except (OSError, ValueError):
        return 0.0
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(beginning)), 0.0)


def blocks(mesh: Mesh, what: str) -> int:
    """Of worker w0, since its start."""
    return int(sample(mesh, "w0", f'hortator_worker_tier_blocks_total{{what="{what}"}}'))


def wait(true: Any, limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"{what} within {limit_s} s"
        time.sleep(0.02)


def restart(mesh: Mesh, instance: str, number: signal.Signals = signal.SIGKILL) -> None:
    """End a process of the mesh, whose supervisor starts it again, and see it back."""
    former = mesh.processes()[instance].pid
    os.kill(former, number)
    wait(lambda: mesh.processes().get(instance) and mesh.processes()[instance].pid != former, 60, "restarted")
    wait(lambda: can_fetch(mesh), 120, "ready again")


def can_fetch(mesh: Mesh) -> bool:
    """Everybody knows all there is to know: worker w0 its tier, the index what that holds, the scheduler w0,
    whose canary was computed in its present life."""
    return (
        sample(mesh, "w0", 'hortator_worker_tier_block_seconds{how="fetch"}') > 0
        and sample(mesh, "w0", 'hortator_worker_frames_total{verdict="run"}') >= 2
        and sample(mesh, "kvstore", 'hortator_kvstore_index_blocks{instance="tier-') >= len(PREFIX) // 16
        and [row["state"] for row in mesh.status()["instances"]] == ["ready"]
    )


def test_a_restarted_worker_is_served_its_prefix_by_the_tier(tmp_path: Path) -> None:
    with Mesh.start(tmp_path, "--mock", "--set", f"worker.mock_token_s={TOKEN_S}") as mesh:
        expected, computed_s = complete(mesh, PREFIX, 1)
        wait(lambda: blocks(mesh, "sent") >= len(PREFIX) // 16, 20, "all blocks in the tier")
        restart(mesh, "w0")
        tokens, restored_s = complete(mesh, PREFIX, 1)
        assert tokens == expected
        wait(lambda: blocks(mesh, "fetched") == len(PREFIX) // 16, 5, "all blocks were fetched")
        assert restored_s <= computed_s / 4, f"{restored_s:.3f} s against {computed_s:.3f} s"


def test_damage_on_the_tiers_disk_is_computed_anew(tmp_path: Path) -> None:
    flags = ("--mock", "--set", f"worker.mock_token_s={TOKEN_S}", "--tier-disk", "64MiB")
    with Mesh.start(tmp_path, *flags) as mesh:
        expected, _ = complete(mesh, PREFIX, 4)
        wait(lambda: blocks(mesh, "sent") >= len(PREFIX) // 16, 20, "all blocks in the tier")
        files = spoil_disk_of(mesh)
        assert files
        tokens, _ = complete(mesh, PREFIX, 4)
        assert tokens == expected
        wait(lambda: blocks(mesh, "missed") > 0, 5, "a fetch got less than it asked for")
        # The instance is well, and what it computed goes there again.
        assert complete(mesh, PREFIX, 4)[0] == expected


def spoil_disk_of(mesh: Mesh) -> list[Path]:
    """Change what the tier wrote at its end, before it reads it again; the worker is restarted after that."""
    former = mesh.processes()["kvstore"].pid
    os.kill(former, signal.SIGTERM)
    wait(lambda: not Path(f"/proc/{former}").exists(), 30, "kvstore has ended")
    files = list((mesh.run_dir / "tier").glob("*.segment"))
    for path in files:
        raw = bytearray(path.read_bytes())
        # Contents, not headers: those of records with a damaged header are not even found.
        for start in range(512, len(raw), 512 + 64):
            raw[start] ^= 1
        path.write_bytes(raw)
    wait(
        lambda: mesh.processes().get("kvstore") and mesh.processes()["kvstore"].pid != former,
        60,
        "it is back",
    )
    restart(mesh, "w0")
    return files


def make_way(mesh: Mesh, long: list[tuple[list[int], int]], urgent: list[tuple[list[int], int]]) -> Any:
    """Tokens of `long` requests, while whose run `urgent` ones need all the blocks, and of those."""
    mine = {"seed": 1, "ignore_eos": True}
    with ThreadPoolExecutor(len(long) + len(urgent)) as clients:
        asked = [clients.submit(complete, mesh, *each, priority=9, **mine) for each in long]
        running = "hortator_instance_running"
        wait(lambda: sample(mesh, "scheduler", running) == len(long), 30, "the long ones run")
        more = [clients.submit(complete, mesh, *each, priority=0, **mine) for each in urgent]
        return [each.result()[0] for each in asked], [each.result()[0] for each in more]


def check_restored(mesh: Mesh) -> None:
    assert mesh.metric("scheduler", "hortator_scheduler_preemptions_total") > 0
    wait(lambda: blocks(mesh, "fetched") > 0, 5, "blocks were fetched")
    # Nothing came back wrong, and nothing is left held.
    (instance,) = mesh.status()["instances"]
    assert instance["blocks_free"] == instance["blocks_total"]
    assert sample(mesh, "w0", "hortator_worker_tier_fetching") == 0


def test_preempted_mocks_are_restored_from_the_tier_and_draw_the_same_tokens(tmp_path: Path) -> None:
    long = [([seed, *range(500, 690)], 300) for seed in (1, 2)]
    urgent = [([seed, *range(700, 890)], 40) for seed in range(3, 9)]
    tight = ("--set", "worker.mock_blocks=80", "--set", "worker.mock_token_s=0.002")
    with Mesh.start(tmp_path, "--mock", *tight, "--set", "gateway.queue_timeout_s=200") as mesh:
        mine = {"seed": 1, "ignore_eos": True}
        expected = [complete(mesh, *each, **mine)[0] for each in long]
        assert make_way(mesh, long, urgent)[0] == expected
        check_restored(mesh)


@pytest.mark.model
def test_golden_after_preemption_and_restore_at_float32(tmp_path: Path) -> None:
    """KV for a few sequences only."""
    cases = sorted(GOLDEN, key=lambda case: len(case["golden"]))
    asked = [(case["ids"], len(case["golden"])) for case in cases]
    tight = ("--dtype", "float32", "--kv-memory", "24MiB", "--set", "worker.block_tokens=16")
    with Mesh.start(tmp_path, *tight, "--set", "gateway.queue_timeout_s=300") as mesh:
        long, urgent = make_way(mesh, asked[-2:], asked[:-2] * 2)
        assert long == [case["golden"] for case in cases[-2:]]
        assert urgent == [case["golden"] for case in cases[:-2]] * 2
        check_restored(mesh)


@pytest.mark.model
def test_the_models_prefix_outlives_its_worker(tmp_path: Path) -> None:
    ids = [token for case in GOLDEN for token in (*case["ids"], *case["golden"])]
    ids = (ids * (1500 // len(ids) + 1))[:1500]
    with Mesh.start(tmp_path, "--dtype", "float32", "--set", "worker.block_tokens=16") as mesh:
        expected, _ = complete(mesh, ids, 16)
        # The second time nothing is computed but the end: what the first takes besides is the prefix.
        _, computed_s = complete(mesh, [ids[0] + 1, *ids[1:]], 1)
        wait(lambda: blocks(mesh, "sent") >= len(ids) // 16, 30, "all blocks in the tier")
        restart(mesh, "w0")
        tokens, restored_s = complete(mesh, ids, 1)
        assert tokens == expected[:1]
        wait(lambda: blocks(mesh, "fetched") >= len(ids) // 16 - 1, 5, "all blocks were fetched")
        assert restored_s <= computed_s / 4, f"{restored_s:.3f} s against {computed_s:.3f} s"
        assert complete(mesh, ids, 16)[0] == expected
