"""Stop strings: cut the text at the first one, and show nothing that might still become one."""

from collections.abc import Sequence


class StopMatcher:
    """Of one choice. `feed` text as it comes; a match is the stop string that is complete first.

    Ties go to the longest. The result does not depend on how the text was cut into pieces. Knuth, Morris and
    Pratt's automaton for each string, so that no text and no strings cost more than a step per character.
    """

    __slots__ = ("_fails", "_firsts", "_states", "_stops", "held", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        # Longest first: of several that end together it is met first.
        self._stops = sorted(stops, key=len, reverse=True)
        self._fails = [_failures(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        """Characters of each string that the text now ends with."""
        self._firsts = frozenset(stop[0] for stop in stops)
        self.held = ""
        """Text withheld: a proper beginning of a stop string."""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain to lie before any stop string; sets `matched` when one is complete."""
        if not self.held and self._firsts.isdisjoint(text):
            return text
        for position, char in enumerate(text):
            stop = self._step(char)
            if stop is not None:
                self.matched = stop
                text = self.held + text[: position + 1]
                self.held = ""
                return text[: len(text) - len(stop)]
        text = self.held + text
        keep = len(text) - max(self._states)
        self.held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The text ends here, so what was withheld is no stop string."""
        tail, self.held = self.held, ""
        return tail

    def _step(self, char: str) -> str | None:
        """Move every automaton by one character; the stop string that is complete now."""
        states = self._states
        complete = None
        for number, stop in enumerate(self._stops):
            state = states[number]
            while state and stop[state] != char:
                state = self._fails[number][state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                complete = complete or stop
                state = self._fails[number][state - 1]
            states[number] = state
        return complete


def _failures(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its end."""
    fails = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[position] != stop[length]:
            length = fails[length - 1]
        if stop[position] == stop[length]:
            length += 1
        fails[position] = length
    return fails
