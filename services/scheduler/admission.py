"""How much output a sequence is expected to write, and so how many blocks its admission sets aside.

Two rules of one protocol: `ExpectedOutput` serves; `ReserveMax` (the whole limit, as systems without paging
do) exists for the comparison in docs/benchmarks.md.
"""

from typing import Protocol


class Reservation(Protocol):
    def output_tokens(self, max_tokens: int, written: int) -> int:
        """Tokens of output, those already `written` included, that blocks are set aside for."""

    def observe(self, max_tokens: int, generated: int) -> None:
        """A sequence ended by itself after `generated` tokens."""

    def preempted(self) -> None:
        """Blocks ran out: the expectation was too low."""


class ExpectedOutput:
    """A share of max_tokens, learnt from how much of it ended sequences used: mean plus one deviation."""

    FIRST = 0.7
    CLIP_TOKENS = 4096
    """Nobody is held to more than this: a huge limit says little about the length."""

    def __init__(self) -> None:
        self._mean = self.FIRST
        self._deviation = 0.1
        self._raise = 0.0

    @property
    def share(self) -> float:
        return min(1.0, self._mean + self._deviation + self._raise)

    def output_tokens(self, max_tokens: int, written: int) -> int:
        expected = min(int(max_tokens * self.share) + 1, written + self.CLIP_TOKENS, max_tokens)
        return max(expected, min(written + 1, max_tokens))

    def observe(self, max_tokens: int, generated: int) -> None:
        used = generated / max_tokens
        self._deviation += 0.05 * (abs(used - self._mean) - self._deviation)
        self._mean += 0.05 * (used - self._mean)
        self._raise *= 0.98

    def preempted(self) -> None:
        self._raise = min(1.0, self._raise + 0.1)


class ReserveMax:
    """Sets aside all that a sequence may ever write."""

    def output_tokens(self, max_tokens: int, written: int) -> int:
        return max_tokens

    def observe(self, max_tokens: int, generated: int) -> None:
        return

    def preempted(self) -> None:
        return
