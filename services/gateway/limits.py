"""Ranges of every field: from a decoded body to `Sampling` and text options. Pure; raises ApiError(400)."""

from collections.abc import Sequence
from itertools import chain
from math import isfinite
from typing import Any

import msgspec

from services.gateway.errors import ApiError, invalid, unsupported
from services.gateway.schema import ChatRequest, Common, CompletionRequest
from services.gateway.tokenizer import ModelCard
from shared.wire import Sampling

MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 128
MAX_BIASED = 1024
MAX_LOGPROBS = 20
MAX_TEXT_FIELD = 128
DEFAULT_COMPLETION_TOKENS = 16
_INT64 = 1 << 63


class TextOptions(msgspec.Struct, frozen=True):
    """What the client wants to see of the tokens."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    hidden_ids: frozenset[int] = frozenset()
    """Stop ids that are no special tokens: they end the text without being part of it."""
    logprobs: int | None = None
    token_ids: bool = False
    min_tokens: int = 0
    """Stop strings are not looked for in the tokens before this one."""


class StreamWishes(msgspec.Struct, frozen=True):
    stream: bool
    usage: bool
    """A last chunk with usage."""
    continuous_usage: bool
    """Usage so far in every chunk."""


def stream_wishes(body: Common) -> StreamWishes:
    options = body.stream_options
    if options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only allowed with stream=true.")
    usage = bool(options and options.include_usage)
    return StreamWishes(bool(body.stream), usage, bool(usage and options and options.continuous_usage_stats))


def sampling(body: Common, card: ModelCard, max_tokens: int, seed: int) -> Sampling:
    """`max_tokens` and `seed` are final; everything else comes from `body`."""
    logprobs = wanted_logprobs(body)
    return Sampling(
        max_tokens=max_tokens,
        seed=seed,
        temperature=number("temperature", body.temperature, 0.0, 2.0, 1.0),
        top_k=_top_k(body.top_k, card.vocab_size),
        top_p=_top_p(body.top_p),
        min_p=number("min_p", body.min_p, 0.0, 1.0, 0.0),
        repetition_penalty=_repetition(body.repetition_penalty),
        presence_penalty=number("presence_penalty", body.presence_penalty, -2.0, 2.0, 0.0),
        frequency_penalty=number("frequency_penalty", body.frequency_penalty, -2.0, 2.0, 0.0),
        logit_bias=_logit_bias(body.logit_bias, card.vocab_size),
        logprobs=logprobs,
        # Echoed prompts come with their log-probabilities.
        prompt_logprobs=logprobs if isinstance(body, CompletionRequest) and body.echo else None,
        min_tokens=integer("min_tokens", body.min_tokens, 0, max_tokens, 0),
        stop_token_ids=stop_ids(body, card),
    )


def text_options(body: Common, card: ModelCard) -> TextOptions:
    skip_special = body.skip_special_tokens is not False
    include_stop = bool(body.include_stop_str_in_output)
    own = frozenset() if include_stop else frozenset(body.stop_token_ids or ())
    return TextOptions(
        stops=_stops(body.stop),
        include_stop=include_stop,
        skip_special=skip_special,
        hidden_ids=own - frozenset(card.eos_ids),
        logprobs=wanted_logprobs(body),
        token_ids=bool(body.return_token_ids),
        min_tokens=body.min_tokens or 0,
    )


def wanted_logprobs(body: Common) -> int | None:
    """Alternatives per token, or None for no log-probabilities."""
    if isinstance(body, ChatRequest):
        if not body.logprobs:
            if body.top_logprobs:
                raise invalid("top_logprobs", "top_logprobs needs logprobs=true.")
            return None
        return integer("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS, 0)
    assert isinstance(body, CompletionRequest)
    if body.logprobs is None:
        return None
    return integer("logprobs", body.logprobs, 0, MAX_LOGPROBS, 0)


def output_limit(body: Common, prompt_tokens: int, card: ModelCard) -> int:
    """New tokens allowed. Raises context_length_exceeded when they cannot fit behind the prompt."""
    room = card.max_len - prompt_tokens
    name, wanted = "max_tokens", body.max_tokens
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        name, wanted = "max_completion_tokens", body.max_completion_tokens
    if wanted is not None and wanted < 1:
        raise invalid(name, f"{name} must be at least 1, not {wanted}.")
    if wanted is None:
        wanted = max(1, room) if isinstance(body, ChatRequest) else DEFAULT_COMPLETION_TOKENS
    if wanted > room:
        asked = wanted if wanted < _INT64 else "more than 2^63"
        message = (
            f"This model's maximum context length is {card.max_len} tokens. You asked for "
            f"{prompt_tokens} in the prompt and {asked} for the output. Shorten the prompt or lower {name}."
        )
        param = "messages" if isinstance(body, ChatRequest) else "prompt"
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    return wanted


def is_open_ended(body: Common) -> bool:
    """Whether the output may go on to the end of the context."""
    return isinstance(body, ChatRequest) and body.max_tokens is None and body.max_completion_tokens is None


def choices(body: Common) -> int:
    n = integer("n", body.n, 1, MAX_N, 1)
    if body.best_of is not None and body.best_of != n:
        raise unsupported("best_of", "best_of other than n is not supported.")
    return n


def seed_of(body: Common) -> int | None:
    if body.seed is None:
        return None
    if not -_INT64 <= body.seed < 2 * _INT64:
        raise invalid("seed", "seed must be an integer of at most 64 bits.")
    return body.seed % (2 * _INT64)


def stop_ids(body: Common, card: ModelCard) -> tuple[int, ...]:
    """The client's own and, unless ignored, the model's end-of-sequence ids."""
    own = body.stop_token_ids or []
    if len(own) > MAX_STOP_IDS:
        raise invalid("stop_token_ids", f"At most {MAX_STOP_IDS} stop_token_ids are allowed.")
    check_ids("stop_token_ids", own, card.vocab_size)
    return tuple(dict.fromkeys([*own, *(() if body.ignore_eos else card.eos_ids)]))


def check_ids(param: str, ids: Sequence[Any], vocab_size: int) -> None:
    """Raises unless every id is an integer (no bool) within the vocabulary."""
    if not ids:
        return
    if set(map(type, ids)) != {int}:
        raise invalid(param, f"{param} must hold token ids (integers) only.", code="invalid_type")
    _check_range(param, ids, vocab_size)


def _check_range(param: str, ids: Sequence[int], vocab_size: int) -> None:
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise invalid(
            param, f"{param} holds an id outside the vocabulary; ids go from 0 to {vocab_size - 1}."
        )


def number(param: str, value: float | None, low: float, high: float, default: float) -> float:
    if value is None:
        return default
    if not isfinite(value) or not low <= value <= high:
        raise invalid(param, f"{param} must be between {low:g} and {high:g}.")
    return value


def integer(param: str, value: int | None, low: int, high: int, default: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise invalid(param, f"{param} must be between {low} and {high}.")
    return value


def short_text(param: str, value: str | None) -> str:
    """Free text that travels with the request; "" when absent."""
    if value is None:
        return ""
    if len(value) > MAX_TEXT_FIELD or "\0" in value:
        raise invalid(param, f"{param} must have at most {MAX_TEXT_FIELD} characters and no NUL.")
    return value


def refuse_unsupported(body: Common) -> None:
    """400 for what would silently change the meaning of the request if it were ignored."""
    kind = body.response_format
    if kind is not None and not (isinstance(kind, dict) and kind.get("type") == "text"):
        raise unsupported("response_format", "Only response_format {'type': 'text'} is supported.")
    for name in _REFUSED:
        if getattr(body, name, None):
            raise unsupported(name, f"{name} is not supported.")
    if isinstance(body, ChatRequest):
        if body.tool_choice not in (None, "none", "auto"):
            raise unsupported("tool_choice", "tool_choice needs tools, which are not supported.")
        if body.modalities not in (None, ["text"]):
            raise unsupported("modalities", "Only text is supported.")
    elif getattr(body, "suffix", None):
        raise unsupported("suffix", "suffix is not supported.")


_REFUSED = (
    "tools", "functions", "function_call", "chat_template", "chat_template_kwargs", "documents", "audio",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "prompt_logprobs", "logits_processors",
    "use_beam_search", "prompt_embeds", "kv_transfer_params",
)  # fmt: skip


def _top_k(value: int | None, vocab_size: int) -> int:
    if value in (None, -1):
        return 0
    assert value is not None
    if value < 0:
        raise invalid("top_k", "top_k must be -1 or 0 (off) or a positive number.")
    return 0 if value >= vocab_size else value


def _top_p(value: float | None) -> float:
    top_p = number("top_p", value, 0.0, 1.0, 1.0)
    if top_p == 0.0:
        raise invalid("top_p", "top_p must be above 0 and at most 1.")
    return top_p


def _repetition(value: float | None) -> float:
    penalty = number("repetition_penalty", value, 0.0, 10.0, 1.0)
    if penalty == 0.0:
        raise invalid("repetition_penalty", "repetition_penalty must be above 0 and at most 10.")
    return penalty


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    if len(bias) > MAX_BIASED:
        raise invalid("logit_bias", f"logit_bias may name at most {MAX_BIASED} tokens.")
    pairs = []
    for key, value in bias.items():
        # str.isdecimal is also true for digits of other scripts.
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            raise invalid("logit_bias", f"logit_bias keys must be token ids from 0 to {vocab_size - 1}.")
        pairs.append((int(key), number("logit_bias", value, -100.0, 100.0, 0.0)))
    return tuple(pairs)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"At most {MAX_STOPS} stop strings are allowed.")
    for each in stops:
        if not 0 < len(each) <= MAX_STOP_CHARS:
            raise invalid("stop", f"Each stop string must have 1 to {MAX_STOP_CHARS} characters.")
    return tuple(dict.fromkeys(stops))


def prompts(prompt: str | list[Any] | None, vocab_size: int, most: int) -> list[str | list[int]]:
    """The four forms of a prompt as one list. Raises for empty ones, mixed ones and ids that do not exist."""
    if prompt is None or prompt in ("", []):
        raise invalid("prompt", "prompt must not be empty.", code="missing_required_parameter")
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        _check_range("prompt", prompt, vocab_size)
        return [prompt]
    if len(prompt) > most:
        raise invalid("prompt", f"At most {most} prompts fit into one request.")
    if kinds not in ({str}, {list}) or not all(prompt):
        expected = "a string, a list of strings, a list of token ids or a list of lists of token ids"
        raise invalid("prompt", f"prompt must be {expected}, none of them empty.", code="invalid_type")
    if kinds == {list}:
        check_ids("prompt", list(chain.from_iterable(prompt)), vocab_size)
    return list(prompt)
