"""When a sequence ends: at its length, or at a stop id once it has its `min_tokens`. Pure, over all slots."""

from collections import Counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from services.worker.shape import BatchShape
from services.worker.step import I32
from services.worker.tables import Rows
from shared.wire import Admit

StopReason = Literal["stop", "length", "error"]


class StopRules:
    """One look-up settles almost every token; only what may stop is handled one by one."""

    def __init__(self, shape: BatchShape) -> None:
        self._max_len = shape.max_len
        self._last = np.zeros(shape.max_slots, np.int32)
        # position of the last id that the sequence's length allows
        self._ids: list[frozenset[int]] = [frozenset()] * shape.max_slots
        self._counts_from = np.zeros(shape.max_slots, np.int32)
        # stop ids count from this position on (min_tokens)
        self._watchers: Counter[int] = Counter()
        # per id: slots it may stop
        self._watched = np.zeros(shape.vocab_size, np.bool_)
        # ids with watchers

    def watch(self, admit: Admit, limit: int) -> None:
        """The sequence has at most `limit` ids; all of it was checked."""
        slot, sampling = admit.slot, admit.sampling
        self._last[slot] = limit - 1
        self._counts_from[slot] = min(admit.prompt_len + max(0, sampling.min_tokens), self._max_len)
        self._ids[slot] = frozenset(sampling.stop_token_ids)
        for token in self._ids[slot]:
            self._watchers[token] += 1
            self._watched[token] = True

    def forget(self, slot: int) -> None:
        for token in self._ids[slot]:
            self._watchers[token] -= 1
            if not self._watchers[token]:
                del self._watchers[token]
                self._watched[token] = False
        self._ids[slot] = frozenset()

    def reset(self) -> None:
        self._watchers.clear()
        self._watched.fill(False)
        self._ids[:] = [frozenset()] * len(self._ids)

    def full(self, rows: Rows, positions: I32) -> NDArray[np.bool_] | None:
        """Which of these slots end with their ids at `positions`, whatever those are; None if none does."""
        full = positions >= self._last[rows]
        return full if full.any() else None

    def found(
        self, slots: list[int], positions: I32, tokens: I32, full: NDArray[np.bool_] | None
    ) -> list[tuple[int, StopReason]]:
        """Slots that end with `tokens` at `positions`, and why; a stop id wins over the length."""
        if self._watchers:
            ended = self._watched[tokens] if full is None else self._watched[tokens] | full
        elif full is not None:
            ended = full
        else:
            return []
        found: list[tuple[int, StopReason]] = []
        for row in ended.nonzero()[0].tolist():
            slot = slots[row]
            if int(tokens[row]) in self._ids[slot] and positions[row] >= self._counts_from[slot]:
                found.append((slot, "stop"))
            elif full is not None and full[row]:
                found.append((slot, "length"))
        return found
