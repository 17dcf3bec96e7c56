"""What a submit must look like. Anybody may speak these subjects, so nothing is trusted."""

import math

from shared.subjects import subject_token
from shared.wire import Done, InstanceInfo, Submit

MAX_SEQUENCES = 128
MAX_HANDLE = 2**53
MAX_TIMEOUT_S = 86_400.0
MAX_PRIORITY = 10**6
INFO_BOUNDS = {
    "block_tokens": 4096,
    "blocks_total": 2**24,
    "max_slots": 2**16,
    "max_len": 2**31,
    "vocab_size": 2**31,
}


def malformed(submit: Submit) -> str:
    """What is wrong with it, in words for a person; empty if nothing is."""
    sampling = submit.sampling
    if not submit.request_id or len(submit.request_id) > 128:
        return "request_id must have 1 to 128 characters"
    if not submit.prompt:
        return "prompt is empty: give at least one token id"
    if min(submit.prompt) < 0 or max(submit.prompt) >= 2**31:
        return "prompt holds a token id outside 0..2^31-1"
    if not 1 <= len(submit.seqs) <= MAX_SEQUENCES:
        return f"seqs must name 1 to {MAX_SEQUENCES} sequences, not {len(submit.seqs)}"
    handles = {row.handle for row in submit.seqs}
    if len(handles) != len(submit.seqs) or min(handles) < 0 or max(handles) > MAX_HANDLE:
        return "handles must be distinct and in 0..2^53"
    if not 1 <= sampling.max_tokens < 2**31:
        return f"max_tokens is {sampling.max_tokens}: it must be at least 1"
    for row in submit.seqs:
        if len(row.accepted) > sampling.max_tokens:
            return f"handle {row.handle} has accepted more tokens than max_tokens allows"
        if row.accepted and (min(row.accepted) < 0 or max(row.accepted) >= 2**31):
            return f"handle {row.handle} has accepted a token id outside 0..2^31-1"
    if abs(submit.priority) > MAX_PRIORITY:
        return f"priority must be within ±{MAX_PRIORITY}"
    for name in ("timeout_s", "queue_timeout_s"):
        value = getattr(submit, name)
        if not 0 < value <= MAX_TIMEOUT_S:
            return f"{name} is {value}: it must be above 0 and at most {MAX_TIMEOUT_S:g} seconds"
    return _sampling_error(submit)


def _sampling_error(submit: Submit) -> str:
    sampling = submit.sampling
    ranges = {
        "temperature": (0.0, 100.0),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (1e-3, 100.0),
        "presence_penalty": (-100.0, 100.0),
        "frequency_penalty": (-100.0, 100.0),
    }
    for name, (low, high) in ranges.items():
        value = getattr(sampling, name)
        if not math.isfinite(value) or not low <= value <= high:
            return f"{name} is {value}: it must be within {low:g} to {high:g}"
    if sampling.top_k < 0:
        return "top_k must not be negative (0 is off)"
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        return "min_tokens must be within 0 to max_tokens"
    if not all(math.isfinite(bias) for _, bias in sampling.logit_bias):
        return "logit_bias holds a value that is not finite"
    return ""


def impossible(prompt: list[int], max_tokens: int, infos: list[InstanceInfo]) -> str:
    """Why none of these instances could ever serve it; empty if one could, or none is known yet."""
    reasons = []
    for info in infos:
        reason = misfit(len(prompt), max_tokens, info)
        if not reason and (highest := max(prompt)) >= info.vocab_size:
            reason = f"prompt holds token id {highest}; the vocabulary has {info.vocab_size}"
        if not reason:
            return ""
        reasons.append(reason)
    return reasons[0] if reasons else ""


def misfit(prompt_len: int, max_tokens: int, info: InstanceInfo) -> str:
    """Why a sequence of this length could not run on that instance even alone; empty if it could."""
    tokens = prompt_len + max_tokens
    if tokens > info.max_len:
        return (
            f"prompt ({prompt_len}) and max_tokens ({max_tokens}) together are {tokens} tokens; "
            f"the model's limit here is {info.max_len}"
        )
    room = info.blocks_total * info.block_tokens
    if tokens > room:
        way = "lower max_tokens" if prompt_len < room else "shorten the prompt"
        return f"prompt and max_tokens are {tokens} tokens; KV memory here holds {room}: {way}"
    return ""


def unsound_info(info: InstanceInfo) -> str:
    """What makes an instance impossible to account for; empty if nothing does."""
    bounds = {
        "block_tokens": 4096,
        "blocks_total": 2**24,
        "max_slots": 2**16,
        "max_len": 2**31,
        "vocab_size": 2**31,
    }
    for name, most in bounds.items():
        if not 1 <= getattr(info, name) <= most:
            return f"{name} is {getattr(info, name)}: it must be within 1 to {most}"
    return ""


def known_by_name(info: InstanceInfo) -> bool:
    """Whether frames can be addressed to it."""
    return subject_token(info.instance) == info.instance


def unsound_result(done: Done, slots: int) -> str:
    """How a result contradicts itself or the instance's size; empty if it does not."""
    if len(done.slots) != len(done.tokens):
        return f"{len(done.tokens)} tokens for {len(done.slots)} slots"
    for rows in (done.slots, [row.slot for row in done.stopped]):
        if rows and not 0 <= min(rows) <= max(rows) < slots:
            return f"a slot outside 0 to {slots - 1}"
    return ""
