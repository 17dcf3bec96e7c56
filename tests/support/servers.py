"""Real servers for tests, on free ports of loopback.

`nats_server` and `redis_server` are bare ones that a test can stop, start again and freeze; `secured_servers`
is the pair as `hortator up` configures it.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from deploy.credentials import Credentials, generate, nats_config, redis_config
from deploy.servers import find_nats, find_redis, free_port, nats_probe, redis_probe


@dataclass(frozen=True)
class Servers:
    nats_port: int
    redis_port: int
    credentials: Credentials

    @property
    def nats_url(self) -> str:
        return f"nats://127.0.0.1:{self.nats_port}"


@contextmanager
def secured_servers(folder: Path, instances: tuple[str, ...] = ("w0", "w1")) -> Iterator[Servers]:
    """Both servers with the credentials and permissions of a mesh with these instances."""
    servers = Servers(free_port(), free_port(), generate(instances))
    (folder / "nats.conf").write_text(nats_config(servers.credentials, servers.nats_port, "test"))
    (folder / "redis.conf").write_text(redis_config(servers.credentials, servers.redis_port, folder))
    processes = []
    try:
        for program, args in (
            (find_nats(), ["-c", folder / "nats.conf"]),
            (find_redis(), [folder / "redis.conf"]),
        ):
            with open(folder / f"{Path(program).name}.log", "wb") as log:
                processes.append(subprocess.Popen([program, *args], stdout=log, stderr=log))
        _until(nats_probe(servers.nats_port), folder)
        _until(redis_probe(servers.redis_port, "operator", servers.credentials.redis["operator"]), folder)
        yield servers
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(10)


def _until(probe: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + 15
    while not probe():
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text() for path in folder.glob("*.log"))
            raise TimeoutError(f"a server did not come up:\n{logs}")
        time.sleep(0.02)


@dataclass
class RunningServer:
    """A server process on 127.0.0.1:`port` that can be stopped, started again on that port, and frozen."""

    command: list[str]
    port: int
    config: str = ""
    """Written to the program's stdin at start."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Returns once it accepts connections. Raises RuntimeError with the program's output when it ends."""
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self.process.stdin is not None
        self.process.stdin.write(self.config.encode())
        self.process.stdin.close()
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                assert self.process.stdout is not None
                raise RuntimeError(f"{self.command[0]} ended: {self.process.stdout.read().decode()[-2000:]}")
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2):
                return
            time.sleep(0.01)
        raise RuntimeError(f"{self.command[0]} does not listen on port {self.port}")

    def stop(self) -> None:
        """Kill it and wait. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()
            self.process = None

    def freeze(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)


def _started(server_on: Callable[[int], RunningServer]) -> RunningServer:
    """A server on a free port; on another one if somebody else took that in the meantime."""
    for _ in range(3):
        server = server_on(free_port())
        try:
            server.start()
            return server
        except RuntimeError as error:
            server.stop()
            failure = error
    raise failure


@contextmanager
def nats_server(folder: Path, authorization: str = "") -> Iterator[RunningServer]:
    """`authorization`: the body of NATS' `authorization { }` block, e.g. users with permissions."""
    block = f"authorization {{ {authorization} }}\n" if authorization else ""

    def on(port: int) -> RunningServer:
        config = folder / f"nats-{port}.conf"
        config.write_text(f'listen: "127.0.0.1:{port}"\n{block}')
        return RunningServer([str(find_nats()), "-c", str(config)], port)

    server = _started(on)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def redis_server(acl: str = "") -> Iterator[RunningServer]:
    """`acl`: `user` lines of the configuration; empty: the default user may do everything."""

    def on(port: int) -> RunningServer:
        config = f'bind 127.0.0.1\nport {port}\nsave ""\nappendonly no\n{acl}\n'
        return RunningServer([str(find_redis()), "-"], port, config)

    server = _started(on)
    try:
        yield server
    finally:
        server.stop()
