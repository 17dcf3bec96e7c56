"""Paged KV memory of one rank: blocks of consecutive tokens, all layers of a block contiguous (design §6)."""

import math
from dataclasses import dataclass

import torch

from services.worker.engine.config import ModelConfig
from services.worker.engine.memory import Arena

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class KvPlan:
    """How many blocks fit a byte budget, and what one costs."""

    block_tokens: int
    block_bytes: int
    """On all ranks of a group together."""
    blocks: int


def plan_kv(
    config: ModelConfig, kv_dtype: str, kv_bytes: int, block_tokens: int, kv_heads: int | None = None
) -> KvPlan:
    """Blocks that fit into `kv_bytes`. Raises ValueError, showing the arithmetic, when not one does.

    `kv_heads` are those that all ranks of a group hold together; None: those of the model, as one rank does.
    """
    if kv_dtype not in DTYPES:
        raise ValueError(f"--kv-dtype {kv_dtype}: choose one of {', '.join(DTYPES)}")
    if block_tokens < 1:
        raise ValueError(f"blocks of {block_tokens} tokens: a block holds at least one")
    width = (kv_heads or config.kv_heads) * config.head_dim
    token_bytes = 2 * config.layers * width * _DTYPE_BYTES[kv_dtype]
    block_bytes = token_bytes * block_tokens
    blocks = kv_bytes // block_bytes
    if blocks < 1:
        raise ValueError(
            f"KV memory of {kv_bytes} bytes holds no block: a block of {block_tokens} tokens takes 2 × "
            f"{config.layers} layers × {width} × {_DTYPE_BYTES[kv_dtype]} bytes × {block_tokens} = "
            f"{block_bytes} bytes; raise --kv-memory"
        )
    return KvPlan(block_tokens, block_bytes, blocks)


class KvCache:
    """One tensor [block, layer, 2 (k, v), kv_head, token, head_dim].

    Zeroed: a page costs nothing until it is written or `populate`d, and what is masked in attention is never
    NaN.
    On CUDA there is one block more than `blocks`, the last: rows that only fill up a batch write there.
    """

    def __init__(self, config: ModelConfig, plan: KvPlan, kv_dtype: str, device: torch.device) -> None:
        if kv_dtype == "bfloat16" and device.type != "cuda":
            raise ValueError(
                f"--kv-dtype bfloat16 is computed on CUDA devices only, not on {device.type}: take float16"
            )
        self.block_tokens = plan.block_tokens
        self.blocks = plan.blocks
        held = plan.blocks + (device.type == "cuda")
        shape = (held, config.layers, 2, config.kv_heads, plan.block_tokens, config.head_dim)
        dtype = DTYPES[kv_dtype]
        if device.type == "cpu":
            count = math.prod(shape)
            try:
                arena = Arena(count * dtype.itemsize)
            except (OSError, OverflowError) as error:
                raise ValueError(
                    f"KV memory of {count * dtype.itemsize} bytes cannot be had ({error}); lower --kv-memory"
                ) from None
            self.data = arena.take(count, dtype).view(shape)
            self._arena: Arena | None = arena
        else:
            self._arena = None
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        # [block × layer × 2 × kv_head, token × head_dim]: the view that gathers whole heads.
        self.rows = self.data.view(-1, plan.block_tokens * config.head_dim)

    def populate(self) -> None:
        """Have all its memory now: a promise of blocks that turn out not to be there would end the process in
        the middle of a step. Raises ValueError where it cannot be had."""
        if self._arena is not None:
            try:
                self._arena.populate()
            except ValueError as error:
                raise ValueError(f"KV: {error}; lower --kv-memory") from None

    @property
    def resident_bytes(self) -> int:
        """Of its memory, what the device really has given by now."""
        return self.data.nbytes if self._arena is None else self._arena.resident_bytes

    def copy(self, source: int, target: int) -> None:
        """Copy a whole block, all layers (copy on write)."""
        self.data[target].copy_(self.data[source])
