"""Books kept from step frames and results alone, as anybody on the bus can: who runs, what KV is held."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shared.wire import Done, Step


@dataclass
class Seat:
    """A sequence in its slot."""

    known: int
    """Ids it consists of so far: prompt and output."""
    blocks: list[int]
    generated: int = 0
    stopped: bool = False


@dataclass(frozen=True)
class Sample:
    """Taken at a result, every `SAMPLE_EVERY` steps."""

    seq: int
    running: int
    held_blocks: int
    used_tokens: int
    set_aside: int
    """Blocks kept free for the expected output of the running, where the books' keeper can see it."""


SAMPLE_EVERY = 4


@dataclass
class Books:
    """Feed it every `Step` and `Done` of one instance, in the order they were sent.

    A frame takes effect here when its result comes, so that the figures belong to one moment.
    """

    block_tokens: int
    steps: int = 0
    decode_steps: int = 0
    """Steps in which at least one sequence decoded: the iterations the experiment compares."""
    decode_tokens: int = 0
    prefill_tokens: int = 0
    max_running: int = 0
    interruptions: int = 0
    """Slots taken away from sequences that had not ended: preemptions, or cancels where there are any."""
    stalls: int = 0
    """Times a sequence that was generating had to skip a step."""
    samples: list[Sample] = field(default_factory=list)
    seats: dict[int, Seat] = field(default_factory=dict)
    set_aside: Callable[[], int] = lambda: 0
    _frames: dict[int, Step] = field(default_factory=dict)

    def on_step(self, step: Step) -> None:
        self._frames[step.seq] = step

    def on_done(self, done: Done) -> None:
        step = self._frames.pop(done.seq, None)
        if step is None:
            return
        self._apply(step)
        self.steps += 1
        self.decode_steps += done.timing.decode_tokens > 0
        self.decode_tokens += done.timing.decode_tokens
        self.prefill_tokens += done.timing.prefill_tokens
        for slot in done.slots:
            if seat := self.seats.get(slot):
                seat.known += 1
                seat.generated += 1
        self.max_running = max(self.max_running, self._running())
        if self.steps % SAMPLE_EVERY == 0 and self.seats:
            self.samples.append(Sample(done.seq, self._running(), *self._memory(), self.set_aside()))
        for row in done.stopped:
            if seat := self.seats.get(row.slot):
                seat.stopped = True

    def _apply(self, step: Step) -> None:
        for slot in step.release:
            seat = self.seats.pop(slot, None)
            if seat is not None and not seat.stopped:
                self.interruptions += 1
        for admit in step.admit:
            self.seats[admit.slot] = Seat(len(admit.ids), list(admit.blocks))
        for row in step.blocks:
            if seat := self.seats.get(row.slot):
                seat.blocks += row.blocks
        for work in step.work:
            seat = self.seats.get(work.slot)
            if seat is not None and work.count == 0 and seat.generated and not seat.stopped:
                self.stalls += 1

    def _running(self) -> int:
        return sum(not seat.stopped for seat in self.seats.values())

    def _memory(self) -> tuple[int, int]:
        """(blocks in tables, tokens in them); a shared block counts once."""
        filled: dict[int, int] = {}
        size = self.block_tokens
        for seat in self.seats.values():
            left = seat.known
            for block in seat.blocks:
                filled[block] = max(filled.get(block, 0), min(size, max(left, 0)))
                left -= size
        return len(filled), sum(filled.values())

    @property
    def waste(self) -> float:
        """Token places held and not used, over all token places held; mean over the samples.

        Held: blocks in the tables of sequences in slots. Used: places of their ids, prompt and output.
        """
        return self._unused(sum(s.held_blocks for s in self.samples))

    @property
    def claimed_waste(self) -> float:
        """The same where blocks set aside count as held: nobody else can have them."""
        return self._unused(sum(s.held_blocks + s.set_aside for s in self.samples))

    def _unused(self, blocks: int) -> float:
        used = sum(s.used_tokens for s in self.samples)
        return 1 - used / (blocks * self.block_tokens) if blocks else 0.0

    def figures(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "decode_steps": self.decode_steps,
            "decode_tokens": self.decode_tokens,
            "prefill_tokens": self.prefill_tokens,
            "mean_batch": round(self.decode_tokens / self.decode_steps, 2) if self.decode_steps else 0.0,
            "max_running": self.max_running,
            "interruptions": self.interruptions,
            "stalls": self.stalls,
            "kv_waste": round(self.waste, 4),
            "kv_claimed_waste": round(self.claimed_waste, 4),
        }
