"""The processes of a local mesh, as data: what is started, with which settings, in which order."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

from deploy.credentials import Credentials
from deploy.down import MARK
from deploy.options import UpOptions, devices_of, group_settings, instance_names, parse_settings
from deploy.rundir import RunDir
from deploy.servers import nats_probe, redis_probe
from deploy.supervisor import ChildSpec
from services.worker.engine.resident import room_here
from services.worker.fit import AUTO
from shared.runtime.settings import OF_THE_NODE, PREFIX, as_env, parse_size

_GATEWAY_GRACE_S = 8.0
_SERVICE_GRACE_S = 4.0
_WORKER_START_S = 300.0
"""Loading weights from a cold disk and timing the kernels takes a while; a crash is seen at once anyway."""
_NODE_START_S = 86_400.0
"""Ranks of another node are up when node 0 has come; how long they wait for it is their own setting."""


@dataclass(frozen=True)
class Places:
    """What is known of a run before its first process starts."""

    nats_program: str
    redis_program: str
    nats_port: int
    redis_port: int
    model_name: str
    model_folder: Path
    model_aliases: tuple[str, ...]
    http: str
    """HOST:PORT of the gateway."""

    @property
    def nats_url(self) -> str:
        return f"nats://127.0.0.1:{self.nats_port}"


def stages(
    options: UpOptions, run: RunDir, credentials: Credentials, places: Places, environ: Mapping[str, str]
) -> list[list[ChildSpec]]:
    """Groups of processes: the servers, which come up first, then the services, in the order to stop them
    backwards."""
    inherited = {k: v for k, v in environ.items() if not k.startswith("HORTATOR_") or k in OF_THE_NODE}
    # Line by line into the log, so that the last words of a crash are there.
    inherited["PYTHONUNBUFFERED"] = "1"

    further = parse_settings(options.set)

    def server(name: str, argv: tuple[str, ...], is_up: Callable[[], bool]) -> ChildSpec:
        return ChildSpec(
            name=name,
            service=name,
            instance=name,
            rank=None,
            argv=argv,
            env={**inherited, MARK: str(run.ready_file(name))},
            log=run.log(name),
            is_up=lambda pid: is_up(),
            start_timeout_s=20.0,
        )

    def service(
        service: str, instance: str, user: str, settings: dict[str, str], **limits: float
    ) -> ChildSpec:
        grace_s = limits.get("grace_s", _SERVICE_GRACE_S)
        common = {
            "nats_url": places.nats_url,
            "nats_user": user,
            "nats_password": credentials.nats[user].password,
            "redis_url": _redis_url(service, credentials, places.redis_port),
            "http": "127.0.0.1:0",
            "model": places.model_name,
            "instance": instance,
            "log_level": options.log_level,
            "ready_file": str(run.ready_file(instance)),
            "stop_grace_s": str(grace_s),
        }
        return ChildSpec(
            name=instance,
            service=service,
            instance=instance,
            rank=0 if service == "worker" else None,
            # -P: a folder called `services` where the operator stands is none of ours.
            argv=(sys.executable, "-P", "-m", f"services.{service}"),
            env={
                **inherited,
                **{
                    f"HORTATOR_{k.upper()}": v
                    for k, v in (common | settings | further.get(service, {})).items()
                },
            },
            log=run.log(instance),
            is_up=_listens(run.ready_file(instance)),
            start_timeout_s=limits.get("start_s", 60.0),
            # The service cancels what is unfinished after its own grace; this is for one that hangs.
            stop_grace_s=grace_s + 4.0,
        )

    nats_argv = (places.nats_program, "-c", str(run.conf / "nats.conf"))
    redis_argv = (places.redis_program, str(run.conf / "redis.conf"))
    names = instance_names(options.instances)
    shares = share_cores(sorted(os.sched_getaffinity(0)), options.instances)
    workers = [
        service(
            "worker",
            name,
            f"worker-{name}",
            worker_settings(options, places, cores, device),
            start_s=_NODE_START_S if options.node_rank else _WORKER_START_S,
        )
        for name, cores, device in zip(names, shares, devices_of(options), strict=True)
    ]
    if options.node_rank:
        return [workers]
    return [
        [
            server("nats", nats_argv, nats_probe(places.nats_port)),
            server(
                "redis", redis_argv, redis_probe(places.redis_port, "operator", credentials.redis["operator"])
            ),
        ],
        [service("kvstore", "kvstore", "kvstore", kvstore_settings(options, run))],
        workers,
        [service("scheduler", "scheduler", "scheduler", scheduler_settings(options))],
        [
            service(
                "gateway", "gateway", "gateway", gateway_settings(options, places), grace_s=_GATEWAY_GRACE_S
            )
        ],
    ]


def share_cores(cores: Sequence[int], instances: int) -> list[list[int]]:
    """Cores of each instance alone, neighbours together; none for all where there are too few."""
    if len(cores) < instances:
        return [[] for _ in range(instances)]
    ends = [len(cores) * i // instances for i in range(instances + 1)]
    return [list(cores[a:z]) for a, z in pairwise(ends)]


def worker_settings(options: UpOptions, places: Places, cores: Sequence[int], device: str) -> dict[str, str]:
    """`cores` are those of this instance alone, none if it has to share."""
    settings = {
        "model_dir": str(places.model_folder),
        "dtype": options.dtype,
        "kv_dtype": options.kv_dtype,
        "kv_memory": options.kv_memory,
        "device": device,
        # With cores of its own an instance measures how many threads serve it best.
        "threads": str(options.threads or ("" if cores else 1)),
        "cores": ",".join(map(str, cores)),
        "kernels": "" if options.kernels == "auto" else options.kernels,
        "deterministic": "1" if options.deterministic else "",
        "mock": "1" if options.mock else "",
        "max_slots": str(options.max_slots or ""),
    }
    if options.kv_memory == AUTO or options.instances > 1:
        # They start at once, and each would find the whole machine free.
        left = room_here().bytes - parse_size("--tier-memory", options.tier_memory)
        settings["memory"] = str(max(0, left) // options.instances)
    if options.tp > 1:
        settings |= {k.removeprefix(PREFIX).lower(): v for k, v in as_env(group_settings(options)).items()}
        settings["threads"] = str(options.threads or "")
    return {key: value for key, value in settings.items() if value}


def kvstore_settings(options: UpOptions, run: RunDir) -> dict[str, str]:
    return {
        "tier_memory": options.tier_memory,
        "tier_disk": options.tier_disk,
        "tier_dir": str(run.tier),
    }


def scheduler_settings(options: UpOptions) -> dict[str, str]:
    return {"policy": options.policy, "reservation": options.reservation}


def gateway_settings(options: UpOptions, places: Places) -> dict[str, str]:
    settings = {"http": places.http, "model_dir": str(places.model_folder)}
    if places.model_aliases:
        settings["model_aliases"] = ",".join(places.model_aliases)
    if options.api_key_file is not None:
        settings["api_key_file"] = str(options.api_key_file.expanduser().absolute())
    return settings


def _redis_url(service: str, credentials: Credentials, port: int) -> str:
    password = credentials.redis.get(service)
    return "" if password is None else f"redis://{service}:{quote(password)}@127.0.0.1:{port}/0"


def _listens(ready_file: Path) -> Callable[[int], bool]:
    """Up when this life of the process has written its ready file."""

    def is_up(pid: int) -> bool:
        try:
            return json.loads(ready_file.read_text())["pid"] == pid
        except (OSError, ValueError, KeyError):
            return False

    return is_up
