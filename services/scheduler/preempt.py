"""Whom to send back to the queue when blocks run out."""

from collections.abc import Iterable

from services.scheduler.sequences import Sequence


def pick_victim(candidates: Iterable[Sequence]) -> Sequence | None:
    """The least urgent: highest priority number, then latest arrival. Arrival order is kept over attempts,
    so the oldest sequence of the most urgent priority is never a victim while others run: it ends."""
    return max(candidates, key=lambda seq: (seq.request.priority, seq.order), default=None)
