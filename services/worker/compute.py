"""One instance's computing side: the batch and its executor, one frame after the other.

Whoever calls it does so from one thread only. Frames of a session that is over are dropped unseen; a frame
that contradicts the batch ends the session before device memory is touched.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.worker.faults import FrameFault
from services.worker.slots import Batch
from services.worker.step import Executor, StepOutput
from shared.wire import Done, Step, StepTiming, Stored

NOTHING = StepOutput(np.zeros(0, np.int32))


@dataclass(frozen=True)
class Outcome:
    """Result of a frame, and what it changed in the set of shareable hashes."""

    done: Done
    stored: list[bytes]
    removed: list[bytes]
    running: int
    """Sequences that have not stopped, afterwards."""


@dataclass(frozen=True)
class BrokenSession:
    """The frame contradicted the batch; nothing of this incarnation runs any more."""

    incarnation: int
    fault: FrameFault


class Compute:
    """`session` is the incarnation whose frames run; setting it is how the loop fences what is queued."""

    def __init__(
        self, executor: Executor, batch: Batch, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.executor = executor
        self.batch = batch
        self.session = 0
        self._clock = clock
        self._free_since = clock()
        self._broken = 0
        # incarnation that met a fault

    def step(self, frame: Step, arrived: float) -> Outcome | BrokenSession | None:
        """Compute one frame; `arrived` is when it came, on the same clock. None: its session is over.

        Whatever the executor raises passes through: memory is in an unknown state then.
        """
        if frame.incarnation != self.session or frame.incarnation == self._broken:
            return None
        begun = self._clock()
        batch = self.batch
        try:
            work = batch.apply(frame)
        except FrameFault as fault:
            self._broken = frame.incarnation
            return BrokenSession(frame.incarnation, fault)
        busy = len(work.slots) or work.copies
        result = batch.commit(work, self.executor.run(work, batch.arrays) if busy else NOTHING)
        ended = self._clock()
        # Starved if it came after we fell idle; else it waited for the steps before it.
        starved = arrived >= self._free_since
        timing = StepTiming(
            run_us=_us(ended - begun),
            wait_us=0 if starved else _us(begun - arrived),
            idle_us=_us(begun - self._free_since) if starved else 0,
            prefill_tokens=result.prefill_tokens,
            decode_tokens=result.decode_tokens,
        )
        self._free_since = ended
        stored, removed = batch.hashes.take_changes()
        done = Done(
            instance=frame.instance,
            epoch=frame.epoch,
            owner=frame.owner,
            incarnation=frame.incarnation,
            seq=frame.seq,
            slots=result.slots,
            tokens=result.tokens,
            stopped=result.stopped,
            stored=result.stored,
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
            timing=timing,
        )
        return Outcome(done, stored, removed, batch.running)

    def begin(self) -> tuple[list[Stored], int]:
        """A new session: slots are empty, hashed blocks stay. First page of the inventory, next offset."""
        self.batch.reset()
        return self.batch.hashes.page(0)

    def page(self, offset: int) -> tuple[list[Stored], int]:
        return self.batch.hashes.page(offset)

    def all_hashes(self) -> list[bytes]:
        return self.batch.hashes.all_hashes()

    def close(self) -> None:
        self.executor.close()


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
