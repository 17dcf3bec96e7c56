"""Requests and their sequences as the scheduler knows them.

Phases: `QUEUED → PREFILL → DECODE → DONE`, back to QUEUED with attempt + 1 on preemption or loss of the
instance (docs/protocol.md §5). Counts of a running sequence refer to frames *issued*, not to results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from shared.ids import BlockHash
from shared.wire import EndRow, FinishReason, Sampling, SeqTimes, TokenRow

if TYPE_CHECKING:
    from services.scheduler.clients import Client
    from services.scheduler.instances import FetchUnderWay, Instance
    from services.scheduler.seat import Look


class Phase(Enum):
    """docs/protocol.md §5."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


ALLOWED = {
    Phase.QUEUED: {Phase.PREFILL, Phase.DONE},
    Phase.PREFILL: {Phase.DECODE, Phase.QUEUED, Phase.DONE},
    Phase.DECODE: {Phase.QUEUED, Phase.DONE},
    Phase.DONE: set(),
}


@dataclass(slots=True, eq=False)
class Request:
    """What the sequences of one submit share."""

    client: Client
    request_id: str
    prompt: list[int]
    sampling: Sampling
    priority: int
    arrived: float
    deadline: float
    queue_deadline: float
    salt: str = ""
    pin: str = ""
    canary: bool = False
    """The core's own; it alone may run on an instance that is not ready."""
    sequences: list[Sequence] = field(default_factory=list)
    warming: Sequence | None = None
    """The sibling that computes the prompt now; the others wait to find its blocks."""
    hashes: list[BlockHash] | None = None
    """Of the full blocks of the prompt, for instances of `hash_kind`."""
    hash_kind: tuple[str, int] | None = None

    @property
    def open(self) -> bool:
        """Whether any of its sequences has not ended."""
        return any(sequence.phase is not Phase.DONE for sequence in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream. The fields below `attempt` describe its present try on an instance."""

    request: Request
    handle: int
    choice: int
    order: int
    """Arrival among all sequences; ties of priority and deadline are settled by it."""
    emit: Callable[[TokenRow], None]
    """Where its token rows go: the client's pending rows."""
    out: list[int]
    """Output tokens confirmed so far, over all attempts."""
    attempt: int = 1
    row: TokenRow | None = None
    """Its latest token row, and the client's last frame when it was made: pending while that is the last."""
    row_since: int = -1
    phase: Phase = Phase.QUEUED
    instance: Instance | None = None
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    known: int = 0
    """len(prompt + out) at admission: what has to be computed before the first new token."""
    planned: int = 0
    """PREFILL: ids computed by the frames issued. DECODE: the count at frame `since`."""
    since: int = 0
    """DECODE: number of the frame from which one token a frame is computed."""
    due: int = 0
    """DECODE: frame at which it needs a block or has nothing left to compute."""
    shared: int = 0
    """Leading ones of `blocks` that it found cached."""
    reserved: int = 0
    """Blocks of expected output set aside beyond those held."""
    cached: int = -1
    """Prompt tokens found cached on the first attempt; -1: not yet admitted."""
    hashes: list[BlockHash] | None = None
    """Of the full blocks of prompt + out, for a sequence that resumes."""
    hints: dict[str, int] = field(default_factory=dict)
    """row of the shared index → leading blocks of prompt + out it is said to hold."""
    looks: dict[str, Look] = field(default_factory=dict)
    """instance → what was last seen of it for this one."""
    hold_until: float = 0.0
    """Not admitted before: its hints are on their way."""
    asked_at: float = 0.0
    """When they were last asked for."""
    fetch: FetchUnderWay | None = None
    """What it waits for while QUEUED: the beginning of it comes from the second tier."""
    fetch_tried: int = 0
    """The attempt that has had its fetch; there is one for each."""
    reached: int = 0
    """Most tokens that any of its attempts so far has computed."""
    offloaded: tuple[str, int] | None = None
    """Since its preemption: the tier (row of the prefix index) and the leading full blocks believed there."""
    preemptions: int = 0
    losses: int = 0
    """Times its instance was lost under it."""
    changed: float = 0.0
    """When the phase began."""
    times: dict[str, float] = field(default_factory=dict)
    stalled_at: float = 0.0
    """Since when it skips frames for want of a block; 0: it does not."""

    @property
    def end(self) -> int:
        """Computed tokens at which the last allowed token has been drawn."""
        return len(self.request.prompt) + self.request.sampling.max_tokens - 1

    @property
    def outlook(self) -> tuple[int, int]:
        """A row of `peak_growth`."""
        return self.reserved, len(self.blocks) - self.shared

    @property
    def waited_s(self) -> float:
        """Spent in the queue before this attempt, preempted time included."""
        return self.times.get("queue_s", 0.0) + self.times.get("preempted_s", 0.0)

    def repeats(self, start: int, count: int) -> int:
        """Of the tokens [start, start + count), those that an earlier attempt had computed."""
        return max(0, min(start + count, self.reached) - start)

    def ids(self) -> list[int]:
        """Prompt and confirmed output."""
        return self.request.prompt + self.out

    def enter(self, phase: Phase, now: float) -> None:
        """Change phase, booking the time of the one that ends. Raises on a transition not in the table."""
        if phase not in ALLOWED[self.phase]:
            raise RuntimeError(f"sequence {self.handle} cannot go from {self.phase.value} to {phase.value}")
        self.go_on(now)
        self.stop_fetching(now)
        again = self.preemptions > 0
        if self.phase is Phase.QUEUED:
            kind = "preempted_s" if again else "queue_s"
        elif self.phase is Phase.PREFILL:
            kind = "recomputed_s" if again else "prefill_s"
        else:
            kind = "decode_s"
        self.times[kind] = self.times.get(kind, 0.0) + max(0.0, now - self.changed)
        self.changed = now
        self.phase = phase

    def go_on(self, now: float) -> None:
        """If it was stalled, book that time as such and not as decoding."""
        if self.stalled_at:
            stalled_s = max(0.0, now - self.stalled_at)
            self.times["stalled_s"] = self.times.get("stalled_s", 0.0) + stalled_s
            self.changed += stalled_s
            self.stalled_at = 0.0

    def stop_fetching(self, now: float) -> None:
        """It waits for its fetch no longer, however that ends; the time is booked as a transfer."""
        if self.fetch is not None:
            fetch_s = max(0.0, now - self.fetch.begun)
            self.times["transfer_s"] = self.times.get("transfer_s", 0.0) + fetch_s
            self.changed += fetch_s
            self.fetch = None

    def end_row(self, reason: FinishReason, message: str = "") -> EndRow:
        """Its terminal row, with what it had and where its time went."""
        return EndRow(
            handle=self.handle,
            attempt=self.attempt,
            reason=reason,
            generated=len(self.out),
            cached_tokens=max(0, self.cached),
            message=message,
            times=SeqTimes(**self.times),
            preemptions=self.preemptions,
        )
