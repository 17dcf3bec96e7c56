"""Whether messages still take the time that was measured (design §7)."""

from dataclasses import dataclass

from services.worker.parallel.crossover import CrossoverTable

DRIFT = 0.25
"""Share by which observed times may depart from measured ones before it is measured anew."""


@dataclass(frozen=True)
class Drifted:
    """What was observed where another time had been measured."""

    bytes: int
    predicted_s: float
    observed_s: float

    def describe(self) -> str:
        """One sentence for people."""
        return (
            f"messages of {self.bytes} bytes take at least {self.observed_s * 1e6:.0f} µs where "
            f"{self.predicted_s * 1e6:.0f} µs were measured: the collectives are to be measured anew"
        )


class Drift:
    """Whether messages still take the time that was measured.

    Fed with the time from begin to landed of messages that had the transport to themselves. A rank that comes
    late lengthens any single time, so that only the shortest of many says what the transport takes: windows
    of `window_s` with at least `least` messages of a size class (a power of two) are judged, and `patience`
    windows of one class in a row must depart the same way by more than `DRIFT`. Time is given, not asked for.
    """

    def __init__(
        self, table: CrossoverTable, window_s: float = 10.0, patience: int = 3, least: int = 8
    ) -> None:
        self._table = table
        self._window_s, self._patience, self._least = window_s, patience, least
        self._windows: dict[int, _Window] = {}
        self._streaks: dict[int, int] = {}
        self._drifted: Drifted | None = None

    def observe(self, size: int, seconds: float, now: float, messages: int = 1) -> None:
        """The shortest of `messages` messages of `size` bytes took `seconds`. `now` never goes back."""
        kind = (size - 1).bit_length()
        window = self._windows.get(kind)
        if window is None or now - window.opened >= self._window_s:
            if window is not None:
                self._judge(kind, window)
            window = self._windows[kind] = _Window(now)
        window.messages += messages
        predicted = self._table.predict(size)
        if seconds * window.predicted_s < window.seconds * predicted or not window.bytes:
            window.bytes, window.seconds, window.predicted_s = size, seconds, predicted

    @property
    def drifted(self) -> Drifted | None:
        """The last size class found to have drifted, as the window that showed it; None while all is well."""
        return self._drifted

    def _judge(self, kind: int, window: "_Window") -> None:
        if window.messages < self._least:
            return
        ratio = window.seconds / window.predicted_s
        way = (ratio > 1 + DRIFT) - (ratio < 1 - DRIFT)
        streak = self._streaks.get(kind, 0)
        self._streaks[kind] = streak = way + (streak if streak * way > 0 else 0)
        if abs(streak) >= self._patience:
            self._drifted = Drifted(window.bytes, window.predicted_s, window.seconds)


@dataclass
class _Window:
    opened: float
    messages: int = 0
    bytes: int = 0
    """Of the message that took least for its size; 0: none was observed."""
    seconds: float = 0.0
    predicted_s: float = 1.0
