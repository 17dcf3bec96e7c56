"""A native pass's use of an exchange, in Python: room, begin, land, release."""

import ctypes
from typing import Any

import numpy as np

from services.worker.collective import abi


class Pass:
    """Calls the table of functions as compiled code does."""

    def __init__(self, exchange: abi.Exchange) -> None:
        self._table = exchange
        self._landed = abi.Landed()
        self._floats: list[int] = []

    def send(self, part: np.ndarray, kind: int = abi.SUM) -> None:
        address = self._table.room(self._table.self, part.size, kind)
        assert address % 64 == 0
        ctypes.memmove(address, part.ctypes.data, part.nbytes)
        self._floats.append(part.size)
        self._table.begin(self._table.self)

    def land(self) -> list[np.ndarray]:
        """The parts where they lie; none of a lost group."""
        self._table.land(self._table.self, self._landed)
        floats = self._floats.pop(0)
        return [self._view(self._landed.part[p], floats) for p in range(self._landed.parts)]

    def release(self) -> None:
        self._table.release(self._table.self)

    @staticmethod
    def _view(address: Any, floats: int) -> np.ndarray:
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (floats,))
