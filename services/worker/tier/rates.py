"""What a fetch takes, and what computing the same again takes: both measured, on this machine. Pure."""

import threading

KEPT = 0.9
"""Of all that was seen before, at each new measurement: about the last ten count."""

CHAIN = 8
"""Blocks of a prefix that is worth having."""

LEAST_TOKENS = 64
"""Of a prompt's chunk whose time says something about the next."""


class FetchRates:
    """Fits `fixed_s + blocks × block_s` by least squares to recent fetches. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weight = self._n = self._nn = self._s = self._ns = 0.0
        # sums over fetches: 1, blocks, blocks², seconds, blocks × seconds

    @property
    def known(self) -> bool:
        return self._weight > 0

    def forget(self) -> None:
        """Another tier: nothing of this holds for it."""
        with self._lock:
            self._weight = self._n = self._nn = self._s = self._ns = 0.0

    def observe(self, blocks: int, seconds: float) -> None:
        with self._lock:
            self._weight = self._weight * KEPT + 1
            self._n = self._n * KEPT + blocks
            self._nn = self._nn * KEPT + blocks * blocks
            self._s = self._s * KEPT + seconds
            self._ns = self._ns * KEPT + blocks * seconds

    def fit(self) -> tuple[float, float]:
        """(fixed_s, block_s), neither below 0. (0, 0) while nothing is known."""
        with self._lock:
            weight, n, nn, s, ns = self._weight, self._n, self._nn, self._s, self._ns
        if not weight:
            return 0.0, 0.0
        mean_n, mean_s = n / weight, s / weight
        spread = nn / weight - mean_n**2
        together = ns / weight - mean_n * mean_s
        # Fetches of one size say nothing of how the time splits: all of it then counts by block.
        block_s = together / spread if spread > 1e-6 * mean_n**2 else mean_s / mean_n
        block_s = min(max(block_s, 0.0), mean_s / mean_n)
        return max(0.0, mean_s - block_s * mean_n), block_s


class PrefillRate:
    """Seconds a token of a prompt takes, from chunks computed with nothing else in the step."""

    def __init__(self, tok_s: float) -> None:
        """`tok_s`: as measured at the start; 0: unknown."""
        self.token_s = 1 / tok_s if tok_s > 0 else 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens >= LEAST_TOKENS:
            self.token_s = self.token_s * KEPT + (1 - KEPT) * seconds / tokens


def pays(fixed_s: float, block_s: float, block_tokens: int, token_s: float) -> bool:
    """Whether a chain of `CHAIN` blocks is had sooner from the tier than by computing. Of shorter ones the
    scheduler judges, which knows how short."""
    return fixed_s + CHAIN * block_s < CHAIN * block_tokens * token_s
