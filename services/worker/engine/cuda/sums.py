"""How a rank's parts become sums within a pass: at once, in order, or beside what is computed meanwhile."""

from collections.abc import Callable

import torch

from services.worker.collective.tensors import Reducer

Landing = Callable[[], torch.Tensor]
"""The sum. On a device, what is queued afterwards on the current stream finds it complete."""

Begin = Callable[[torch.Tensor], Landing]
"""Takes this rank's part, which is not to be touched until it has landed."""


def alone(part: torch.Tensor) -> Landing:
    """`Begin` of a group of one rank."""
    return lambda: part


def in_order(reducer: Reducer) -> Begin:
    """`Begin` on the current stream: nothing is computed meanwhile. For steps of one chunk, and on CPUs."""

    def begin(part: torch.Tensor) -> Landing:
        total = reducer.all_reduce(part)
        return lambda: total

    return begin


class Aside:
    """`Begin` on a stream of its own, before which the device puts off other work; sums go in order.

    A part's memory is kept until its sum has landed, so that the stream computed on can have it back.
    """

    def __init__(self, reducer: Reducer, device: torch.device) -> None:
        self._reducer, self._device = reducer, device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def __call__(self, part: torch.Tensor) -> Landing:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            total = self._reducer.all_reduce(part)
            landed = torch.cuda.Event()
            landed.record()

        def land() -> torch.Tensor:
            torch.cuda.current_stream(self._device).wait_event(landed)
            return total

        return land
