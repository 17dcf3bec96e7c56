"""Where steps are computed: on the event loop (an executor that takes no time) or in one thread of their own.

Both keep one order: frames and questions are answered in the order they were handed in.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from services.worker.compute import Begun, BrokenSession, Compute, Outcome
from shared.wire import Step

T = TypeVar("T")

LOOK_EVERY_S = 0.0001
"""How often a frame, or the result, is looked for while a device computes a step by itself."""


class RunnerListener(Protocol):
    """Told on the event loop, in the order of the frames."""

    def computed(self, outcome: Outcome) -> None: ...

    def broken(self, session: BrokenSession) -> None: ...

    def failed(self, error: BaseException) -> None:
        """The executor raised; nothing is computed any more."""


class Runner(Protocol):
    async def start(self, listener: RunnerListener) -> Compute:
        """Build the executor (may take long) and begin. Raises what building it raised."""

    def submit(self, frame: Step) -> None: ...

    def fence(self, incarnation: int) -> None:
        """From now on only frames of this incarnation run, those already handed in included."""

    def ask(self, question: Callable[[Compute], T], then: Callable[[T], None]) -> None:
        """`then` gets the answer on the event loop, in order with the outcomes of frames."""

    def busy_s(self) -> float:
        """How long the step at hand has been running; 0 when idle."""

    async def close(self) -> None:
        """Finish the step at hand, drop what waits, release the executor. Idempotent."""


async def answer_of(runner: Runner, question: Callable[[Compute], T]) -> T:
    """`Runner.ask`, awaited."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def then(answer: T) -> None:
        if not future.done():
            future.set_result(answer)

    runner.ask(question, then)
    return await future


class InlineRunner:
    """Computes on the caller's stack: right only for an executor that takes microseconds."""

    def __init__(self, make: Callable[[], Compute]) -> None:
        self._make = make
        self._compute: Compute | None = None
        self._listener: RunnerListener | None = None

    async def start(self, listener: RunnerListener) -> Compute:
        self._listener = listener
        self._compute = self._make()
        return self._compute

    def submit(self, frame: Step) -> None:
        compute, listener = self._compute, self._listener
        if compute is None or listener is None:
            return
        try:
            outcome = compute.step(frame, time.perf_counter())
        except Exception as error:
            self._compute = None
            listener.failed(error)
            return
        if isinstance(outcome, Outcome):
            listener.computed(outcome)
        elif outcome is not None:
            listener.broken(outcome)

    def fence(self, incarnation: int) -> None:
        if self._compute is not None:
            self._compute.session = incarnation

    def ask(self, question: Callable[[Compute], T], then: Callable[[T], None]) -> None:
        if self._compute is not None:
            then(question(self._compute))

    def busy_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        if self._compute is not None:
            self._compute.close()
            self._compute = None


@dataclass(frozen=True)
class _Frame:
    frame: Step
    arrived: float


@dataclass(frozen=True)
class _Question:
    question: Callable[[Compute], Any]
    then: Callable[[Any], None]


class ThreadRunner:
    """One thread builds the executor and calls it, so that the loop stays free to talk while it computes.

    The thread goes from step to step without the loop: results are posted to it, the next frame waits in
    the queue. While a device computes by itself, the next frame is begun as well, if it may follow.
    """

    def __init__(self, make: Callable[[], Compute]) -> None:
        self._make = make
        self._queue: queue.SimpleQueue[_Frame | _Question | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._compute: Compute | None = None
        self._step_began: float | None = None
        self._closing = False

    async def start(self, listener: RunnerListener) -> Compute:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._built: asyncio.Future[Compute] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._thread.start()
        self._compute = await self._built
        return self._compute

    def submit(self, frame: Step) -> None:
        self._queue.put(_Frame(frame, time.perf_counter()))

    def fence(self, incarnation: int) -> None:
        if self._compute is not None:
            self._compute.session = incarnation

    def ask(self, question: Callable[[Compute], T], then: Callable[[T], None]) -> None:
        self._queue.put(_Question(question, then))

    def busy_s(self) -> float:
        began = self._step_began
        return 0.0 if began is None else time.perf_counter() - began

    async def close(self) -> None:
        if not self._thread.ident:
            return
        self._closing = True
        self._queue.put(None)
        await self._ended.wait()

    def _work(self) -> None:
        try:
            compute = self._make()
        except BaseException as error:
            self._post(self._fail_building, error)
            self._post(self._ended.set)
            return
        self._post(self._finish_building, compute)
        try:
            if compute.relay is not None:
                compute.relay.when_lost(lambda lost: self._post(self._listener.failed, lost))
            self._serve(compute)
        except BaseException as error:
            self._post(self._listener.failed, compute.explained(error))
        finally:
            compute.close()
            self._post(self._ended.set)

    def _serve(self, compute: Compute) -> None:
        """Until closed. A second step is begun behind the one under way, then the first is finished."""
        under_way: Begun | None = None
        held: _Frame | _Question | None = None
        # taken from the queue, but to be done when nothing is under way
        while under_way is not None or not self._closing:
            item, held = held or self._next(under_way), None
            if isinstance(item, _Frame) and (under_way is None or compute.may_follow(item.frame, under_way)):
                under_way = self._begin(compute, item, under_way)
            elif under_way is not None:
                self._finish(compute, under_way)
                under_way, held = None, item
            elif isinstance(item, _Question):
                self._post(item.then, item.question(compute))

    def _next(self, under_way: Begun | None) -> "_Frame | _Question | None":
        """What is to be looked at next; None to finish the step under way, if there is one."""
        if under_way is None:
            return self._queue.get()
        look_for_s = 0.0
        while under_way.pending.feeds and not self._closing:
            try:
                return self._queue.get(timeout=look_for_s)
            except queue.Empty:
                if under_way.pending.ready():
                    break
            look_for_s = LOOK_EVERY_S
        return None

    def _begin(self, compute: Compute, item: _Frame, before: Begun | None) -> Begun | None:
        """Begin a frame and finish the one before, whatever becomes of this one."""
        if before is None:
            self._step_began = time.perf_counter()
        try:
            begun = compute.start(item.frame, item.arrived, before is not None)
        finally:
            if before is not None:
                self._finish(compute, before)
        if isinstance(begun, Begun):
            self._step_began = self._step_began or time.perf_counter()
            return begun
        self._step_began = None
        if begun is not None:
            self._post(self._listener.broken, begun)
        return None

    def _finish(self, compute: Compute, begun: Begun) -> None:
        outcome = compute.finish(begun)
        self._step_began = None
        self._post(self._listener.computed, outcome)

    def _finish_building(self, compute: Compute) -> None:
        if not self._built.done():
            self._built.set_result(compute)

    def _fail_building(self, error: BaseException) -> None:
        if not self._built.done():
            self._built.set_exception(error)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop is closed: the process ends without waiting for a step that took too long.
            pass
