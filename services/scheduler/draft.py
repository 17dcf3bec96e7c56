"""A step frame in the making."""

from services.scheduler.sequences import Sequence
from shared.wire import Admit, Extend, Fetch, KvOp, Work


class Draft:
    """The frame being planned."""

    __slots__ = (
        "admit",
        "awaited",
        "extend",
        "fetch",
        "firsts",
        "ids",
        "kv_ops",
        "preempted",
        "prompt_tokens",
        "seq",
        "work",
    )

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.admit: list[Admit] = []
        self.work: list[Work] = []
        self.extend: list[Extend] = []
        self.kv_ops: list[KvOp] = []
        self.fetch: list[Fetch] = []
        self.firsts: list[Sequence] = []
        self.prompt_tokens = 0
        """Computed by `work`."""
        self.preempted = False
        self.awaited = False
        """Somebody urgent can be seated as soon as the frames in flight are done."""
        self.ids = 0
        """Carried by `admit`."""

    def drop(self, sequence: Sequence) -> None:
        """Nothing of a running sequence stays in the frame but that its slot is released."""
        self.work = [row for row in self.work if row.slot != sequence.slot]
        self.extend = [row for row in self.extend if row.slot != sequence.slot]
