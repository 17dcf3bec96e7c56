"""What has to be the same on every rank of a group, and what is said where it is not."""

import hashlib
import socket
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from services.worker.settings import WorkerSettings
from services.worker.step import ExecutorInfo
from shared.runtime.settings import as_env

SAME = (
    "model",
    "tp",
    "nodes",
    "dtype",
    "kv_format",
    "kv_memory",
    "block_tokens",
    "slots",
    "max_len",
    "max_step_tokens",
    "kernels",
    "deterministic",
    "tier_staging",
    "mock",
    "mock_vocab",
    "mock_blocks",
)
"""Settings by which a rank computes something else than another, or keeps it elsewhere."""


def facts_of(settings: WorkerSettings) -> dict[str, str]:
    """Before anything is loaded."""
    facts = {name: str(getattr(settings, name)) for name in SAME}
    return facts | {"version": version("hortator"), "model_files": _files(settings.model_dir)}


def facts_built(info: ExecutorInfo) -> dict[str, str]:
    """Of the executor."""
    names = ("fingerprint", "block_tokens", "blocks_total", "max_len", "vocab_size")
    return {name: str(getattr(info, name)) for name in names}


def difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """The first facts that differ, for people; empty: none does."""
    wrong = [
        f"{name} is {theirs.get(name, 'unknown')}, of rank 0 {ours.get(name, 'unknown')}"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
    return "; ".join(wrong[:3])


def host_name() -> str:
    return socket.gethostname()[:64] or "?"


def rank_env(settings: WorkerSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank process: what ours has besides settings, and `settings`."""
    return {k: v for k, v in inherited.items() if not k.startswith("HORTATOR_")} | as_env(settings)


def _files(folder: str) -> str:
    """Names and sizes of the model's files, in short; the content is compared once it is loaded."""
    if not folder:
        return "none"
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*")):
        if path.suffix in (".json", ".safetensors") and path.name != "manifest.json":
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
    return digest.hexdigest()[:12]
