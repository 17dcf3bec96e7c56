"""A mesh as real processes, started with `hortator up` and checked to leave nothing behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.down import leftovers
from deploy.processes import ProcessId, die_with_parent
from deploy.rundir import RunDir

HORTATOR = (sys.executable, "-P", "-m", "deploy.cli")


@dataclass
class Mesh:
    """A running mesh. `process` is its supervisor; `output` what that printed."""

    run_dir: Path
    base_url: str
    process: subprocess.Popen[bytes]
    output: Path

    @classmethod
    @contextmanager
    def start(cls, folder: Path, *flags: str, timeout_s: float = 240.0) -> Iterator["Mesh"]:
        """`hortator up` on free ports with its run directory in `folder`; ready when this yields.

        Afterwards it is stopped with SIGTERM, and `assert_nothing_left` holds.
        """
        mesh = cls.launch(folder, *flags, timeout_s=timeout_s)
        try:
            yield mesh
        finally:
            shared = mesh.shared_memory()
            mesh.stop()
        mesh.assert_nothing_left(shared)

    @classmethod
    def launch(cls, folder: Path, *flags: str, timeout_s: float = 240.0) -> "Mesh":
        """The same without the end: the caller stops it, or kills what it wants to see die."""
        run_dir, output = folder / "run", folder / "up.log"
        args = [*HORTATOR, "up", "--run-dir", str(run_dir)]
        if "--http" not in flags:
            args += ["--http", "127.0.0.1:0"]
        with output.open("wb") as out:
            process = subprocess.Popen(
                [*args, *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent(os.getpid()),
            )
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(r"^ready (http://\S+)", output.read_text(), re.MULTILINE)):
            if process.poll() is not None:
                raise RuntimeError(f"hortator up ended with {process.returncode}:\n{output.read_text()}")
            if time.monotonic() > deadline:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
                raise TimeoutError(f"not ready within {timeout_s} s:\n{output.read_text()}")
            time.sleep(0.02)
        return cls(run_dir, found[1], process, output)

    def stop(self, timeout_s: float = 60.0) -> None:
        """Ordered end by SIGTERM; whatever is left of a killed supervisor by `hortator down`."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout_s)
        finally:
            self.process.kill()
            self.process.wait()
            self.hortator("down")

    def hortator(
        self, command: str, *args: str, timeout_s: float = 90.0
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command of the command line on this mesh."""
        return subprocess.run(
            [*HORTATOR, command, "--run-dir", str(self.run_dir), *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def status(self) -> dict[str, Any]:
        return json.loads(self.hortator("status", "--json").stdout)

    def service(self, instance: str) -> dict[str, Any]:
        """The row of `status` for one process, by its instance name."""
        return next(row for row in self.status()["services"] if row["instance"] == instance)

    def processes(self) -> dict[str, ProcessId]:
        """Living processes by instance name, as the supervisor recorded them."""
        state = RunDir(self.run_dir).read_state() or {}
        return {
            row["name"]: ProcessId(row["pid"], row["start"])
            for row in state.get("services", [])
            if row["pid"]
        }

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
        """Status and body of a GET on the gateway; 0 when nobody answers."""
        try:
            with urllib.request.urlopen(self.base_url + path, timeout=timeout_s) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Until `/ready` says so again."""
        deadline = time.monotonic() + timeout_s
        while (last := self.get("/ready"))[0] != 200:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready again within {timeout_s} s, last answer {last}\n{self.logs()}")
            time.sleep(0.05)

    def metric(self, instance: str, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels at one service. Raises KeyError when there is none."""
        with urllib.request.urlopen(f"http://{self.service(instance)['http']}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        values = [
            float(value)
            for labelled, _, value in samples
            if labelled.partition("{")[0] == name and all(each in labelled for each in wanted)
        ]
        if not values:
            raise KeyError(f"{instance} has no metric {name}")
        return sum(values)

    def nats_operator(self) -> tuple[str, str, str]:
        """URL, user and password with which an internal client may talk to the mesh."""
        run = RunDir(self.run_dir)
        state, credentials = run.read_state(), run.read_credentials()
        assert state
        assert credentials
        return state["nats_url"], "operator", credentials["nats"]["operator"]

    def shared_memory(self) -> set[str]:
        """Files under /dev/shm that processes of this mesh have mapped."""
        mapped = set()
        for process in self.processes().values():
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:
                continue
            mapped |= set(re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE))
        return mapped

    def assert_nothing_left(self, shared_memory: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """No process, listening port, shared memory, lock or secret."""
        run = RunDir(self.run_dir)
        assert leftovers(run, run.read_state()) == []
        assert [path for path in shared_memory if Path(path).exists()] == []
        # Blocks on disk outlive a mesh.
        assert {path.name for path in self.run_dir.iterdir()} - {"tier"} == {"log", "state.json"}
        port = int(self.base_url.rpartition(":")[2])
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} still answers"

    def logs(self, lines: int = 15) -> str:
        """The ends of all logs, for the message of a failure."""
        parts = [self.output.read_text()]
        for path in sorted((self.run_dir / "log").glob("*.log")):
            parts.append(f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-lines:]))
        return "\n".join(parts)
