"""Sums of small CUDA tensors through memory that all devices of a group see (torch's symmetric memory).

Kernels of torch read or write the other devices' memory directly, which for short messages takes a fraction
of what NCCL does. It has not been run on GPUs yet (docs/gpu.md). Facts by which it is written, all of torch's
sources (torch/csrc/distributed/c10d/symm_mem):

- Every kernel begins and ends by waiting for the same blocks of all ranks, so that one room serves message
  after message as long as they follow each other on the device.
- Parts are added in rank order (`load_and_reduce`), or within the switch for one rank that tells all
  (`multimem_all_reduce_`): the same bits everywhere. `multimem_one_shot_all_reduce` has the switch add for
  each rank anew, in an order nobody vouches for, so it is left out.
- float32 and bfloat16 only.
"""

from typing import Any

import torch

from services.worker.collective.tensors import Way

_FORMATS = (torch.float32, torch.bfloat16)
_GRANULE = 4
MOST_BYTES = 8 << 20
"""Room for one message: longer ones are NCCL's, which moves them as fast."""


def symmetric_ways(group: Any, device: torch.device, most_bytes: int) -> dict[str, Way]:
    """One-shot and two-shot sums, and those of the switch where there is one; all ranks call it at once.

    `group`: torch's name of a process group of these ranks. Raises RuntimeError where devices cannot see each
    other's memory.
    """
    # Not known to torch builds without CUDA on every platform.
    import torch.distributed._symmetric_memory as symmetric

    most_bytes = min(MOST_BYTES, -(-most_bytes // 16) * 16)
    memory = symmetric.empty(most_bytes // 4, dtype=torch.float32, device=device)
    handle = symmetric.rendezvous(memory, group)
    operators: Any = torch.ops.symm_mem

    def room(part: torch.Tensor) -> torch.Tensor:
        return memory.view(part.dtype)[: part.numel()]

    def one_shot(part: torch.Tensor) -> torch.Tensor:
        # Each thread copies in, and later writes, the same elements: the part may take its own sum.
        flat = part.view(-1)
        operators.one_shot_all_reduce_copy_out(room(part), flat, "sum", group, flat)
        return part

    def through(operator: Any) -> Any:
        def work(part: torch.Tensor) -> torch.Tensor:
            flat, mine = part.view(-1), room(part)
            mine.copy_(flat)
            operator(mine, "sum", group)
            flat.copy_(mine)
            return part

        return work

    found = {
        "symmetric one-shot": Way(one_shot, most_bytes, _FORMATS, _GRANULE),
        "symmetric two-shot": Way(through(operators.two_shot_all_reduce_), most_bytes, _FORMATS, _GRANULE),
    }
    if handle.multicast_ptr:
        found["symmetric switch"] = Way(
            through(operators.multimem_all_reduce_), most_bytes, _FORMATS, _GRANULE
        )
    return found
