"""Whom to send back to the queue when blocks run out: the set that does least harm and frees enough. Pure.

Classes come first: nobody of a more urgent class goes where others would do. Within a class the harm of a
victim is the seconds of machine time that bringing it back costs, raised by what it has behind it and by the
times it was sent back before, so that one about to end stays and nobody is chosen again and again.
"""

from collections import defaultdict
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Who = TypeVar("Who")

UNITS = 32
"""A need of more blocks is covered in so many units: the choice stays within milliseconds."""

NEARLY_DONE = 16
"""With fewer tokens left its blocks come back soon by themselves."""


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Who]):
    """A running sequence, as far as it matters here."""

    who: Who
    level: int
    """Its class: its priority, lowered by a level for every `aging_s` that it waited preempted."""
    order: int
    """Arrival."""
    frees: int
    """Blocks that nobody else holds, and those it waits for itself: what the others have more without it."""
    back_s: float
    """Machine time that brings it back to where it is: to compute again, or fetch, what is lost."""
    written: int
    """Output tokens it has behind it."""
    left: int
    """Output tokens it is expected to have before it."""
    preemptions: int


def harm(candidate: Candidate[Who]) -> float:
    """Seconds. Never falls with `back_s`, `written` or `preemptions`, never rises with `left`."""
    left = max(1, candidate.left)
    done = candidate.written / (candidate.written + left)
    return candidate.back_s * (1 + candidate.preemptions + done + NEARLY_DONE / left)


class Preemption(Protocol):
    """A rule by which victims are chosen."""

    def choose(self, candidates: Many[Candidate[Who]], blocks: int) -> list[Candidate[Who]]:
        """Victims that free at least `blocks` together, and at least one. Where all candidates do not free
        as many, those that free any; where none frees any, the one that is sent back with least harm (blocks
        shared with it become another's own). Empty only if there are no candidates."""


class LeastHarm:
    """The rule that serves."""

    def choose(self, candidates: Many[Candidate[Who]], blocks: int) -> list[Candidate[Who]]:
        # Of equals the last to arrive.
        candidates = sorted(candidates, key=lambda candidate: -candidate.order)
        useful = [candidate for candidate in candidates if candidate.frees > 0]
        if not useful:
            return [max(candidates, key=lambda c: (c.level, -harm(c), c.order))] if candidates else []
        if sum(candidate.frees for candidate in useful) <= blocks:
            return useful
        classes: dict[int, list[Candidate[Who]]] = defaultdict(list)
        for candidate in useful:
            classes[candidate.level].append(candidate)
        # What the less urgent classes can give together is not asked of the more urgent ones.
        levels = sorted(classes)
        below = dict.fromkeys(levels, 0)
        for urgent, less in zip(reversed(levels[:-1]), reversed(levels[1:])):
            below[urgent] = below[less] + sum(c.frees for c in classes[less])
        victims: list[Candidate[Who]] = []
        missing = max(1, blocks)
        for level in levels:
            if missing > below[level]:
                chosen = cover(classes[level], missing - below[level])
                victims += chosen
                missing -= sum(candidate.frees for candidate in chosen)
            if missing <= 0:
                break
        return victims


class LastCome:
    """The last to arrive goes first and as elsewhere; for comparison only."""

    def choose(self, candidates: Many[Candidate[Who]], blocks: int) -> list[Candidate[Who]]:
        victims: list[Candidate[Who]] = []
        freed = 0
        for candidate in sorted(candidates, key=lambda c: (c.level, c.order), reverse=True):
            victims.append(candidate)
            freed += candidate.frees
            if freed >= blocks:
                break
        return victims


def cover(candidates: Many[Candidate[Who]], blocks: int) -> list[Candidate[Who]]:
    """The candidates of least total harm that free at least `blocks` together; all if they do not.

    A covering knapsack by dynamic programming: exact up to `UNITS` blocks; above, what each frees is rounded
    down to whole units of the need. Whoever then turns out not to be needed stays.
    """
    unit = max(1, -(-blocks // UNITS))
    want = -(-blocks // unit)
    least = [0.0] + [float("inf")] * want
    # least[k]: harm of the best set so far that frees k units or more
    taken: list[list[bool]] = []
    for candidate in candidates:
        gain, cost = candidate.frees // unit, harm(candidate)
        row = [False] * (want + 1)
        for units in range(want, 0, -1) if gain else ():
            with_it = least[max(0, units - gain)] + cost
            if with_it < least[units]:
                least[units] = with_it
                row[units] = True
        taken.append(row)
    if least[want] == float("inf"):
        return _needed(list(candidates), blocks)
    victims: list[Candidate[Who]] = []
    rest = want
    for candidate, row in zip(reversed(candidates), reversed(taken)):
        if row[rest]:
            victims.append(candidate)
            rest = max(0, rest - candidate.frees // unit)
    return _needed(victims, blocks)


def _needed(victims: list[Candidate[Who]], blocks: int) -> list[Candidate[Who]]:
    """Without those that the others make superfluous, the most harmful tried first."""
    spare = sum(victim.frees for victim in victims) - blocks
    for victim in sorted(victims, key=harm, reverse=True):
        if victim.frees <= spare:
            victims.remove(victim)
            spare -= victim.frees
    return victims
