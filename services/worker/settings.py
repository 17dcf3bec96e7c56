"""Settings of a worker process, and what follows from them."""

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from shared.runtime.settings import ServiceSettings, SettingsError, parse_size


def default_kv(dtype: str, device: str) -> str:
    """KV format for weights of `dtype`: theirs on CUDA devices; on CPUs float32 for float32, else float16."""
    if device.startswith("cuda"):
        return dtype
    return "float32" if dtype == "float32" else "float16"


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(ServiceSettings):
    """One instance, or one node's part of it."""

    unused: ClassVar[frozenset[str]] = frozenset({"redis_url"})

    model_dir: str = ""
    """Folder with config.json, tokenizer and safetensors. A mock reads only its config.json, if given."""
    dtype: Literal["float32", "float16", "bfloat16", "int8", "int8-dynamic"] = "float16"
    """Of the weights. On CPUs arithmetic is float32, save for int8-dynamic, which quantises activations too
    and multiplies integers. bfloat16 needs a CUDA device, the int8 formats a CPU."""
    kv_dtype: Literal["", "float32", "float16", "bfloat16"] = ""
    """Of the KV blocks; empty: as `default_kv` says."""
    kv_memory: str = "512MiB"
    """Memory of the KV blocks: a number of bytes, or with KiB, MiB, GiB, TiB; `auto`: what `memory` leaves
    beside everything else, on CPUs."""
    memory: str = ""
    """What the instance may take of this machine in all, a size as of `kv_memory`; empty: as much as is
    available and its control group allows. Where that does not do, it does not start."""
    block_tokens: int = 0
    """Tokens a KV block holds; 0: as many as cost least for this model (docs/memory.md). Instances share
    prefixes only where it is the same."""
    max_slots: int = 0
    """Sequences running at once; 0: 64, or 512 of a mock."""
    max_len: int = 0
    """Tokens a sequence may have, prompt included; 0: what the model was trained for."""
    max_step_tokens: int = 2048
    """Tokens one step may compute; the scheduler's time budget is usually far below."""
    tier_staging: str = "64MiB"
    """Memory of each rank for KV blocks on their way to and from the second tier, a size as of `kv_memory`;
    at least three blocks. 0: blocks are kept nowhere else."""
    threads: int = 0
    """Compute threads of each rank; 0: as many as measure best at the start, or with `tp` its share of the
    cores."""
    cores: str = ""
    """Cores that nobody else computes on, e.g. `0-3,6`: threads are pinned to them if that measures faster.
    Empty: unknown, so nothing is pinned."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """`native`: compiled kernels or no start; `torch`: none; `auto`: whichever measures faster."""
    deterministic: bool = False
    """A request's tokens never depend on what else is in the batch, nor on how it is cut or cached."""
    device: str = "cpu"
    """A torch device, e.g. cpu or cuda:0; with `tp` one for each rank of this node, as in cuda:0,cuda:1."""
    tp: int = 1
    """Ranks of the instance: processes that each hold a part of the model and compute every step together."""
    nodes: int = 1
    """Machines its ranks are spread over, in runs as even as possible."""
    node_rank: int = 0
    """Which of the `nodes` this is. Node 0 has rank 0, which speaks for the instance; the others have ranks
    only, and need neither NATS nor Redis."""
    rendezvous: str = ""
    """HOST:PORT of node 0 where its ranks meet those of other nodes; needed when there are several nodes."""
    group_secret: str = field(default="", repr=False)
    """What ranks of several nodes prove by that they belong together; the same on all of them. What they then
    send each other is not encrypted."""
    group_start_s: float = 600.0
    """Seconds within which all ranks must have met and have their parts of the model."""
    mock: bool = False
    """Compute nothing: tokens come from a hash. For measuring the mesh itself."""
    mock_vocab: int = 49_152
    """Vocabulary of a mock without `model_dir`."""
    mock_blocks: int = 65_536
    """KV blocks a mock pretends to have; `kv_memory` is no limit for it."""
    mock_step_s: float = 0.0
    """Seconds a mock's step takes, whatever is in it."""
    mock_token_s: float = 0.0
    """Seconds a mock takes in addition for each token of a step."""

    @property
    def kv_format(self) -> str:
        return self.kv_dtype or default_kv(self.dtype, self.device)

    @property
    def slots(self) -> int:
        return self.max_slots or (512 if self.mock else 64)


def parse_cores(text: str) -> tuple[int, ...]:
    """Core numbers of e.g. `0-3,6`, ascending; none of an empty text. Raises `SettingsError`."""
    if not text.strip():
        return ()
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:\s*-\s*(\d{1,5}))?\s*", part)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise SettingsError(f"cores={text!r} is not a list of cores: write for example 0-3,6")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(cores))


def parse_bytes(text: str) -> int:
    """Bytes of e.g. `512MiB` or `536870912`. Raises `SettingsError`."""
    return parse_size("kv_memory", text)
