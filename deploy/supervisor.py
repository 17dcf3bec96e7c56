"""Child processes of a mesh: started in order, watched through pidfds, restarted, stopped in order."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from deploy.processes import ProcessId, die_with_parent, identify
from deploy.rundir import limit_log, tail

_PROBE_EVERY_S = 0.05
_LOG_CHECK_EVERY_S = 5.0


class State(Enum):
    STARTING = "starting"
    UP = "up"
    BACKOFF = "backoff"
    """It died and waits for its restart."""
    STOPPED = "stopped"


@dataclass(frozen=True)
class ChildSpec:
    """One process: what to run and how to see that it is up."""

    name: str
    """Unique in the mesh: `nats`, `gateway`, `w0`."""
    service: str
    instance: str
    rank: int | None
    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    log: Path
    is_up: Callable[[int], bool]
    """Gets the pid; called often, so it must be quick."""
    start_timeout_s: float = 60.0
    stop_grace_s: float = 5.0


@dataclass(frozen=True)
class Backoff:
    """Seconds before the n-th restart in a row; a child that lived for `reset_s` begins again."""

    first_s: float = 0.2
    most_s: float = 10.0
    reset_s: float = 30.0

    def delay_s(self, restarts: int) -> float:
        return min(self.most_s, self.first_s * 2.0 ** min(restarts, 30))


class StartFailed(RuntimeError):
    """A child did not come up; `reason` and the end of its log say why, `error` what it said itself."""

    def __init__(self, name: str, reason: str, log: Path) -> None:
        super().__init__(f"{name} {reason}")
        self.name = name
        self.reason = reason
        self.log = log
        self.last_lines = tail(log)
        self.error = told_error(self.last_lines)


def told_error(lines: str) -> str:
    """What a service said of why it cannot start, the last time it did; empty where it said nothing."""
    for line in reversed(lines.splitlines()):
        try:
            entry = json.loads(line)
            if entry["event"] == "cannot start":
                return str(entry["error"])
        except (ValueError, KeyError, TypeError):
            continue
    return ""


class Child:
    """One supervised process and its life so far."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.state = State.STOPPED
        self.process: ProcessId | None = None
        self.since = 0.0
        self.restarts = 0
        self.last_exit = ""
        self.exited = asyncio.Event()
        self.exited.set()
        self._popen: subprocess.Popen[bytes] | None = None

    def spawn(self) -> None:
        """Start the process. Raises OSError when its program cannot be run."""
        with self.spec.log.open("ab") as log:
            self._popen = subprocess.Popen(
                self.spec.argv,
                env=self.spec.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Its own session: Ctrl-C in the terminal reaches the supervisor alone, which stops in order.
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
        pid = self._popen.pid
        # Not reaped before our pidfd says so, hence the process can be identified even if it died at once.
        self.process = identify(pid) or ProcessId(pid, 0)
        self.since = time.time()
        self.state = State.STARTING
        self.exited.clear()
        pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(pidfd, self._on_exit, pidfd)

    def _on_exit(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        assert self._popen is not None
        code = self._popen.wait()
        self.last_exit = (
            f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        )
        self.process = None
        self.exited.set()

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.signal(number)

    async def wait_up(self) -> None:
        """Return once it is up. Raises `StartFailed` when it ends before that, or takes too long."""
        deadline = time.monotonic() + self.spec.start_timeout_s
        while True:
            if self.exited.is_set():
                raise StartFailed(self.spec.name, self.last_exit, self.spec.log)
            if self.process is not None and self.spec.is_up(self.process.pid):
                self.state = State.UP
                return
            if time.monotonic() > deadline:
                raise StartFailed(
                    self.spec.name, f"was not up within {self.spec.start_timeout_s:.0f} s", self.spec.log
                )
            try:
                await asyncio.wait_for(self.exited.wait(), _PROBE_EVERY_S)
            except TimeoutError:
                pass

    def view(self) -> dict[str, Any]:
        """The child as `state.json` shows it."""
        spec = self.spec
        return {
            "name": spec.name,
            "service": spec.service,
            "instance": spec.instance,
            "rank": spec.rank,
            "pid": self.process.pid if self.process else None,
            "start": self.process.start if self.process else None,
            "state": self.state.value,
            "since": self.since,
            "restarts": self.restarts,
            "last_exit": self.last_exit,
            "log": str(spec.log),
        }


class Supervisor:
    """Stages of children. The first comes up before the others, which start together: services wait for each
    other by the protocol, and only need the servers. Stopping goes stage by stage, from last to first.

    `changed` is called after every change of a child's state, `say` with lines for people.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[ChildSpec]],
        changed: Callable[[], None],
        say: Callable[[str], None],
        backoff: Backoff | None = None,
    ) -> None:
        self._stages = [[Child(spec) for spec in stage] for stage in stages]
        self._changed = changed
        self._say = say
        self._backoff = backoff or Backoff()
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False

    @property
    def children(self) -> list[Child]:
        return [child for stage in self._stages for child in stage]

    async def start(self) -> None:
        """Bring everything up once. Raises `StartFailed`, also if something that was up dies meanwhile."""
        started: list[Child] = []
        for group in (self._stages[0], [child for stage in self._stages[1:] for child in stage]):
            for child in group:
                self._spawn(child)
                started.append(child)
            self._changed()
            ups = asyncio.gather(*(self._come_up(child) for child in group))
            await self._unless_dying(ups, started)

    async def _come_up(self, child: Child) -> None:
        await child.wait_up()
        self._changed()

    async def _unless_dying(self, work: "asyncio.Future[Any]", children: Sequence[Child]) -> None:
        deaths = [asyncio.ensure_future(child.exited.wait()) for child in children]
        try:
            await asyncio.wait([work, *deaths], return_when=asyncio.FIRST_COMPLETED)
            if not work.done() or work.exception() is not None:
                self._raise_if_dead(children)
            await work
        finally:
            work.cancel()
            for death in deaths:
                death.cancel()
            await asyncio.gather(work, *deaths, return_exceptions=True)

    def raise_if_dead(self) -> None:
        """Raises `StartFailed` for the first child that has ended."""
        self._raise_if_dead(self.children)

    @staticmethod
    def _raise_if_dead(children: Sequence[Child]) -> None:
        for child in children:
            if child.exited.is_set():
                raise StartFailed(child.spec.name, child.last_exit, child.spec.log)

    def _spawn(self, child: Child) -> None:
        try:
            child.spawn()
        except OSError as error:
            raise StartFailed(child.spec.name, f"cannot be run: {error}", child.spec.log) from None

    def supervise(self) -> None:
        """From now on restart what dies."""
        self._keepers = [asyncio.create_task(self._keep(child)) for child in self.children]
        self._keepers.append(asyncio.create_task(self._limit_logs()))

    async def _keep(self, child: Child) -> None:
        in_a_row = 0
        while True:
            await child.exited.wait()
            if self._stopping:
                return
            lived_s = time.time() - child.since
            in_a_row = 0 if child.state is State.UP and lived_s > self._backoff.reset_s else in_a_row
            delay_s = self._backoff.delay_s(in_a_row)
            in_a_row += 1
            child.state = State.BACKOFF
            child.restarts += 1
            self._changed()
            self._say(f"{child.spec.name} {child.last_exit}; starting it again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)
            try:
                self._spawn(child)
                self._changed()
                await child.wait_up()
                self._say(f"{child.spec.name} is up again")
            except StartFailed as failure:
                # Ended: the loop sees it. Too slow: it gets a new life.
                child.last_exit = failure.reason
                await self._end(child)
            self._changed()

    async def _limit_logs(self) -> None:
        while True:
            for child in self.children:
                limit_log(child.spec.log)
            await asyncio.sleep(_LOG_CHECK_EVERY_S)

    async def stop(self) -> None:
        """Stop the stages from last to first: SIGTERM, each child's grace, SIGKILL."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for stage in reversed(self._stages):
            await asyncio.gather(*(self._end(child) for child in stage))
            for child in stage:
                child.state = State.STOPPED
            self._changed()

    async def _end(self, child: Child) -> None:
        child.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(child.exited.wait(), child.spec.stop_grace_s)
        except TimeoutError:
            self._say(f"{child.spec.name} did not end within {child.spec.stop_grace_s:.0f} s and is killed")
            child.signal(signal.SIGKILL)
            await child.exited.wait()

    def kill(self) -> None:
        """No more patience: SIGKILL to everything."""
        for child in self.children:
            child.signal(signal.SIGKILL)
