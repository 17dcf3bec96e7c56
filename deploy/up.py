"""`hortator up`: one mesh on this machine, supervised from its start to its end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from deploy import credentials as users
from deploy.down import leftovers, stopped
from deploy.mesh import Places, stages
from deploy.options import (
    BadOption,
    UpOptions,
    check_formats,
    check_group,
    check_settings,
    check_tier,
    instance_names,
    parse_http,
)
from deploy.processes import end, identify
from deploy.rundir import RunDir, RunDirError, tail
from deploy.servers import MissingServer, find_nats, find_redis, free_port, port_taken
from deploy.supervisor import ChildSpec, StartFailed, Supervisor
from services.worker.engine.resident import room_here
from services.worker.fit import AUTO
from services.worker.settings import parse_bytes
from shared.model.errors import ModelError
from shared.model.folder import ModelFolder
from shared.model.resolve import resolve
from shared.runtime.settings import SettingsError

_READY_TIMEOUT_S = 600.0
_NEWS_EVERY_S = 10.0


def up(options: UpOptions, *, detach: bool) -> int:
    """Run a mesh until a signal ends it (or, detached, until it is ready). Returns the exit status."""
    if not hasattr(os, "pidfd_open"):
        return _fail("starting a mesh needs Linux (pidfd); run the services in containers instead")
    try:
        _check(options)
        model = resolve(options.model)
        if detach:
            return _detached(options)
        return _in_foreground(options, model)
    except (BadOption, RunDirError, MissingServer, ModelError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130


def _fail(reason: str) -> int:
    print(f"hortator up: {reason}", file=sys.stderr)
    return 1


def say(line: str) -> None:
    """A line for the person who started the mesh; nobody may be there any more."""
    try:
        print(line, flush=True)
    except OSError:
        pass


def _check(options: UpOptions) -> None:
    instance_names(options.instances)
    check_group(options)
    check_formats(options)
    try:
        if options.kv_memory != AUTO:
            parse_bytes(options.kv_memory)
    except SettingsError as error:
        raise BadOption(f"--kv-memory: {error}") from None
    check_tier(options, room_here().bytes)
    check_settings(options.set)
    if options.node_rank:
        return
    host, port = parse_http(options.http)
    try:
        taken = port_taken(host, port)  # port 0 never is, but the host is checked
    except OSError as error:
        raise BadOption(
            f"--http {options.http}: {host} is not an address of this machine ({error.strerror})"
        ) from None
    if taken:
        # Nothing can run twice in one directory either, and that would be the better explanation.
        RunDir(options.run_dir).refuse_if_claimed()
        raise BadOption(
            f"port {port} on {host} is in use: choose another with --http {host}:PORT (port 0: any free one)"
        )
    if options.api_key_file is not None:
        first_key(options.api_key_file)


def first_key(file: Path) -> str:
    """A key of the file (lines `key [tenant]`, `#` begins a comment): the gateway answers nobody without."""
    try:
        lines = file.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption(f"--api-key-file {file} cannot be read: {error}") from None
    for line in lines:
        if words := line.split("#", 1)[0].split():
            return words[0]
    raise BadOption(f"--api-key-file {file} holds no key: write lines `key [tenant]`")


def _in_foreground(options: UpOptions, model: ModelFolder) -> int:
    run = RunDir(options.run_dir)
    run.claim()
    try:
        end(leftovers(run, run.read_state()), 5.0)  # of a supervisor that was killed
        return asyncio.run(_Mesh(options, run, model).live())
    finally:
        run.release()


class _Mesh:
    """One life of a mesh: configuration written, processes started, supervised, stopped."""

    def __init__(self, options: UpOptions, run: RunDir, model: ModelFolder) -> None:
        self._options = options
        self._run = run
        host, port = parse_http(options.http)
        port = port or free_port(host)
        self._places = Places(
            nats_program="" if options.node_rank else find_nats(),
            redis_program="" if options.node_rank else find_redis(),
            nats_port=free_port(),
            redis_port=free_port(),
            model_name=model.name,
            model_folder=model.path,
            model_aliases=model.aliases,
            http=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        )
        reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        self._url = f"http://{reachable}:{port}"
        self._open_to_all = host not in ("127.0.0.1", "::1", "localhost") and options.api_key_file is None
        self._state = "starting"
        self._announced = False  # what a detached one's starter waits for: by then all lines are in the log
        self._error = ""
        self._started = time.time()
        self._signals = 0

    async def live(self) -> int:
        self._supervisor = Supervisor(self._configure(), self._record, say)
        self._stopping = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        self._record()
        bring_up = asyncio.ensure_future(self._bring_up())
        stop = asyncio.ensure_future(self._stopping.wait())
        failed = False
        try:
            await asyncio.wait([bring_up, stop], return_when=asyncio.FIRST_COMPLETED)
            if not self._stopping.is_set():
                await bring_up
                self._supervisor.supervise()
                self._set_state("ready")
                self._announce()
                self._announced = True
                self._record()
                await stop
        except StartFailed as failure:
            failed = True
            self._error = f"{failure.name} cannot start: {failure.error}" if failure.error else str(failure)
            self._explain(failure)
        finally:
            bring_up.cancel()
            stop.cancel()
            await asyncio.gather(bring_up, stop, return_exceptions=True)
            say("stopping")
            self._set_state("stopping")
            await self._supervisor.stop()
            self._state = "failed" if failed else "stopped"
            self._run.write_state(stopped(self._view()) | {"state": self._state})
            say("stopped")
        return 1 if failed else 0

    def _configure(self) -> list[list[ChildSpec]]:
        options, run, places = self._options, self._run, self._places
        creds = users.generate(instance_names(options.instances))
        run.write("credentials.json", json.dumps(creds.for_json(), indent=1))
        run.write("conf/nats.conf", users.nats_config(creds, places.nats_port, f"hortator-{os.getpid()}"))
        run.write("conf/redis.conf", users.redis_config(creds, places.redis_port, run.conf))
        groups = stages(options, run, creds, places, os.environ)
        for spec in (spec for group in groups for spec in group):
            run.ready_file(spec.name).unlink(missing_ok=True)
            spec.log.write_text("")
        return groups

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1:
            say("killing what is left")
            self._supervisor.kill()
        self._stopping.set()

    async def _bring_up(self) -> None:
        options = self._options
        ranks = f" of {options.tp} ranks" if options.tp > 1 else ""
        say(
            f"starting {self._places.model_name} ({options.instances} instance(s){ranks}) in {self._run.path}"
        )
        if options.node_rank:
            say(f"node {options.node_rank} of {options.nodes} meets the others at {options.rendezvous}")
        await self._supervisor.start()
        if options.node_rank:
            say(f"ready: the ranks of node {options.node_rank} are in their group")
            return
        say("all processes are up; waiting for a canary to pass")
        await self._until_ready()

    async def _until_ready(self) -> None:
        file = self._options.api_key_file
        headers = f"Authorization: Bearer {first_key(file)}\r\n" if file else ""
        began = news_at = time.monotonic()
        while True:
            self._supervisor.raise_if_dead()
            status, detail = await _get(self._url, "/ready", headers)
            now = time.monotonic()
            if status == 200:
                return
            if now - began > _READY_TIMEOUT_S:
                reason = f"did not become ready within {_READY_TIMEOUT_S:.0f} s: {detail}"
                raise StartFailed("gateway", reason, self._run.log("gateway"))
            if now - news_at > _NEWS_EVERY_S:
                news_at = now
                say(f"not ready after {now - began:.0f} s: {why_not_ready(detail, self._run.log('w0'))}")
            await asyncio.sleep(0.1)

    def _announce(self) -> None:
        if self._options.node_rank:
            return
        say(f"ready {self._url} (after {time.time() - self._started:.1f} s)")
        key = " -H 'Authorization: Bearer YOUR_KEY'" if self._options.api_key_file else ""
        question = "Say something." if self._options.mock else "What is the capital of France?"
        body = {
            "model": self._places.model_name,
            "stream": True,
            "temperature": 0,
            "max_tokens": 32,
            "messages": [{"role": "user", "content": question}],
        }
        if self._options.mock:
            say("this mesh computes nothing (--mock): its answers are random words")
        say("try it:")
        address = f"{self._url}/v1/chat/completions"
        say(f"  curl -N {address}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'")
        if sys.stdout.isatty():  # not in the log of a detached one
            say(f"Ctrl-C stops it; its logs are in {self._run.path / 'log'}")
        if self._open_to_all:
            say("warning: this address is reachable by others and no --api-key-file is set")

    def _explain(self, failure: StartFailed) -> None:
        if failure.error:
            say(f"hortator up: {failure.name} cannot start: {failure.error}")
            say(f"its log: {failure.log}")
            return
        say(f"hortator up: {failure.name} {failure.reason}")
        if failure.last_lines:
            say(f"the end of {failure.log}:")
            say("\n".join(f"  {line}" for line in failure.last_lines.splitlines()))
        else:
            say(f"its log {failure.log} is empty")
        say("correct what the log says, or start with --log-level debug to see more")

    def _set_state(self, state: str) -> None:
        self._state = state
        self._record()

    def _record(self) -> None:
        self._run.write_state(self._view())

    def _view(self) -> dict[str, Any]:
        me = identify(os.getpid())
        assert me is not None
        return {
            "version": 1,
            "state": self._state,
            "announced": self._announced,
            "error": self._error,
            "supervisor": {"pid": me.pid, "start": me.start},
            "started": self._started,
            "url": None if self._options.node_rank else self._url,
            "model": self._places.model_name,
            "model_folder": str(self._places.model_folder),
            "mock": self._options.mock,
            "nats_url": self._places.nats_url,
            "redis_port": self._places.redis_port,
            "args": self._options.as_args(),
            "services": [child.view() for child in self._supervisor.children],
        }


def why_not_ready(body: str, worker_log: Path) -> str:
    """What a body of /ready gives as its reason, in the words of who started the workers."""
    try:
        reason = str(json.loads(body)["reason"])
    except (ValueError, KeyError, TypeError):
        return body or "the gateway does not answer yet"
    if "no_instance" in reason:  # they run, or starting would have failed
        if missing := missing_ranks(tail(worker_log)):
            return f"{missing}: {worker_log}"
        return f"no worker has its model yet (loading; the first time also compiling): {worker_log}"
    return reason


def missing_ranks(worker_lines: str) -> str:
    """Which ranks an instance waits for, as far as the end of its worker's log tells."""
    for line in reversed(worker_lines.splitlines()):
        try:
            entry = json.loads(line)
            if entry["event"] == "group formed":
                break
            if entry["event"] == "waiting for ranks":
                return f"{entry['missing']}: {entry['why']}"
        except (ValueError, KeyError, TypeError):
            continue
    return ""


async def _get(url: str, path: str, headers: str) -> tuple[int, str]:
    """Status and body of a GET; status 0 while nobody answers."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    try:
        async with asyncio.timeout(5.0):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(
                    f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{headers}Connection: close\r\n\r\n".encode()
                )
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            finally:
                writer.close()
        return int(head.split()[1]), body.decode(errors="replace").strip()[:300]
    except (OSError, TimeoutError, ValueError, IndexError):
        return 0, ""


def _detached(options: UpOptions) -> int:
    """Start the supervisor in a session of its own and show what it says until it is ready."""
    run = RunDir(options.run_dir)
    run.claim()
    run.drop_claim()
    log = run.log("supervisor")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "deploy.cli", "up", *options.as_args()],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    with log.open("r") as lines:
        while True:
            code = process.poll()
            ready = _is_ready(run, process.pid)
            sys.stdout.write(lines.read())
            sys.stdout.flush()
            if code is not None:
                return code or 1
            if ready:
                print(f"running in the background; stop it with: hortator down --run-dir {run.path}")
                return 0
            time.sleep(0.05)


def _is_ready(run: RunDir, supervisor: int) -> bool:
    state = run.read_state()
    if state is None or (state["supervisor"] or {}).get("pid") != supervisor:
        return False
    return state["state"] == "ready" and bool(state.get("announced"))
