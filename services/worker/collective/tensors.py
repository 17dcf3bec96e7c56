"""Sums of tensors over the ranks of a group, where the tensors are: what torch code computes a shard with."""

from typing import Protocol

import torch

from services.worker.collective.port import Collective


class Reducer(Protocol):
    """One rank's end of a group, for tensors. Called in the same order with the same shapes by every rank."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def queues(self) -> bool:
        """Sums are queued on the device's current stream and nobody waits, so that a graph can hold them."""
        ...

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """`part`, contiguous floats, replaced by the sum over all ranks: the same bits everywhere.

        May raise `GroupLost`.
        """
        ...


class HostReducer:
    """`Reducer` over a `Collective`: in place on CPUs; from other devices by way of the host, waiting.

    Parts of 16 bit are added up in float32 and rounded once.
    """

    queues = False

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self.rank, self.size = collective.rank, collective.size

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        if self.size == 1 or not part.numel():
            return part
        host = part.detach().to("cpu", torch.float32)
        self._collective.all_reduce(host.numpy())
        return part if host.data_ptr() == part.data_ptr() else part.copy_(host)
