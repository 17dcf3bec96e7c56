"""The run directory: who may use it, and that its files are whole and private."""

import json
import os
import stat
import subprocess
import sys

import pytest

from deploy.rundir import RunDir, RunDirError, default_run_dir, limit_log, tail


def test_everything_in_a_run_directory_is_for_its_user_only(tmp_path):
    run = RunDir(tmp_path / "mesh")
    run.claim()
    secret = run.write("credentials.json", "{}")
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    run.release()


def test_a_second_mesh_in_the_same_directory_is_told_what_to_do(tmp_path):
    run = RunDir(tmp_path / "mesh")
    run.claim()
    run.write_state({"supervisor": {"pid": 4711}})
    with pytest.raises(RunDirError, match=r"already running.*4711.*hortator down --run-dir"):
        RunDir(tmp_path / "mesh").claim()
    run.release()
    again = RunDir(tmp_path / "mesh")
    again.claim()
    again.release()


def test_a_lock_of_a_killed_process_is_no_obstacle(tmp_path):
    code = f"""
import os
from pathlib import Path
from deploy.rundir import RunDir
RunDir(Path({str(tmp_path)!r})).claim()
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert (tmp_path / "lock").exists()
    run = RunDir(tmp_path)
    run.claim()
    run.release()


def test_release_leaves_neither_lock_nor_secrets_but_keeps_state_and_logs(tmp_path):
    run = RunDir(tmp_path)
    run.claim()
    run.write("credentials.json", "{}")
    run.write("conf/nats.conf", "x")
    run.write_state({"state": "stopped"})
    run.log("nats").write_text("a line\n")
    run.release()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "state.json"]


def test_looking_at_a_directory_without_a_mesh_creates_nothing(tmp_path):
    run = RunDir(tmp_path / "none")
    assert run.read_state() is None
    run.refuse_if_claimed()
    assert not run.path.exists()


def test_a_damaged_state_file_is_named(tmp_path):
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(RunDirError, match=r"state\.json is damaged"):
        RunDir(tmp_path).read_state()


def test_state_is_replaced_and_never_half_written(tmp_path):
    run = RunDir(tmp_path)
    run.claim()
    run.write_state({"n": 1})
    reader = open(tmp_path / "state.json")  # noqa: SIM115
    run.write_state({"n": 2})
    assert json.load(reader) == {"n": 1}
    assert run.read_state() == {"n": 2}
    reader.close()
    run.release()


def test_a_log_that_outgrew_its_limit_moves_aside_while_its_writer_goes_on(tmp_path):
    log = tmp_path / "a.log"
    with open(log, "ab") as writer:
        writer.write(b"x" * 100 + b"\n")
        writer.flush()
        assert limit_log(log, 200) is False
        assert limit_log(log, 50) is True
        writer.write(b"after\n")
    assert log.read_bytes() == b"after\n"
    assert (tmp_path / "a.log.1").stat().st_size == 101


def test_tail_gives_the_last_lines_also_of_a_missing_or_binary_log(tmp_path):
    log = tmp_path / "a.log"
    assert tail(log) == ""
    log.write_bytes(b"\xff\n" + b"".join(b"line %d\n" % i for i in range(5000)))
    assert tail(log, 2) == "line 4998\nline 4999"


def test_the_default_directory_honours_xdg():
    assert str(default_run_dir({"XDG_STATE_HOME": "/s"})) == "/s/hortator/default"
    assert str(default_run_dir({})) == os.path.expanduser("~/.local/state/hortator/default")
