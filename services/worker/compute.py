"""One instance's computing side: the batch and its executor, one frame after the other.

Whoever calls it does so from one thread only. Frames of a session that is over are dropped unseen; a frame
that contradicts the batch ends the session before device memory is touched.

A frame is begun and then finished. One more may be begun in between if it `may_follow`: then the device goes
from one to the other while the host still waits for the first one's tokens. Results are those of one frame
after the other.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.worker.faults import FrameFault
from services.worker.slots import AppliedStep, Batch, goes_on
from services.worker.step import Computed, Executor, OverlappingExecutor, Pending, StepOutput
from shared.wire import Done, Step, StepTiming, Stored

NOTHING = Computed(StepOutput(np.zeros(0, np.int32)))


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


@dataclass(slots=True)
class Begun:
    """A frame that was applied and handed to the executor, and has to be finished. Not frozen: that costs."""

    frame: Step
    arrived: float
    at: float
    """When it was begun."""
    work: AppliedStep
    pending: Pending


class Compute:
    """`session` is the incarnation whose frames run; setting it is how the loop fences what is queued."""

    def __init__(
        self, executor: Executor, batch: Batch, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.executor = executor
        self.batch = batch
        self.session = 0
        self._overlapping: OverlappingExecutor | None = None
        if isinstance(executor, OverlappingExecutor) and executor.info.overlaps:
            self._overlapping = executor
        self._clock = clock
        self._free_since = clock()
        self._broken = 0
        # incarnation that met a fault

    def step(self, frame: Step, arrived: float) -> Outcome | BrokenSession | None:
        """Compute one frame; `arrived` is when it came, on the same clock. None: its session is over.

        Whatever the executor raises passes through: memory is in an unknown state then.
        """
        begun = self.start(frame, arrived)
        return self.finish(begun) if isinstance(begun, Begun) else begun

    def may_follow(self, frame: Step, under_way: Begun) -> bool:
        """Whether `frame`, the next one, may be started before `under_way` is finished."""
        return under_way.pending.feeds and frame.incarnation == under_way.frame.incarnation and goes_on(frame)

    def start(self, frame: Step, arrived: float) -> Begun | BrokenSession | None:
        """The first half of `step`: as far as the executor goes without waiting for its device."""
        if frame.incarnation != self.session or frame.incarnation == self._broken:
            return None
        at = self._clock()
        batch = self.batch
        try:
            work = batch.apply(frame)
        except FrameFault as fault:
            self._broken = frame.incarnation
            return BrokenSession(frame.incarnation, fault)
        pending: Pending = NOTHING
        if len(work.slots) or work.copies:
            if self._overlapping is not None:
                pending = self._overlapping.begin(work, batch.arrays)
            else:
                pending = Computed(self.executor.run(work, batch.arrays))
        return Begun(frame, arrived, at, work, pending)

    def finish(self, begun: Begun) -> Outcome:
        """The second half, for frames in their order."""
        frame, batch = begun.frame, self.batch
        result = batch.commit(begun.work, begun.pending.wait())
        ended = self._clock()
        # Starved if it came after we fell idle; else it waited for the steps before it, also on the device.
        starved = begun.arrived >= self._free_since
        ran_from = max(begun.at, self._free_since)
        timing = StepTiming(
            run_us=_us(ended - ran_from),
            wait_us=0 if starved else _us(ran_from - begun.arrived),
            idle_us=_us(ran_from - self._free_since) if starved else 0,
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
