"""How much output a sequence is expected to write, and so how many blocks its admission sets aside.

Two rules of one protocol: `ExpectedOutput` serves; `ReserveMax` (the whole limit, as systems without paging
do) exists for the comparison in docs/benchmarks.md.
"""

from typing import Protocol


class Reservation(Protocol):
    """How admission guesses lengths, and what it learns from."""

    def output_tokens(self, max_tokens: int, written: int) -> int:
        """Tokens of output, those already `written` included, that blocks are set aside for."""

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


class ExpectedOutput:
    """Learnt from how long outputs turned out.

    A limit somebody chose for an answer is worth something: a share of it is expected. A limit beyond
    `LARGE` is no forecast but the absence of one (often the rest of the context), and a share of it would
    let only a few sequences in: there the length itself is estimated.
    """

    LARGE = 1024
    RAISE = 0.1
    """Added to the expectation, relatively, by each preemption; wears off with sequences that end."""

    def __init__(self) -> None:
        self._share = Estimate(0.7, 0.1)
        self._length = Estimate(384.0, 128.0)
        self._raise = 0.0

    def output_tokens(self, max_tokens: int, written: int) -> int:
        expected = self._length.high if max_tokens > self.LARGE else max_tokens * self._share.high
        return min(max_tokens, max(int(expected * (1.0 + self._raise)) + 1, written + 1))

    def observe(self, max_tokens: int, generated: int) -> None:
        if max_tokens > self.LARGE:
            self._length.observe(generated)
        else:
            self._share.observe(generated / max_tokens)
        self._raise *= 0.98

    def preempted(self) -> None:
        self._raise = min(1.0, self._raise + self.RAISE)


class ReserveMax:
    """Sets aside all that a sequence may ever write."""

    def output_tokens(self, max_tokens: int, written: int) -> int:
        return max_tokens

    def observe(self, max_tokens: int, generated: int) -> None:
        return

    def preempted(self) -> None:
        return
