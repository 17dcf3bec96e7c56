"""Whether what a worker is told to hold fits this machine, before anything is loaded; and KV of what is left.

For CPUs: on devices the ranks look themselves, each at its own.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from services.worker.engine.config import ModelConfig, UnsupportedModel, parse_config
from services.worker.engine.resident import Room, room_here
from services.worker.group.layout import cores_here, layout_of
from services.worker.memory.block_size import choose_for
from services.worker.memory.ledger import Ledger, size
from services.worker.memory.served import Load, kv_block_bytes, predict_rank
from services.worker.parallel.split import ShardPlan, plan_shards
from services.worker.settings import WorkerSettings
from shared.runtime.settings import CannotStart, SettingsError, parse_size

AUTO = "auto"
SPARE = 0.05
"""Share of the room that `auto` leaves alone: others want some, and loading takes more for a while."""


@dataclass(frozen=True)
class Fit:
    """What this node's ranks of an instance take without KV, and what there is."""

    others: Ledger
    kv_bytes: int
    """Of a block, on the ranks here together."""
    group_kv_bytes: int
    """Of a block, on all ranks of the instance."""
    ranks: int
    room: Room

    def blocks(self, kv_memory: int) -> int:
        return kv_memory // self.group_kv_bytes

    def check(self, kv_memory: int) -> None:
        """Raises `CannotStart`, with the arithmetic, if blocks of `kv_memory` bytes do not fit."""
        whole = replace(self.others, kv_bytes=self.blocks(kv_memory) * self.kv_bytes)
        if whole.total_bytes <= self.room.bytes:
            return
        left = self.most(0.0)
        advice = (
            f"lower --kv-memory to {size(left)}" if left else "take a smaller --dtype, or a smaller model"
        )
        raise CannotStart(
            f"{self._who()} would take {whole.arithmetic()}, but only {size(self.room.bytes)} are "
            f"{self.room.origin}: {advice}, or {self.room.relief}"
        )

    def most(self, spare: float) -> int:
        """Bytes of KV, on all ranks of the instance, that fit beside everything else."""
        left = int(self.room.bytes * (1 - spare)) - self.others.total_bytes
        return max(0, left // self.kv_bytes) * self.group_kv_bytes

    def auto(self) -> int:
        """`most`, some room spared. Raises `CannotStart` if that is not one block."""
        if found := self.most(SPARE):
            return found
        raise CannotStart(
            f"kv_memory=auto: {self._who()} would take {self.others.arithmetic()} without KV, of "
            f"{size(self.room.bytes)} that are {self.room.origin}; nothing is left for KV: "
            f"{self.room.relief}, or take a smaller --dtype or model"
        )

    def _who(self) -> str:
        return "the model" if self.ranks == 1 else f"the {self.ranks} ranks here"


def fitted(
    settings: WorkerSettings, runtime_bytes: Callable[[], int], room: Callable[[], Room] = room_here
) -> WorkerSettings:
    """`settings` with KV memory as a number of bytes that fits. Raises `SettingsError` for what contradicts
    itself, `CannotStart` for what does not fit.

    A folder that cannot be read is left to whoever loads it: what is wrong with it is said there.
    """
    asked = settings.kv_memory.strip().lower()
    if asked == AUTO and settings.nodes > 1:
        raise SettingsError("kv_memory=auto: nodes cannot know of each other's memory; name a size")
    memory = parse_size("memory", settings.memory) if settings.memory else None
    if asked == AUTO and settings.device.startswith("cuda"):
        raise SettingsError(
            "kv_memory=auto is for CPUs: on CUDA devices name a size, as `hortator plan` does"
        )
    config = None if settings.mock or settings.device.startswith("cuda") else _config(settings)
    if config is None:
        if asked == AUTO:
            raise SettingsError("kv_memory=auto needs a model that is computed, not a mock: name a size")
        return settings
    found = room()
    if memory is not None and memory < found.bytes:
        found = Room(memory, "what HORTATOR_MEMORY allows", relief="allow more (--set worker.memory=…)")
    fit = fit_of(settings, config, plan_shards(config, settings.tp), runtime_bytes(), found)
    if asked == AUTO:
        return replace(settings, kv_memory=str(fit.auto()))
    fit.check(parse_size("kv_memory", settings.kv_memory))
    return settings


def fit_of(
    settings: WorkerSettings, config: ModelConfig, split: ShardPlan, runtime_bytes: int, room: Room
) -> Fit:
    here = layout_of(settings).ranks_of(settings.node_rank)
    block_tokens = choose_for(config, split, settings.kv_format, settings.block_tokens).chosen.block_tokens
    load = Load(
        dtype=settings.dtype,
        kv_dtype=settings.kv_format,
        blocks=0,
        block_tokens=block_tokens,
        kernels="torch" if settings.kernels == "torch" else "native",
        step_tokens=settings.max_step_tokens,
        slots=settings.slots,
        threads=settings.threads or max(1, len(cores_here(settings)) // len(here)),
        runtime_bytes=runtime_bytes,
        staging_bytes=parse_size("tier_staging", settings.tier_staging),
    )
    others = Ledger()
    for rank in here:
        others += predict_rank(config, split.shards[rank], load)
    held = {shard.rank: shard.kv_heads.size for shard in split.shards}
    each = {n: kv_block_bytes(config, heads, settings.kv_format, block_tokens) for n, heads in held.items()}
    return Fit(others, sum(each[rank] for rank in here), sum(each.values()), len(here), room)


def _config(settings: WorkerSettings) -> ModelConfig | None:
    path = Path(settings.model_dir) / "config.json"
    try:
        return parse_config(json.loads(path.read_text()), str(path), settings.max_len or None)
    except (OSError, ValueError, UnsupportedModel, AttributeError, RecursionError):
        return None
