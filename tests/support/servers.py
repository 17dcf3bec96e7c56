"""NATS and Redis of a test, configured as `hortator up` configures them, on free ports of loopback."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
