"""Stop strings: cut the text at the first one, and show nothing that might still become one."""

from collections.abc import Sequence


class StopMatcher:
    """Of one choice. `feed` text as it comes; a match is the stop string that is complete first.

    Ties go to the longest. The result does not depend on how the text was cut into pieces.
    """

    __slots__ = ("_firsts", "_longest", "_stops", "held", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops))
        self.held = ""
        """Text withheld: a proper beginning of a stop string."""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain to lie before any stop string; sets `matched` when one is complete."""
        text = self.held + text
        found = self._find(text)
        if found is not None:
            start, self.matched = found
            self.held = ""
            return text[:start]
        keep = self._possible(text)
        self.held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The text ends here, so what was withheld is no stop string."""
        tail, self.held = self.held, ""
        return tail

    def _find(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else best[1:]

    def _possible(self, text: str) -> int:
        """Where the longest ending of `text` that begins a stop string starts."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return start
        return len(text)
