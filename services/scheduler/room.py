"""Blocks for running sequences, and who gives theirs back when there are none left."""

from collections.abc import Callable
from collections.abc import Sequence as Many

from services.scheduler.admission import Reservation
from services.scheduler.counters import Counters
from services.scheduler.draft import Draft
from services.scheduler.instances import Instance, Lane
from services.scheduler.preempt import pick_victim
from services.scheduler.sequences import Sequence
from shared.wire import Extend, Work


class Room:
    """Stateless but for its rules: it works on the instance and the draft it is given."""

    def __init__(
        self, reservation: Reservation, counters: Counters, requeue: Callable[[Sequence], None]
    ) -> None:
        """`requeue` takes preempted sequences back."""
        self.reservation = reservation
        self.counters = counters
        self._requeue = requeue

    def grow(self, instance: Instance, draft: Draft, due: Many[Sequence], now: float) -> None:
        """Give blocks to those whose table is full, oldest first; those that get none skip this frame."""
        hungry = list(instance.stalled)
        for sequence in due:
            if sequence.due != draft.seq or instance.running.get(sequence) is not Lane.DECODE:
                continue
            computed = sequence.planned + draft.seq - sequence.since
            if computed >= sequence.end:
                instance.running[sequence] = Lane.SPENT
                instance.decoding -= 1
                instance.spent += 1
                continue
            sequence.planned, sequence.since = computed, draft.seq
            hungry.append(sequence)
        hungry.sort(key=lambda seq: (seq.request.priority, seq.order))
        for sequence in hungry:
            was_stalled = instance.running[sequence] is Lane.STALLED
            taken = instance.pool.take(1)
            if taken is None:
                if not was_stalled:
                    instance.running[sequence] = Lane.STALLED
                    instance.decoding -= 1
                    instance.stalled.append(sequence)
                    sequence.stalled_at = now
                continue
            if was_stalled:
                instance.stalled.remove(sequence)
                sequence.go_on(now)
            else:
                instance.decoding -= 1
            sequence.blocks = sequence.blocks + taken
            draft.extend.append(Extend(sequence.slot, taken))
            if sequence.reserved:
                sequence.reserved -= 1
                instance.reserved -= 1
            instance.start_decoding(sequence, draft.seq, sequence.planned)
        if instance.stalled:
            self._make_room(instance, draft)
            draft.work.extend(Work(sequence.slot, 0) for sequence in instance.stalled)

    def _make_room(self, instance: Instance, draft: Draft) -> None:
        """Preempt until the blocks on their way back will do. Spent sequences return theirs by themselves."""
        while instance.stalled and instance.returning < len(instance.stalled) and not instance.spent:
            victim = pick_victim(
                seq
                for seq, lane in instance.running.items()
                if lane is not Lane.SPENT and not seq.request.pin
            ) or pick_victim(instance.stalled)
            if victim is None:
                return
            draft.preempted = True
            self.counters.preemptions += 1
            self.reservation.preempted()
            draft.extend = [row for row in draft.extend if row.slot != victim.slot]
            instance.leave(victim)
            self._requeue(victim)
