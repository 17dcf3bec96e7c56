"""`hortator up --tp`: a mesh whose instance is a group, and nodes that run nothing but its ranks."""

import os
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deploy.processes import die_with_parent
from deploy.servers import free_port
from tests.integration.test_group_mock import lives, pids_of, until_gone
from tests.integration.test_up_mesh import complete
from tests.support.mesh import HORTATOR, Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]


def group_of(mesh: Mesh) -> dict[int, int]:
    """Rank → pid, as `status` tells."""
    return pids_of(mesh.status()["instances"][0]["engine"]["ranks"])


def until(what: Any, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_group_serves_comes_back_after_the_loss_of_a_rank_and_leaves_nothing(tmp_path: Path) -> None:
    with Mesh.start(tmp_path, "--mock", "--tp", "2") as mesh:
        assert complete(mesh)["usage"]["completion_tokens"] == 8
        pids = group_of(mesh)
        assert f"1: {pids[1]}" in mesh.hortator("status").stdout
        assert mesh.status()["instances"][0]["state"].lower() == "ready"

        os.kill(pids[1], signal.SIGKILL)
        assert until_gone([pids[0]], 3.0) < 3.0
        until(lambda: mesh.service("w0")["restarts"] == 1)
        assert complete(mesh)["usage"]["completion_tokens"] == 8
        assert (
            f"rank 1 (pid {pids[1]}) was killed by SIGKILL" in (mesh.run_dir / "log" / "w0.log").read_text()
        )

        pids = group_of(mesh)
        os.kill(pids[0], signal.SIGKILL)
        assert until_gone([pids[1]], 1.0) < 1.0
        until(lambda: mesh.service("w0")["restarts"] == 2)
        assert complete(mesh)["usage"]["completion_tokens"] == 8
        pids = group_of(mesh)
    assert not any(lives(pid) for pid in pids.values())


def test_ranks_of_a_killed_supervisor_end_with_it(tmp_path: Path) -> None:
    mesh = Mesh.launch(tmp_path, "--mock", "--tp", "2")
    pids = group_of(mesh)
    mesh.process.kill()
    mesh.process.wait()
    assert until_gone(list(pids.values()), 2.0) < 2.0
    mesh.hortator("down")
    mesh.assert_nothing_left()


def test_a_second_node_runs_nothing_but_ranks(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of this test\n")
    group = ["--mock", "--tp", "2", "--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}"]
    group += ["--group-secret-file", str(secret)]
    other = tmp_path / "other"
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "other.log").open("wb"))
        node = subprocess.Popen(
            [*HORTATOR, "up", "--run-dir", str(other), *group, "--node-rank", "1"],
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent(os.getpid()),
        )
        stack.callback(node.wait)
        stack.callback(node.kill)
        with Mesh.start(tmp_path, *group) as mesh:
            assert complete(mesh)["usage"]["completion_tokens"] == 8
            said = (tmp_path / "other.log").read_text()
            assert "ready: the ranks of node 1 are in their group" in said
            shown = subprocess.run(
                [*HORTATOR, "status", "--run-dir", str(other)], capture_output=True, text=True, check=False
            )
            assert shown.returncode == 0, shown.stderr
            services = [line.split()[0] for line in shown.stdout.splitlines() if " up " in line]
            assert services == ["worker"]

            # The group forms anew whichever node's part is lost.
            (rank,) = [int(pid) for pid in group_of_other(mesh)]
            os.kill(rank, signal.SIGKILL)
            until(lambda: mesh.service("w0")["restarts"] == 1)
            assert complete(mesh)["usage"]["completion_tokens"] == 8
        node.send_signal(signal.SIGTERM)
        assert node.wait(20) == 0
        assert "stopped" in (tmp_path / "other.log").read_text()


def test_a_node_that_differs_ends_with_what_differs(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of this test\n")
    group = ["--mock", "--tp", "2", "--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}"]
    group += ["--group-secret-file", str(secret)]
    up = [*HORTATOR, "up", "--run-dir"]
    with (tmp_path / "up.log").open("wb") as log:
        lead = subprocess.Popen(
            [*up, str(tmp_path / "run"), *group, "--http", "127.0.0.1:0"],
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent(os.getpid()),
        )
    try:
        node = [*up, str(tmp_path / "other"), *group, "--node-rank", "1", "--set", "worker.block_tokens=32"]
        ended = subprocess.run(node, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 1
        assert "w0 cannot start: rank 1 (node 1, " in ended.stdout
        assert "block_tokens is 32, of rank 0 0; start all nodes with the same" in ended.stdout
        assert lead.poll() is None
    finally:
        lead.send_signal(signal.SIGTERM)
        assert lead.wait(30) == 0


def group_of_other(mesh: Mesh) -> list[str]:
    """Pids of ranks that other nodes run."""
    ranks = mesh.status()["instances"][0]["engine"]["ranks"].split(", ")
    return [part.split()[1] for part in ranks if " on " in part]
