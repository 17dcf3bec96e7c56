"""Sums of CUDA tensors by NCCL, through torch.distributed. It has not been run on GPUs yet (docs/gpu.md)."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CTAS = 8
"""Thread blocks that a sum may take from the device, so that what is computed meanwhile keeps the rest."""


class Nccl:
    """This process's end of an NCCL group: torch's default process group, so that there is one a process.

    The ranks meet in `store`. Sums are queued on the current stream, and may be held by a graph. Raises
    ValueError where torch has no NCCL, and RuntimeError, as torch does, where the group cannot be formed.
    `limit_s`: after so long torch ends this process, if some rank has not taken part in a sum.
    """

    def __init__(
        self,
        store: "dist.Store",
        rank: int,
        size: int,
        device: torch.device,
        limit_s: float = 60.0,
        ctas: int = CTAS,
    ) -> None:
        if not dist.is_nccl_available():
            raise ValueError(f"torch {torch.__version__} comes without NCCL: install a CUDA build")
        if dist.is_initialized():
            raise ValueError("this process is a rank of a torch.distributed group already")
        nccl: Any = dist
        options = nccl.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.min_ctas, options.config.max_ctas = 1, ctas
        dist.init_process_group(
            "nccl",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=limit_s),
            pg_options=options,
            device_id=device,
        )
        self._group: Any = dist.group.WORLD

    @property
    def name(self) -> Any:
        """By which torch's operators know the group."""
        return self._group.group_name

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """As `Reducer.all_reduce`."""
        dist.all_reduce(part)
        return part

    def abort(self) -> None:
        """From any thread: what is queued ends without a result, where it would wait for a lost rank."""
        self._group.abort()
