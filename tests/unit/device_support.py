"""A device that computes by itself, made up: what a host may and may not know of it is checked.

Not a test: imported by the tests of frames in flight.
"""

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from services.worker.shape import BatchShape
from services.worker.step import I32, ExecutorInfo, SlotArrays, StepInput, StepOutput, TokenLogprobs


@dataclass
class FakeDevice:
    """`OverlappingExecutor` whose next id depends on all ids that a row's blocks hold.

    A step is computed when it is begun, as a device would in its order; the host gets the ids when it waits.
    Rows with a top-k are drawn by the host. About one draw in `1 / broken` is not finite.
    """

    shape: BatchShape
    overlaps: bool = True
    broken: float = 0.0
    together: int = 0
    """Steps that were begun while another was under way."""
    fed: int = 0
    """Ids taken from the device's own memory."""
    under_way: "list[PendingStep]" = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.shape
        self.info = ExecutorInfo(
            "fp",
            shape.block_tokens,
            shape.blocks_total,
            shape.max_len,
            shape.vocab_size,
            0,
            0,
            overlaps=self.overlaps,
        )
        self.kv = np.full((shape.blocks_total, shape.block_tokens), -1, np.int32)
        self.last = np.full(shape.max_slots, -1, np.int32)

    def run(self, step: StepInput, slots: SlotArrays) -> StepOutput:
        return self.begin(step, slots).wait()

    def begin(self, step: StepInput, slots: SlotArrays) -> "PendingStep":
        assert len(self.under_way) < 2
        assert all(before.feeds for before in self.under_way)
        assert not (self.under_way and step.copies)
        self.together += len(self.under_way)
        for source, target in step.copies:
            self.kv[target] = self.kv[source]
        drawn = self.compute(step, slots)
        samplings = [slots.sampling[slot] for slot in step.slots.tolist()]
        plain = all(sampling is not None and sampling.top_k == 0 for sampling in samplings)
        if plain:
            self.last[step.slots[step.samples]] = np.maximum(drawn[step.samples], 0)
        pending = PendingStep(self, step, slots, drawn, plain or not step.samples.any())
        self.under_way.append(pending)
        return pending

    def compute(self, step: StepInput, slots: SlotArrays) -> I32:
        size = self.shape.block_tokens
        drawn = np.full(len(step.slots), -1, np.int32)
        rows = zip(step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True)
        for row, (slot, start, count) in enumerate(rows):
            end, known = start + count, int(slots.known[slot])
            table = slots.block_table[slot, : -(-end // size)]
            for position in range(start, end):
                if position < known:
                    token = slots.tokens[slot, position]
                else:
                    assert position == known
                    token = self.last[slot]
                    self.fed += 1
                self.kv[table[position // size], position % size] = token
            if step.samples[row]:
                sampling = slots.sampling[slot]
                assert sampling is not None
                context = self.kv[table].reshape(-1)[:end].tobytes()
                key = f"{sampling.seed} {slots.choice[slot]} {end}".encode()
                number = int.from_bytes(blake2b(key + context, digest_size=8).digest(), "little")
                broken = (number >> 20) % 1000 < 1000 * self.broken
                drawn[row] = -2 if broken else number % self.shape.vocab_size
        return drawn

    def close(self) -> None:
        assert not self.under_way


@dataclass
class PendingStep:
    device: FakeDevice
    step: StepInput
    slots: SlotArrays
    drawn: I32
    feeds: bool

    def ready(self) -> bool:
        return True

    def wait(self) -> StepOutput:
        assert self.device.under_way.pop(0) is self, "results are taken in the order of the steps"
        output, step = StepOutput(self.drawn), self.step
        if not self.feeds:
            for row in np.flatnonzero(step.samples).tolist():
                slot = int(step.slots[row])
                if self.slots.known[slot] != step.starts[row] + step.counts[row]:
                    # The step before stopped it without an id: no history to draw from.
                    output.tokens[row] = 0
                elif self.drawn[row] >= 0:
                    output.logprobs[row] = TokenLogprobs(-float(self.drawn[row]), [])
        return output
