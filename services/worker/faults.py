"""What can be wrong with what a frame asks for: with the frame itself, or with one request in it."""

import math

import numpy as np

from services.worker.step import I32
from shared.wire import Admit, Sampling


class FrameFault(ValueError):
    """A step frame that contradicts the instance's own state. Device memory has not been touched.

    The two sides no longer agree on slots or blocks, so the session cannot go on: the instance ends it (new
    incarnation, empty slots, hashed blocks kept) and beats `failed` until it is claimed again.
    """

    def __init__(self, what: str, *, got: object, allowed: str, slot: int | None = None) -> None:
        where = "" if slot is None else f"slot {slot}: "
        super().__init__(f"{where}{what} is {got}, allowed is {allowed}")
        self.what = what
        self.slot = slot
        self.got = got
        self.allowed = allowed


class RequestFault(ValueError):
    """A request that cannot be computed, whatever its scheduler does. It ends alone, as `error`."""


def read_ids(ids: list[int], vocab_size: int) -> I32:
    """Token ids as an array. Raises `RequestFault` for any outside [0, vocab_size)."""
    try:
        array = np.array(ids, np.int64)
    except OverflowError:
        array = np.array([-1])
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        raise RequestFault(f"prompt holds token ids outside [0, {vocab_size}); send ids of this model")
    return array.astype(np.int32)


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raises `RequestFault` for what an executor would index or divide by; other ranges do no harm."""
    for name, tokens in (
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            outside = next(token for token in tokens if not 0 <= token < vocab_size)
            raise RequestFault(f"{name} names token id {outside}, outside [0, {vocab_size})")
    # A sum is finite only if everything in it is.
    total = sampling.temperature + sampling.top_p + sampling.min_p + sampling.repetition_penalty
    total += sampling.presence_penalty + sampling.frequency_penalty
    if not math.isfinite(total + sum(bias for _, bias in sampling.logit_bias)):
        raise RequestFault("a sampling parameter is not a finite number")
    if sampling.temperature < 0 or sampling.repetition_penalty <= 0:
        raise RequestFault("temperature must be at least 0 and repetition_penalty above 0")


def length_limit(admit: Admit, max_len: int) -> int:
    """Number of ids at which the sequence ends. Raises `RequestFault` if it has them already."""
    limit = min(admit.prompt_len + admit.sampling.max_tokens, max_len)
    if len(admit.ids) >= limit:
        raise RequestFault(
            f"{len(admit.ids)} ids leave no room for a new one: the prompt has {admit.prompt_len}, "
            f"max_tokens is {admit.sampling.max_tokens}, the model's context {max_len}"
        )
    return limit
