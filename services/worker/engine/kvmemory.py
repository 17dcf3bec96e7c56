"""The bytes of KV blocks for the second tier (`services.worker.tier.port.KvMemory`)."""

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.engine.kvcache import KvCache
from services.worker.tier.port import KvMemory


def kv_memory_of(kv: KvCache) -> KvMemory:
    whole = kv.data.reshape(len(kv.data), -1).view(torch.uint8)
    return _OnDevice(whole) if kv.data.is_cuda else _InHostMemory(whole)


class _InHostMemory:
    """Views are the memory that steps compute in."""

    def __init__(self, whole: torch.Tensor) -> None:
        """`whole` [blocks, bytes of a block]."""
        self._blocks: NDArray[np.uint8] = whole.numpy()
        self.block_bytes = whole.shape[1]

    def view(self, block: int) -> memoryview:
        return self._blocks[block].data

    def write(self, block: int, data: memoryview) -> None:
        # Unlike an assignment to a view, this lets other threads go on.
        np.copyto(self._blocks[block], np.frombuffer(data, np.uint8))


class _OnDevice:
    """Copies travel on a stream of their own: beside the steps, which neither write nor read these blocks."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._blocks = whole
        self._stream = torch.cuda.Stream(whole.device)
        self.block_bytes = whole.shape[1]

    def view(self, block: int) -> memoryview:
        host = np.empty(self.block_bytes, np.uint8)
        self._copy(torch.from_numpy(host), self._blocks[block])
        return host.data

    def write(self, block: int, data: memoryview) -> None:
        self._copy(self._blocks[block], torch.from_numpy(np.array(data, np.uint8)))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source)
        self._stream.synchronize()
