"""How much output a sequence is expected to write, and so how many blocks its admission sets aside.

Three rules of one protocol: `ExpectedOutput` serves; `ReserveMax` (the whole limit, as systems without paging
do) and `ReserveNothing` (whatever fits now, as systems do that rely on preemption) exist for the comparisons
in docs/benchmarks.md.
"""

from collections.abc import Iterable
from typing import Protocol


class Reservation(Protocol):
    """How admission guesses lengths, and what it learns from."""

    def output_tokens(self, max_tokens: int, written: int) -> int:
        """Tokens of output, those already `written` included, that blocks are set aside for."""

    def expected_tokens(self, max_tokens: int, written: int) -> int:
        """Tokens of output that it is expected to end with, more than those `written`."""

    def observe(self, max_tokens: int, generated: int) -> None:
        """A sequence ended by itself after `generated` tokens."""

    def preempted(self) -> None:
        """Blocks ran out: the expectation was too low."""


class Estimate:
    """Running mean and mean deviation; the first few observations replace the prior quickly."""

    def __init__(self, mean: float, deviation: float) -> None:
        self.mean = mean
        self.deviation = deviation
        self._seen = 0

    @property
    def high(self) -> float:
        """Mean plus one deviation: what to be prepared for."""
        return self.mean + self.deviation

    def observe(self, value: float) -> None:
        self._seen += 1
        weight = max(0.05, 1.0 / (self._seen + 2))
        self.deviation += weight * (abs(value - self.mean) - self.deviation)
        self.mean += weight * (value - self.mean)


def peak_growth(rows: Iterable[tuple[int, int]]) -> int:
    """Most blocks that running sequences will need at once beyond what they hold.

    A row: the blocks that one is expected to grow by yet, and those that come back when it ends. All grow at
    the same pace, and what one gives back others grow into. Of who has outgrown what was expected (0 to come)
    the end is not foreseen.
    """
    ordered = sorted(rows)
    peak, back = 0, 0
    for index, (growth, held) in enumerate(ordered):
        # Just before this one ends, and after all before it have
        peak = max(peak, (len(ordered) - index) * growth - back)
        if growth:
            back += held
    return peak


class ExpectedOutput:
    """Learnt from how long outputs turned out.

    A limit somebody chose for an answer is worth something: a share of it is expected. A limit beyond
    `LARGE` is no forecast but the absence of one (often the rest of the context), and a share of it would
    let only a few sequences in: there the length itself is estimated.

    Of what is expected a share is set aside, and experience says which: preemptions raise it, sequences that
    end lower it, until a few in a hundred are preempted. Setting aside more costs more in concurrency than
    that in recomputation (docs/decisions/2026-11-30-preemption.md).
    """

    LARGE = 1024
    RAISE = 0.2
    """Added by each preemption to the share that is set aside."""
    DECAY = 1 / 32
    """Of that share, taken off by each sequence that ends."""
    LEAST, FIRST, MOST = 0.2, 1.3, 2.0

    def __init__(self) -> None:
        self._share = Estimate(0.7, 0.1)
        self._length = Estimate(384.0, 128.0)
        self._set_aside = self.FIRST

    def output_tokens(self, max_tokens: int, written: int) -> int:
        more = self._set_aside * (self._expected(max_tokens) - written)
        return min(max_tokens, max(written + int(more), written) + 1)

    def expected_tokens(self, max_tokens: int, written: int) -> int:
        return min(max_tokens, max(int(self._expected(max_tokens)), written) + 1)

    def _expected(self, max_tokens: int) -> float:
        return self._length.high if max_tokens > self.LARGE else max_tokens * self._share.high

    def observe(self, max_tokens: int, generated: int) -> None:
        if max_tokens > self.LARGE:
            self._length.observe(generated)
        else:
            self._share.observe(generated / max_tokens)
        self._set_aside = max(self.LEAST, self._set_aside * (1.0 - self.DECAY))

    def preempted(self) -> None:
        self._set_aside = min(self.MOST, self._set_aside + self.RAISE)


class ReserveNothing(ExpectedOutput):
    """Sets nothing aside: who fits now is admitted."""

    def output_tokens(self, max_tokens: int, written: int) -> int:
        return min(max_tokens, written + 1)


class ReserveMax:
    """Sets aside all that a sequence may ever write."""

    def output_tokens(self, max_tokens: int, written: int) -> int:
        return max_tokens

    def expected_tokens(self, max_tokens: int, written: int) -> int:
        return max_tokens

    def observe(self, max_tokens: int, generated: int) -> None:
        return

    def preempted(self) -> None:
        return
