"""One client's stream of token frames: sequenced, kept until acknowledged, sent again, under a lease.

A lapsed client's record stays as a tombstone: frame numbers and attempts go on where they were, or the
client would take new frames for repetitions. After a lapse nothing is sent until an `Ack` says which frame
the client had last; numbering goes on from there.
"""

from collections import deque

from services.scheduler.sequences import Request, Sequence
from shared.wire import Answer, EndRow, LogprobRow, PromptLogprobRow, TokenRow, Tokens

WINDOW_FRAMES = 16
"""Frames a client may have unacknowledged before it counts as being behind."""
LINGER_S = 0.04
"""An `accepted` waits this long for a frame that goes to its client anyhow; a token says the same."""


class Client:
    """Pending rows of this turn, frames not acknowledged, open requests, and recent answers."""

    def __init__(self, client: str, now: float) -> None:
        self.id = client
        self.seq = 0
        """Number of the last frame made."""
        self.heard_at = now
        self.lapsed = False
        self.attempt = 1
        """First attempt of its next sequences; rises with each lapse."""
        self.top_attempt = 1
        """Highest attempt any of its sequences had in this epoch."""
        self.requests: dict[str, Request] = {}
        self.sequences: dict[int, Sequence] = {}
        self.answered: dict[str, tuple[Answer, float]] = {}
        """request id → its answer and when the request ended; repeated to late duplicates."""
        self.rows: list[TokenRow] = []
        self.logprobs: list[LogprobRow] = []
        self.prompt_logprobs: list[PromptLogprobRow] = []
        self.ends: list[EndRow] = []
        self.answers: list[Answer] = []
        self._lingers_since = 0.0
        """Since when answers wait that are in no hurry; 0: none does, or one is."""
        self._kept: deque[Tokens] = deque()
        self._waiting_since = now
        """Since when the first kept frame has waited for its acknowledgement."""

    @property
    def kept(self) -> int:
        """Frames not acknowledged."""
        return len(self._kept)

    @property
    def behind(self) -> bool:
        """Whether further tokens would only wait at the client."""
        return len(self._kept) >= WINDOW_FRAMES

    @property
    def owed(self) -> bool:
        """Whether it has something open, or frames to take. Without either it may be silent for days."""
        return bool(self.sequences or self._kept)

    def answer(self, answer: Answer, now: float = 0.0) -> None:
        """Say it in the next frame; with `now`, in the next that says more than this, or a moment later."""
        if not self.answers:
            self._lingers_since = now
        elif not now:
            self._lingers_since = 0.0
        self.answers.append(answer)

    def collect(self, epoch: int, owner: str, now: float) -> Tokens | None:
        """The frame of this turn, or None if there is nothing to say or nobody listens."""
        if self.lapsed:
            return None
        if not (self.rows or self.ends or self.logprobs or self.prompt_logprobs) and (
            not self.answers or (self._lingers_since and now - self._lingers_since < LINGER_S)
        ):
            return None
        if not self._kept:
            self._waiting_since = now
        self.seq += 1
        # The lists are copied, not replaced: sequences hold `rows.append`.
        frame = Tokens(
            epoch=epoch,
            owner=owner,
            seq=self.seq,
            answers=self.answers.copy(),
            rows=self.rows.copy(),
            logprobs=self.logprobs.copy(),
            prompt_logprobs=self.prompt_logprobs.copy(),
            ends=self.ends.copy(),
        )
        self._clear()
        self._kept.append(frame)
        return frame

    def acknowledge(self, seq: int, now: float) -> None:
        """Everything up to `seq` has arrived."""
        kept = self._kept
        if kept and kept[0].seq <= seq:
            self._waiting_since = now
            while kept and kept[0].seq <= seq:
                kept.popleft()

    def overdue(self, now: float, after_s: float) -> bool:
        """Whether the first kept frame has waited longer than `after_s`."""
        return bool(self._kept) and now - self._waiting_since > after_s

    def again(self, now: float, limit: int) -> list[Tokens]:
        """The first `limit` unacknowledged frames, to be sent once more."""
        self._waiting_since = now
        return [self._kept[at] for at in range(min(limit, len(self._kept)))]

    def lapse(self) -> None:
        """Its lease is over. Its sequences must have been ended; what it has not taken it never will."""
        self.lapsed = True
        self.attempt = self.top_attempt = self.top_attempt + 1
        self._kept.clear()
        self.requests.clear()
        self.sequences.clear()
        self.answered.clear()
        self._clear()

    def resume(self, seq: int) -> None:
        """It is back and has processed frames up to `seq` of this epoch."""
        self.lapsed = False
        self.seq = seq

    def _clear(self) -> None:
        for rows in (self.rows, self.logprobs, self.prompt_logprobs, self.ends, self.answers):
            rows.clear()
