"""Messages between clients (gateways, internal services) and the scheduler."""

from typing import Literal

import msgspec

from shared.wire.base import Row, Wire


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of a request are drawn and when it ends. Ranges are checked by `check_sampling`."""

    max_tokens: int
    """New tokens at most, counted from the request's original prompt (also after a resubmission)."""
    seed: int = 0
    """64 bits; token i of choice c is drawn with a uniform keyed by (seed, c, i)."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output, as transformers and vLLM do."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Presence and frequency count output tokens only, as OpenAI does."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """Alternatives per output token (0: only the chosen one); None: off."""
    prompt_logprobs: int | None = None
    """The same for prompt positions; such a request reads no cached prefix."""
    min_tokens: int = 0
    """`stop_token_ids` cannot be drawn before this many new tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the sequence, end-of-sequence included unless ignored. The id itself is delivered."""


class SubmitSeq(Row, frozen=True):
    """One choice of a request. `handle` is the client's own number for it, unique in the client's life."""

    handle: int
    choice: int
    accepted: list[int] = []
    """Tokens the client has already accepted; generation goes on at index len(accepted)."""


class Submit(Wire, frozen=True, tag="submit", kw_only=True):
    """Start, or after a change of epoch resume, a request. Resent until answered; deduplicated by id."""

    client: str
    request_id: str
    prompt: list[int]
    seqs: list[SubmitSeq]
    sampling: Sampling
    priority: int = 0
    """Lower is earlier."""
    timeout_s: float = 600.0
    """Time left for the whole request, from now."""
    queue_timeout_s: float = 60.0
    salt: str = ""
    """Tenants with different salts never share KV."""
    pin: str = ""
    """Instance that must serve it; empty: any. For canaries and tests."""


class Cancel(Wire, frozen=True, tag="cancel", kw_only=True):
    """End sequences early. Repeated until their terminal rows come."""

    client: str
    request_id: str
    handles: list[int] = []
    """Which sequences; empty: all of the request."""


class Ack(Wire, frozen=True, tag="ack", kw_only=True):
    """Every tokens frame up to `seq` of (epoch, owner) has been processed. Also the client's lease."""

    client: str
    epoch: int
    owner: str
    seq: int
    resend: bool = False
    """A gap was seen: send everything after `seq` again, now."""


FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]

AnswerCode = Literal[
    "accepted",
    "queue_full",
    "too_long",
    "invalid",
    "no_instance",
    "draining",
    "unknown_request",
    "unknown_client",
]


class Answer(Row, frozen=True):
    """What became of a submit or cancel. `unknown_client` (request_id "") asks for a resubmission of all."""

    request_id: str
    code: AnswerCode
    message: str = ""
    retry_after_s: float = 0.0


class TokenRow(Row, frozen=True):
    """New tokens of one sequence: `ids[0]` is its output token number `index`, under attempt (epoch, n)."""

    handle: int
    attempt: int
    index: int
    ids: list[int]


class LogprobRow(Row, frozen=True):
    """Log-probabilities of the output tokens from `index` on; `top` holds (id, logprob), best first."""

    handle: int
    index: int
    chosen: list[float]
    top: list[list[tuple[int, float]]]


class PromptLogprobRow(Row, frozen=True):
    """The same for prompt positions [start, start + len(chosen)); position 0 has none and is never sent."""

    handle: int
    start: int
    chosen: list[float]
    top: list[list[tuple[int, float]]]


class SeqTimes(Row, frozen=True):
    """Where a sequence's time went at the scheduler, in seconds; sums to submit → end (design §5)."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    transfer_s: float = 0.0
    """While KV came from elsewhere: a fetch from the second tier, a handoff."""
    decode_s: float = 0.0
    preempted_s: float = 0.0
    recomputed_s: float = 0.0
    stalled_s: float = 0.0


class EndRow(Row, frozen=True):
    """The one terminal row of a sequence; comes in the frame of its last token or later."""

    handle: int
    attempt: int
    reason: FinishReason
    generated: int
    """Output tokens in all; the client must have accepted exactly these."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was found, on the first attempt."""
    message: str = ""
    times: SeqTimes = SeqTimes()
    preemptions: int = 0


class Tokens(Wire, frozen=True, tag="tokens", kw_only=True):
    """Everything one step brought for one client. `seq` is gapless from 1 within (epoch, owner, client)."""

    epoch: int
    owner: str
    seq: int
    answers: list[Answer] = []
    rows: list[TokenRow] = []
    logprobs: list[LogprobRow] = []
    prompt_logprobs: list[PromptLogprobRow] = []
    ends: list[EndRow] = []
