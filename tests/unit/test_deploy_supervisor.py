"""Supervision with small shell scripts in the place of services."""

import asyncio
import itertools
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from deploy.processes import ProcessId, end, identify, with_environment
from deploy.supervisor import Backoff, ChildSpec, StartFailed, State, Supervisor

LIVES = "touch $FLAG; exec sleep 600"
QUICK = Backoff(first_s=0.02, most_s=0.1)


def spec(tmp_path: Path, name: str, script: str = LIVES, **limits: float) -> ChildSpec:
    flag = tmp_path / f"{name}.up"
    return ChildSpec(
        name=name,
        service=name,
        instance=name,
        rank=None,
        argv=("/bin/sh", "-c", script),
        env={"FLAG": str(flag), "PATH": os.environ["PATH"], "DIR": str(tmp_path)},
        log=tmp_path / f"{name}.log",
        is_up=lambda pid: flag.exists(),
        start_timeout_s=limits.get("start_timeout_s", 10.0),
        stop_grace_s=limits.get("stop_grace_s", 5.0),
    )


async def until(condition, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_the_first_stage_is_up_before_the_rest_and_stopping_goes_from_last_to_first(tmp_path):
    def script(name: str, needs: str = "") -> str:
        check = f"test -e $DIR/{needs}.up || exit 7; " if needs else "sleep 0.2; "
        return (
            f"{check}trap 'echo {name} >>$DIR/stops; exit 0' TERM; touch $FLAG; while :; do sleep 0.02; done"
        )

    chain = [[spec(tmp_path, n, script(n, needs))] for n, needs in (("a", ""), ("b", "a"), ("c", "a"))]
    supervisor = Supervisor(chain, lambda: None, lambda line: None)
    await supervisor.start()
    assert [child.state for child in supervisor.children] == [State.UP] * 3
    await supervisor.stop()
    assert (tmp_path / "stops").read_text().split() == ["c", "b", "a"]
    assert [child.state for child in supervisor.children] == [State.STOPPED] * 3
    assert all(child.process is None for child in supervisor.children)


async def test_a_dead_child_comes_back_with_a_new_pid_and_the_change_is_reported(tmp_path):
    states: list[str] = []
    supervisor = Supervisor(
        [[spec(tmp_path, "a")]],
        lambda: states.append(supervisor.children[0].state.value),
        lambda line: None,
        QUICK,
    )
    await supervisor.start()
    supervisor.supervise()
    child = supervisor.children[0]
    first = child.process
    assert first is not None
    first.signal(signal.SIGKILL)
    await until(lambda: child.restarts == 1 and child.state is State.UP)
    assert child.process is not None
    assert child.process != first
    assert child.last_exit == "was killed by SIGKILL"
    assert "backoff" in states
    await supervisor.stop()


async def test_a_child_that_keeps_dying_is_restarted_ever_more_slowly(tmp_path):
    starts = tmp_path / "starts"
    script = "date +%s.%N >>$DIR/starts; test -e $FLAG && exit 3; touch $FLAG; exec sleep 600"
    supervisor = Supervisor(
        [[spec(tmp_path, "a", script)]], lambda: None, lambda line: None, Backoff(first_s=0.05, most_s=10.0)
    )
    await supervisor.start()
    supervisor.supervise()
    supervisor.children[0].signal(signal.SIGKILL)
    await until(lambda: len(starts.read_text().split()) >= 5)
    times = [float(line) for line in starts.read_text().split()]
    gaps = [b - a for a, b in itertools.pairwise(times[1:])]
    assert gaps[1] > 1.5 * 0.05
    assert gaps[2] > 1.5 * 0.1
    await supervisor.stop()


def test_backoff_doubles_up_to_its_limit():
    backoff = Backoff(first_s=0.2, most_s=10.0)
    assert [backoff.delay_s(n) for n in (0, 1, 2, 100)] == [0.2, 0.4, 0.8, 10.0]


async def test_a_child_that_ends_during_the_start_fails_it_with_its_last_words(tmp_path):
    chain = [[spec(tmp_path, "a")], [spec(tmp_path, "b", "echo no such model; exit 3")]]
    supervisor = Supervisor(chain, lambda: None, lambda line: None)
    with pytest.raises(StartFailed) as failed:
        await supervisor.start()
    assert failed.value.name == "b"
    assert failed.value.reason == "ended with exit code 3"
    assert failed.value.last_lines == "no such model"
    await supervisor.stop()
    assert all(child.process is None for child in supervisor.children)


async def test_the_death_of_an_earlier_stage_fails_a_start_that_would_wait_for_long(tmp_path):
    chain = [
        [spec(tmp_path, "a", "touch $FLAG; sleep 0.2; exit 4")],
        [spec(tmp_path, "b", "exec sleep 600", start_timeout_s=60.0)],
    ]
    supervisor = Supervisor(chain, lambda: None, lambda line: None)
    began = time.monotonic()
    with pytest.raises(StartFailed, match="a ended with exit code 4"):
        await supervisor.start()
    assert time.monotonic() - began < 10
    await supervisor.stop()


async def test_a_program_that_does_not_exist_fails_the_start_by_name(tmp_path):
    missing = spec(tmp_path, "a")
    missing = ChildSpec(**{**vars(missing), "argv": ("/no/such/program",)})
    supervisor = Supervisor([[missing]], lambda: None, lambda line: None)
    with pytest.raises(StartFailed, match=r"a cannot be run: .*/no/such/program"):
        await supervisor.start()
    await supervisor.stop()


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path):
    stubborn = spec(
        tmp_path, "a", "trap '' TERM; touch $FLAG; while :; do sleep 0.05; done", stop_grace_s=0.2
    )
    said: list[str] = []
    supervisor = Supervisor([[stubborn]], lambda: None, said.append)
    await supervisor.start()
    await supervisor.stop()
    assert supervisor.children[0].process is None
    assert any("is killed" in line for line in said)


def test_children_die_with_a_killed_supervisor(tmp_path):
    pids = tmp_path / "pids"
    code = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_deploy_supervisor import spec
from deploy.supervisor import Supervisor

async def main():
    supervisor = Supervisor([[spec(Path({str(tmp_path)!r}), n) for n in "ab"]], lambda: None, print)
    await supervisor.start()
    text = " ".join(str(c.process.pid) for c in supervisor.children)
    Path({str(pids)!r} + ".new").write_text(text)
    Path({str(pids)!r} + ".new").rename({str(pids)!r})
    await asyncio.sleep(600)

asyncio.run(main())
"""
    parent = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 20
        while not pids.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        children = [identify(int(pid)) for pid in pids.read_text().split()]
        assert None not in children
    finally:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    assert all(child is None or child.wait(5.0) for child in children)
    assert not any(child.alive for child in children if child)


def test_a_recycled_pid_is_never_signalled():
    me = identify(os.getpid())
    assert me is not None
    assert me.alive
    impostor = ProcessId(me.pid, me.start - 1)
    assert not impostor.alive
    assert impostor.signal(signal.SIGKILL) is False
    assert impostor.wait(0.0) is True


def test_a_zombie_counts_as_gone():
    pid = os.spawnv(os.P_NOWAIT, "/bin/true", ["true"])
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert identify(pid) is None
    os.waitpid(pid, 0)


def test_processes_are_found_by_a_mark_in_their_environment(tmp_path):
    mark = f"{tmp_path}/ready/"
    pid = os.spawnve(os.P_NOWAIT, "/bin/sleep", ["sleep", "600"], {"HORTATOR_READY_FILE": mark + "w0.json"})
    deadline = time.monotonic() + 5
    while not (found := with_environment("HORTATOR_READY_FILE", mark)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [process.pid for process in found] == [pid]
    assert with_environment("HORTATOR_READY_FILE", mark + "other") == []
    assert end(found, 5.0) == []
    os.waitpid(pid, 0)
    assert with_environment("HORTATOR_READY_FILE", mark) == []
