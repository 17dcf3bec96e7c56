"""One instance's computing side: the batch and its executor, one frame after the other.

Whoever calls it does so from one thread only. Frames of a session that is over are dropped unseen; a frame
that contradicts the batch ends the session before device memory is touched.

A frame is begun and then finished. One more may be begun in between if it `may_follow`: then the device goes
from one to the other while the host still waits for the first one's tokens. Results are those of one frame
after the other.
"""

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from services.worker.collective.port import GroupLost
from services.worker.faults import FrameFault
from services.worker.slots import AppliedStep, Batch, goes_on
from services.worker.step import (
    AccountedExecutor,
    Computed,
    Executor,
    GroupedExecutor,
    OverlappingExecutor,
    Pending,
    StepOutput,
)
from services.worker.tier.arrivals import Key
from services.worker.tier.homes import TierState
from services.worker.tier.second import SecondTier
from shared.wire import Done, Fetched, Step, StepTiming, Stored

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
class FetchEnd:
    """How a fetch of a session has ended, and what that changed in the set of shareable hashes."""

    session: int
    fetched: Fetched
    stored: list[bytes]
    removed: list[bytes]


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


class Relay(Protocol):
    """What rank 0 of a group tells the others before it does so itself. Telling may raise `GroupLost`."""

    @property
    def size(self) -> int:
        """Ranks of the group."""
        ...

    def follow(self, frame: Step, behind: bool, check: int) -> None: ...

    def begin(self) -> None: ...

    def tune(self, state: dict[str, Any]) -> None: ...

    def measure(self, name: str) -> None: ...

    def use_tiers(self, state: TierState) -> None: ...

    def end_fetch(self, key: Key, count: int) -> None: ...

    def when_fetched(self, then: Callable[[int, Key, int, int], None]) -> None:
        """`then` is called from another thread with (rank, fetch, blocks it got, microseconds) of each."""

    def when_lost(self, then: Callable[[GroupLost], None]) -> None:
        """`then` is called from another thread, or at once, should the group be lost."""

    def explained(self, error: GroupLost) -> GroupLost:
        """The loss with what is known of it by now."""
        ...

    def detail(self) -> dict[str, str]: ...

    def memory(self) -> list[dict[str, Any]]:
        """What the other ranks told of theirs when they were built."""
        ...

    def close(self) -> None: ...


class Compute:
    """`session` is the incarnation whose frames run; setting it is how the loop fences what is queued.

    Rank 0 of a group has a `relay`: the others are told of every frame that runs here, and of nothing else.
    """

    def __init__(
        self,
        executor: Executor,
        batch: Batch,
        clock: Callable[[], float] = time.perf_counter,
        relay: Relay | None = None,
        tier: SecondTier | None = None,
    ) -> None:
        """`tier`: this rank's side of the second tier; None: its blocks are kept nowhere else."""
        self.executor = executor
        self.batch = batch
        self.relay = relay
        self.tier = tier
        self.session = 0
        self.check = 0
        """Checksum of all that was drawn so far: the same on all ranks."""
        self._tuned: GroupedExecutor | None = executor if isinstance(executor, GroupedExecutor) else None
        if tier is not None:
            tier.knows(batch.hashes.link)
        self._overlapping: OverlappingExecutor | None = None
        if isinstance(executor, OverlappingExecutor) and executor.info.overlaps:
            self._overlapping = executor
        self._clock = clock
        self._free_since = clock()
        self._broken = 0
        # incarnation that met a fault
        self._current = 0
        # incarnation of the frames applied last: whose slots and fetches the batch holds

    def step(self, frame: Step, arrived: float) -> Outcome | BrokenSession | None:
        """Compute one frame; `arrived` is when it came, on the same clock. None: its session is over.

        Whatever the executor raises passes through: memory is in an unknown state then.
        """
        begun = self.start(frame, arrived)
        return self.finish(begun) if isinstance(begun, Begun) else begun

    def may_follow(self, frame: Step, under_way: Begun) -> bool:
        """Whether `frame`, the next one, may be started before `under_way` is finished."""
        return under_way.pending.feeds and frame.incarnation == under_way.frame.incarnation and goes_on(frame)

    def start(self, frame: Step, arrived: float, behind: bool = False) -> Begun | BrokenSession | None:
        """The first half of `step`: as far as the executor goes without waiting for its device.

        `behind`: the frame before is not finished yet.
        """
        if frame.incarnation != self.session or frame.incarnation == self._broken:
            return None
        if self.relay is not None:
            self._tune_group(self.relay)
            self.relay.follow(frame, behind, self.check)
        at = self._clock()
        batch = self.batch
        self._current = frame.incarnation
        try:
            work = batch.apply(frame)
        except FrameFault as fault:
            self._broken = frame.incarnation
            if self.tier is not None:
                self.tier.broken()
            return BrokenSession(frame.incarnation, fault)
        if self.tier is not None and (work.evicted or work.offload or work.fetch or work.reused):
            self.tier.apply(work, frame.incarnation)
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
        output = begun.pending.wait()
        self.check = zlib.crc32(output.tokens.tobytes(), self.check)
        result = batch.commit(begun.work, output)
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
        if self.tier is not None:
            if result.stored:
                self.tier.stored(result.stored)
            if result.prefill_tokens and not result.decode_tokens:
                self.tier.computed(result.prefill_tokens, ended - ran_from)
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
        if self.relay is not None:
            self.relay.begin()
        if self.tier is not None:
            self.tier.begin()
        self._current = 0
        self.batch.reset()
        return self.batch.hashes.page(0)

    def page(self, offset: int) -> tuple[list[Stored], int]:
        return self.batch.hashes.page(offset)

    def all_hashes(self) -> list[bytes]:
        return self.batch.hashes.all_hashes()

    def tune(self, state: dict[str, Any]) -> None:
        """What rank 0 of the group says that the executor is to be told before the next frame."""
        if self._tuned is not None:
            self._tuned.tune(state)

    def measure(self, name: str) -> dict[str, Any]:
        """Run the executor's measurement `name`, on all ranks. Raises ValueError if it knows none."""
        if self._tuned is None:
            raise ValueError("this executor has no measurements")
        if self.relay is not None:
            self.relay.measure(name)
        return self._tuned.measure(name)

    def use_tiers(self, state: TierState) -> None:
        """The second tiers there are, for all ranks from the same frame on."""
        if self.relay is not None:
            self.relay.use_tiers(state)
        if self.tier is not None:
            self.tier.use(state, self.batch.hashes.all_blocks)

    def end_fetch(self, key: Key, count: int, us: int = 0) -> FetchEnd | None:
        """A fetch has ended: on every rank its first `count` blocks hold what was asked for.

        Between frames. None: its session is over.
        """
        if self.relay is not None:
            self.relay.end_fetch(key, count)
        if self.tier is not None:
            self.tier.end(key)
        session, op = key
        if session != self._current or not self.batch.fetched(op, count):
            return None
        stored, removed = self.batch.hashes.take_changes()
        return FetchEnd(session, Fetched(op, count, us), stored, removed)

    def report(self) -> dict[str, Any]:
        """How the group communicates; empty of a rank alone. From any thread."""
        return {} if self.relay is None or self._tuned is None else self._tuned.report()

    def memory(self) -> list[dict[str, Any]]:
        """What each rank takes, rank 0 first; none of executors that keep no account."""
        own = self.executor.memory() if isinstance(self.executor, AccountedExecutor) else {}
        return [own, *([] if self.relay is None else self.relay.memory())] if own else []

    def explained(self, error: BaseException) -> BaseException:
        """`error`, or what is known of it where it is the loss of the group."""
        if isinstance(error, GroupLost) and self.relay is not None:
            return self.relay.explained(error)
        return error

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
        self.executor.close()
        if self.relay is not None:
            self.relay.close()

    def _tune_group(self, relay: Relay) -> None:
        state = None if self._tuned is None else self._tuned.news()
        if state is not None:
            relay.tune(state)
            self.tune(state)


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
