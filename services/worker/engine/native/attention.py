"""Attention by itself on the native kernels, for tests and measurements; a model's pass has it inside."""

from collections.abc import Sequence

import numpy as np
import torch

from services.worker.engine.native import abi
from services.worker.engine.native.decoder import Kernels
from services.worker.step import I32


def attend(
    kernels: Kernels,
    kv: torch.Tensor,
    layer: int,
    q: torch.Tensor,
    row_start: I32,
    positions: I32,
    table: I32,
    groups: Sequence[int] | None = None,
) -> torch.Tensor:
    """Attention of rotated queries q [tokens, heads, head_dim] over layer `layer` of `kv`, as q.

    `kv` is [block, layer, 2, kv_head, token, head_dim], float32 or float16, and holds the tokens' own keys
    and values; `row_start`, `positions` and `table` are those of a `RaggedBatch`. Heads must be multiples of
    16 wide and blocks a power of two long. `groups` are the query heads of each KV head where they differ.
    """
    _, layers, _, kv_heads, block_tokens, head_dim = kv.shape
    q = q.contiguous()
    out = torch.empty_like(q)
    each = np.array(groups or [q.shape[1] // kv_heads] * kv_heads, np.int32)
    call = abi.AttentionCall(
        kv=kv.data_ptr(),
        half_kv=int(kv.dtype == torch.float16),
        layer=layer,
        layers=layers,
        heads=q.shape[1],
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        rows=len(row_start) - 1,
        table_width=table.shape[1],
        row_start=row_start.ctypes.data,
        positions=positions.ctypes.data,
        table=table.ctypes.data,
        q=q.data_ptr(),
        out=out.data_ptr(),
        groups=each.ctypes.data,
    )
    kernels.library.hortator_attend(kernels.team, call)
    return out
