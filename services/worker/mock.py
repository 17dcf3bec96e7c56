"""An executor without a model: deterministic tokens at no cost, for the mesh's own figures and tests.

The next token is a hash of (seed, choice, position, last token), so a sequence goes on identically after
preemption, migration or another batch, as a real model's would.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.collective.port import LOOPBACK, Collective, GroupLost
from services.worker.mock_kv import MockKv
from services.worker.step import (
    I32,
    ExecutorInfo,
    PromptLogprobs,
    SlotArrays,
    StepInput,
    StepOutput,
    TokenLogprobs,
)

I64 = NDArray[np.int64]

# Odd 64-bit constants as signed integers: arithmetic is modulo 2^64 either way, and int32 arrays widen by
# themselves.
_POSITION, _LAST, _FACTOR = -0x61C8864680B583EB, -0x2E4AB5CD2E6D12FD, -0x40A7B892E31B1A47

CHOSEN_LOGPROB = -0.5
"""Made up, and the same everywhere."""


@dataclass(frozen=True)
class MockCosts:
    """Simulated seconds: of a step, and of each token it computes."""

    step_s: float = 0.0
    token_s: float = 0.0

    @property
    def any(self) -> bool:
        return self.step_s > 0 or self.token_s > 0


class MockExecutor:
    """The seam without maths. Sleeps as long as `costs` say, at once ready otherwise.

    In a group, ranks tell each other what they drew, so that a step needs all of them.
    """

    def __init__(
        self, info: ExecutorInfo, max_slots: int, costs: MockCosts, collective: Collective = LOOPBACK
    ) -> None:
        self._info = info
        self._collective = collective
        self._costs = costs
        self._first, self._span = (np.int32(part) for part in token_range(info.vocab_size))
        self._version = np.full(max_slots, -1, np.int64)
        self._key = np.zeros(max_slots, np.int64)
        self._generation = -1
        self._asking: set[int] = set()
        # slots that want log-probabilities
        self._kv: MockKv | None = None

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def kv_memory(self) -> MockKv | None:
        """Blocks that can be kept elsewhere: really written once this was asked for. None: computing them
        takes no time, so nothing can be had sooner."""
        if self._kv is None and self._costs.token_s > 0:
            self._kv = MockKv(self._info, self._collective.rank)
        return self._kv

    def run(self, step: StepInput, slots: SlotArrays) -> StepOutput:
        rows = step.slots
        if self._costs.any:
            time.sleep(self._costs.step_s + self._costs.token_s * int(step.counts.sum()))
        if not len(rows):
            return StepOutput(np.zeros(0, np.int32))
        if slots.generation != self._generation:
            self._generation = slots.generation
            # Also slots without a row in this step: the generation tells of them only once.
            changed = (slots.version != self._version).nonzero()[0].tolist()
            self._read(changed, slots)
            if self._kv is not None:
                self._kv.expect(changed)
        if self._kv is not None:
            self._kv.compute(step, slots)
        position = step.starts + step.counts
        output = StepOutput(self._draw(self._key[rows], position, slots.tokens[rows, position - 1]))
        if not step.samples.all():
            output.tokens[~step.samples] = -1
        if self._collective.size > 1:
            self._agree(output.tokens)
        if self._asking:
            self._add_logprobs(step, slots, output)
        return output

    def close(self) -> None:
        """Nothing is held."""

    def _agree(self, tokens: I32) -> None:
        drawn = self._collective.gather(tokens.view(np.uint8))
        if (drawn != drawn[0]).any():
            self._collective.abort("ranks drew different tokens")
            raise GroupLost("ranks drew different tokens")

    def _read(self, changed: list[int], slots: SlotArrays) -> None:
        for slot in changed:
            self._version[slot] = slots.version[slot]
            sampling = slots.sampling[slot]
            if sampling is None:
                continue
            self._asking.discard(slot)
            if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
                self._asking.add(slot)
            choice = int(slots.choice[slot])
            self._key[slot] = _signed(_mix(sampling.seed * 0x9E3779B97F4A7C15 + choice))

    def _draw(self, key: I64, position: I32, last: I32) -> I32:
        # Multiplicative hashing: the top bits depend on every bit below.
        mixed = ((position * np.int64(_POSITION) + last * np.int64(_LAST)) ^ key) * np.int64(_FACTOR)
        return (mixed.view(np.uint64) >> np.uint64(40)).astype(np.int32) % self._span + self._first

    def _add_logprobs(self, step: StepInput, slots: SlotArrays, output: StepOutput) -> None:
        for row, slot in enumerate(step.slots.tolist()):
            sampling = slots.sampling[slot]
            if slot not in self._asking or sampling is None:
                continue
            if sampling.logprobs is not None and step.samples[row]:
                token = int(output.tokens[row])
                output.logprobs[row] = TokenLogprobs(CHOSEN_LOGPROB, self._top(token, sampling.logprobs))
            # Position 0 has no prediction; what lies behind the prompt is output.
            start = max(1, int(step.starts[row]))
            stop = min(int(step.starts[row] + step.counts[row]), int(slots.prompt_len[slot]))
            if sampling.prompt_logprobs is not None and start < stop:
                ids = slots.tokens[slot, start:stop].tolist()
                top = [self._top(token, sampling.prompt_logprobs) for token in ids]
                output.prompt_logprobs[row] = PromptLogprobs(start, [CHOSEN_LOGPROB] * len(ids), top)

    def _top(self, token: int, count: int) -> list[tuple[int, float]]:
        others = ((token + offset) % self._info.vocab_size for offset in range(count))
        return [(other, CHOSEN_LOGPROB - rank) for rank, other in enumerate(others)]


def token_range(vocab_size: int) -> tuple[int, int]:
    """(first, count) of the ids drawn: common whole words of a byte-pair vocabulary, no control ids."""
    first = vocab_size // 32
    return first, max(1, vocab_size // 2 - first)


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014)."""
    value %= 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The signed integer of the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value
