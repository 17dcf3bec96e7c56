"""A rank above 0 at work: the calls of rank 0, in their order, and an end when that ends."""

import os
import select
import threading
import time
from collections.abc import Callable

from services.worker.compute import Begun, Compute
from services.worker.group.channel import Channel
from services.worker.group.messages import Begin, Close, EndFetch, Follow, Measure, Refusal, Tiers, Tune
from services.worker.tier.homes import TierState
from shared.runtime.settings import CannotStart
from shared.wire import Step
from shared.wire.base import Codec

_STEP = Codec(Step)

HANG_S = 0.5
"""A rank that still computes so long after its group was lost ends as it stands."""


class Diverged(RuntimeError):
    """This rank drew other tokens than rank 0: nothing the group computes can be trusted."""


def follow(compute: Compute, channel: Channel) -> None:
    """Until rank 0 says `Close`. Raises `Diverged`, `ChannelLost`, what computing raises, and `CannotStart`
    if rank 0 does not take what this rank has loaded.

    Steps are begun and finished in the order of rank 0, so that collectives cannot cross.
    """
    under_way: Begun | None = None
    while True:
        message = channel.receive()
        before, under_way = under_way, None
        if before is not None and not (isinstance(message, Follow) and message.behind):
            compute.finish(before)
            before = None
        match message:
            case Follow():
                under_way = _begin(compute, message)
                if before is not None:
                    compute.finish(before)
                if under_way is not None and not under_way.pending.feeds:
                    # What it waits for may be another collective, in which rank 0 already is.
                    compute.finish(under_way)
                    under_way = None
            case Begin():
                compute.begin()
            case Tune(state):
                compute.tune(state)
            case Measure(name):
                compute.measure(name)
            case Tiers(offers, home, wanted):
                compute.use_tiers(TierState(tuple(offers), home, wanted))
            case EndFetch(session, op, count):
                compute.end_fetch((session, op), count)
            case Refusal(reason):
                raise CannotStart(reason)
            case Close():
                return


def _begin(compute: Compute, message: Follow) -> Begun | None:
    if compute.check != message.check:
        raise Diverged("it drew other tokens than rank 0 from the same steps: memory or arithmetic is faulty")
    frame = _STEP.decode(message.frame)
    compute.session = frame.incarnation
    begun = compute.start(frame, time.perf_counter(), message.behind)
    return begun if isinstance(begun, Begun) else None


class EndsWith:
    """Watches rank 0 from a thread of its own: this rank may be in the middle of a step when that ends."""

    def __init__(self, channel: Channel, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._expected = threading.Event()
        self._poll = select.poll()
        # Hang-ups are told without being asked for; what there is to read is for the one who follows.
        self._poll.register(channel.fileno(), select.POLLRDHUP)
        threading.Thread(target=self._watch, name="rank 0", daemon=True).start()

    def expected(self) -> None:
        """This rank ends by itself in good order."""
        self._expected.set()

    def _watch(self) -> None:
        self._poll.poll()
        self._abort("rank 0 has ended")
        if not self._expected.wait(HANG_S):
            os._exit(1)
