"""Bodies of requests, as OpenAI and vLLM write them: names and JSON types. Ranges are `limits`' business.

Unknown fields are ignored. Fields of type `Any` are known but not supported, or checked by hand because their
type depends on their content.
"""

from typing import Any

import msgspec

from services.gateway.errors import ApiError

_MAX_DEPTH_MESSAGE = "The request body is nested too deeply."


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(msgspec.Struct, kw_only=True):
    """What both generating endpoints take."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    echo: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    request_id: str | None = None
    # Known, and refused unless they ask for nothing.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    truncate_prompt_tokens: Any = None
    prompt_logprobs: Any = None
    logits_processors: Any = None
    use_beam_search: Any = None
    kv_transfer_params: Any = None


class CompletionRequest(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any] | None = None
    suffix: str | None = None
    logprobs: int | None = None
    prompt_embeds: Any = None


class MessageBody(msgspec.Struct):
    role: str
    content: str | list[Any] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[MessageBody] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    modalities: Any = None
    audio: Any = None


class TokenizeRequest(msgspec.Struct):
    """POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


class Body:
    """Decoder of one kind of body. Raises ApiError(400) naming the field."""

    def __init__(self, type_: type[msgspec.Struct], required: str = "") -> None:
        """`required`: a field that is optional in the type alone: its absence is refused elsewhere."""
        self._required = required
        self._decoder = msgspec.json.Decoder(type_)
        self.fields = frozenset(type_.__struct_fields__)

    def decode(self, body: bytes) -> Any:
        if not body:
            raise ApiError(400, "The request body is empty; send a JSON object.", code="invalid_json")
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            reason, _, path = str(error).partition(" - at `")
            param = _param(path.rstrip("`"))
            if param is not None and param == self._required:
                reason = reason.replace(" | null`", "`")
            raise ApiError(400, f"{param or 'body'}: {reason}.", param=param, code="invalid_type") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(400, f"The request body is not JSON: {error}.", code="invalid_json") from None
        except RecursionError:
            raise ApiError(400, _MAX_DEPTH_MESSAGE, code="invalid_json") from None

    def unknown(self, body: bytes) -> list[str]:
        """Names of fields nobody here knows; for debugging only."""
        try:
            return sorted(set(msgspec.json.decode(body)) - self.fields)[:20]
        except (msgspec.DecodeError, RecursionError, TypeError):
            return []


def dump(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _param(path: str) -> str | None:
    """`$.messages[0].role` → `messages[0].role`; `$` alone → None."""
    return path.removeprefix("$").removeprefix(".").replace("[...]", "") or None


COMPLETION = Body(CompletionRequest, required="prompt")
CHAT = Body(ChatRequest, required="messages")
TOKENIZE = Body(TokenizeRequest)
DETOKENIZE = Body(DetokenizeRequest)
