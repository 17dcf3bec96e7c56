"""What is open at a client: requests, their sequences and the accepted-token logs."""

from typing import Any

from shared.client.effects import Open
from shared.wire import FinishReason

ANSWER_S = 15.0
"""A request nobody has answered within this is refused here."""


class OpenSeq:
    """One choice of an open request. `accepted` is its log: every output token id, from index 0."""

    __slots__ = ("accepted", "attempt", "cancelling", "choice", "handle", "logprobs", "request", "sink")

    def __init__(self, request: "OpenRequest", choice: int, handle: int, sink: Any) -> None:
        self.request = request
        self.choice = choice
        self.handle = handle
        self.sink = sink
        self.accepted: list[int] = []
        self.attempt = 0
        self.cancelling = False
        self.logprobs: list[tuple[float, list[tuple[int, float]]]] = []
        """(chosen, top) of `accepted`, filled where asked for; never behind `accepted` then."""


class OpenRequest:
    """A request between `Open` and the end of its last sequence."""

    __slots__ = (
        "answered",
        "cancel_at",
        "deadline",
        "give_up_at",
        "id",
        "prompt_logprobs",
        "queue_until",
        "send_at",
        "seqs",
        "spec",
        "taken",
    )

    def __init__(self, spec: Open, first_handle: int, now: float) -> None:
        self.id = spec.request_id
        self.spec = spec
        self.seqs = {
            first_handle + choice: OpenSeq(self, choice, first_handle + choice, sink)
            for choice, sink in enumerate(spec.sinks)
        }
        self.deadline = now + spec.timeout_s
        self.queue_until = now + spec.queue_timeout_s
        self.give_up_at = now + ANSWER_S
        self.answered = False
        """By the present leader."""
        self.taken = False
        """By any leader, ever."""
        self.send_at = now
        self.cancel_at = now
        self.prompt_logprobs: dict[int, tuple[float, list[tuple[int, float]]]] = {}
        """Position → (chosen, top)."""


def complete(seq: OpenSeq) -> FinishReason | None:
    """The end that `accepted` itself shows, if it does."""
    sampling = seq.request.spec.sampling
    accepted = seq.accepted
    if accepted and len(accepted) > sampling.min_tokens and accepted[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if len(accepted) >= sampling.max_tokens else None
