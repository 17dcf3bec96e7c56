"""What `hortator up` can be told, read and checked once."""

import difflib
import importlib
import re
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.worker.group.layout import layout_of
from services.worker.settings import WorkerSettings
from shared.runtime.settings import SettingsError, convert, parse_size

SERVICES = ("gateway", "scheduler", "worker", "kvstore")

Dtype = Literal["float32", "float16", "bfloat16", "int8", "int8-dynamic"]


class BadOption(ValueError):
    """An option that cannot be used; the message names it and says what would be right."""


@dataclass(frozen=True)
class UpOptions:
    """Options of one mesh. `as_args` gives the command line that means the same."""

    run_dir: Path
    model: str = "smollm2-135m-instruct"
    instances: int = 1
    dtype: Dtype = "float16"
    kv_dtype: str = ""
    """Empty: as the worker chooses."""
    kv_memory: str = "512MiB"
    tier_memory: str = "512MiB"
    """Memory of the second tier of KV blocks, taken as blocks come; 0: no second tier."""
    tier_disk: str = "0"
    """Disk that blocks of the second tier go to, in the run directory."""
    http: str = "127.0.0.1:8000"
    api_key_file: Path | None = None
    mock: bool = False
    max_slots: int = 0
    """0: as the worker chooses."""
    policy: Literal["continuous", "static"] = "continuous"
    reservation: Literal["expected", "max"] = "expected"
    threads: int = 0
    """Compute threads of each rank; 0: as many of its share of the cores as measure best."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    deterministic: bool = False
    """Tokens of a request do not depend on what else is computed."""
    device: str = ""
    """A torch device, e.g. cuda; empty: as the worker chooses, which is the CPU. Several, with commas,
    are dealt out to the instances in turn, or to the ranks of all instances."""
    tp: int = 1
    """Ranks of each instance, which share its work."""
    nodes: int = 1
    """Machines the ranks of the one instance are spread over."""
    node_rank: int = 0
    """Which of them this is; all but 0 run ranks and nothing else."""
    rendezvous: str = ""
    """HOST:PORT of node 0 where ranks meet."""
    group_secret_file: Path | None = None
    """First line: what ranks of several nodes prove by that they belong together."""
    log_level: str = "info"
    set: tuple[str, ...] = ()
    """Further settings of services, each `SERVICE.FIELD=VALUE`."""

    def as_args(self) -> list[str]:
        args: list[str] = []
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                args.append(flag)
            elif isinstance(value, tuple):
                args += [part for item in value for part in (flag, item)]
            elif value not in (None, False, "", 0):
                args += [flag, str(value)]
        return args


def check_formats(options: UpOptions) -> None:
    """Raise `BadOption` for a device or formats that no worker could serve, before anything is started."""
    for device in (named or "cpu" for each in devices_of(options) for named in each.split(",")):
        if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise BadOption(f"--device {device}: write cpu, cuda, or of several cuda:0,cuda:1")
        cuda = device != "cpu"
        if cuda and options.dtype.startswith("int8"):
            raise BadOption(f"--dtype {options.dtype} on {device}: choose float32, float16 or bfloat16")
        if cuda and options.deterministic:
            raise BadOption(f"--deterministic is computed on CPUs only, not on {device}")
        for flag, value in (("dtype", options.dtype), ("kv-dtype", options.kv_dtype)):
            if not cuda and value == "bfloat16":
                raise BadOption(f"--{flag} bfloat16 is computed on CUDA devices only: take float16, as small")


def check_tier(options: UpOptions, room: int) -> None:
    """Raise `BadOption` for a second tier that cannot be where `room` bytes of memory are left."""
    sizes = {}
    for flag, value in (("--tier-memory", options.tier_memory), ("--tier-disk", options.tier_disk)):
        try:
            sizes[flag] = parse_size(flag, value)
        except SettingsError as error:
            raise BadOption(str(error)) from None
    if sizes["--tier-memory"] > room:
        # Taken as blocks come, it would be the kernel that ends something, hours later.
        raise BadOption(
            f"--tier-memory {options.tier_memory} is more than the {room / (1 << 30):.1f} GiB available "
            "on this machine: lower it; --tier-disk may hold the rest"
        )
    if sizes["--tier-disk"] and not sizes["--tier-memory"]:
        raise BadOption(
            f"--tier-disk {options.tier_disk} needs memory that blocks pass through: "
            "add for example --tier-memory 256MiB"
        )


def devices_of(options: UpOptions) -> list[str]:
    """The device of each instance, or of its ranks on this node with commas; empty: as the worker chooses."""
    named = [device.strip() for device in options.device.split(",")]
    if options.tp == 1:
        return [named[i % len(named)] for i in range(options.instances)]
    if named in ([""], ["cpu"]):
        return named * options.instances
    ranks = len(layout_of(group_settings(options)).ranks_of(options.node_rank))
    if named == ["cuda"]:
        named = [f"cuda:{i}" for i in range(options.instances * ranks)]
    if len(named) != options.instances * ranks or len(set(named)) != len(named):
        raise BadOption(
            f"--device {options.device}: name one device for each of {options.instances * ranks} rank(s) "
            f"here (--instances {options.instances}, --tp {options.tp}), or cuda for all there are"
        )
    return [",".join(named[i * ranks : (i + 1) * ranks]) for i in range(options.instances)]


def check_group(options: UpOptions) -> None:
    """Raise `BadOption` for a group that cannot be."""
    if options.nodes > 1 and options.instances > 1:
        raise BadOption(
            f"--instances {options.instances}: several nodes share one instance; start others apart"
        )
    group_settings(options)


def group_settings(options: UpOptions) -> WorkerSettings:
    """What a worker is told of its group. Raises `BadOption`."""
    settings = WorkerSettings(
        tp=options.tp,
        nodes=options.nodes,
        node_rank=options.node_rank,
        rendezvous=options.rendezvous,
        group_secret=_secret(options.group_secret_file),
    )
    try:
        layout_of(settings)
    except SettingsError as error:
        raise BadOption(str(error)) from None
    return settings


def _secret(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.expanduser().read_text(encoding="utf-8").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption(f"--group-secret-file {file} cannot be read: {error}") from None


def parse_http(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` (`[::1]:8000` for IPv6). Raises `BadOption`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal():
        raise BadOption(f"{text!r} is not HOST:PORT: write for example 127.0.0.1:8000")
    if int(port) > 65535:
        raise BadOption(f"{text!r} is not HOST:PORT: ports are 0 to 65535")
    return host, int(port)


def parse_settings(items: Iterable[str]) -> dict[str, dict[str, str]]:
    """Service → field → value of `SERVICE.FIELD=VALUE` texts. Raises `BadOption`."""
    settings: dict[str, dict[str, str]] = {}
    for item in items:
        match = re.fullmatch(r"([\w-]+)\.([a-z][a-z0-9_]*)=(.*)", item, re.DOTALL)
        if match is None:
            raise BadOption(
                f"--set {item}: write SERVICE.FIELD=VALUE, for example scheduler.itl_target_ms=100"
            )
        if match[1] not in SERVICES:
            raise BadOption(f"--set {item}: {match[1]!r} is no service: {', '.join(SERVICES)}")
        settings.setdefault(match[1], {})[match[2]] = match[3]
    return settings


def check_settings(items: Iterable[str]) -> None:
    """Whether the services know these fields and can read the values. Raises `BadOption`."""
    for service, fields in parse_settings(items).items():
        module = importlib.import_module(f"services.{service}.settings")
        cls = getattr(module, f"{service.capitalize()}Settings")
        known = {k: v for k, v in typing.get_type_hints(cls).items() if k in cls.__dataclass_fields__}
        for field, value in fields.items():
            if field not in known:
                near = difflib.get_close_matches(field, known, n=3)
                meant = f"; did you mean {', '.join(near)}?" if near else ""
                raise BadOption(
                    f"--set {service}.{field}: {service} has no setting {field}{meant} "
                    f"(`hortator {service} --help` lists them)"
                )
            try:
                convert(f"{service}.{field}", value, known[field])
            except SettingsError as error:
                raise BadOption(f"--set {error}") from None


def instance_names(count: int) -> list[str]:
    """Names of a mesh's instances: w0, w1, …"""
    if not 1 <= count <= 64:
        raise BadOption(f"--instances {count}: choose 1 to 64")
    return [f"w{i}" for i in range(count)]
