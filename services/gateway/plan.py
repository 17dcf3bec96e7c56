"""A request, understood: prompts as ids, sampling, what to show, how to answer."""

import secrets
from collections.abc import Sequence

import msgspec

from services.gateway import limits
from services.gateway.chat import ChatTemplate, Message
from services.gateway.errors import ApiError, invalid
from services.gateway.limits import StreamWishes, TextOptions
from services.gateway.schema import ChatRequest, Common, CompletionRequest, MessageBody
from services.gateway.tokenizer import ModelCard
from shared.wire import Sampling

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
MAX_MESSAGES = 4096
_PRIORITY = 1_000_000
"""The scheduler refuses priorities beyond ±1,000,000."""


class Prompt(msgspec.Struct, frozen=True):
    ids: list[int]
    echo: str | None
    """Text to show before the output."""
    sampling: Sampling


class Plan(msgspec.Struct, frozen=True):
    """Choice c of prompt p has index p * n + c."""

    chat: bool
    prompts: Sequence[Prompt]
    n: int
    text: TextOptions
    stream: StreamWishes
    priority: int
    salt: str
    open_ended: bool
    """The client left the length to us, so it may be shortened to what the instances can hold."""

    @property
    def is_fast(self) -> bool:
        """A stream of text and nothing else."""
        text = self.text
        return (
            self.stream.stream
            and not self.stream.continuous_usage
            and not text.stops
            and text.skip_special
            and not text.hidden_ids
            and text.logprobs is None
            and not text.token_ids
            and self.prompts[0].echo is None
        )


class Planner:
    """Turns bodies into plans for one model. Raises ApiError for whatever cannot be served."""

    def __init__(self, card: ModelCard, max_choices: int) -> None:
        self._card = card
        self._template = ChatTemplate(card)
        self._max_choices = max_choices

    async def completion(self, body: CompletionRequest, tenant: str) -> Plan:
        self._check(body)
        n = limits.choices(body)
        prompts = limits.prompts(body.prompt, self._card.vocab_size, self._max_choices)
        if len(prompts) * n > self._max_choices:
            raise invalid("n", f"prompts times n must be at most {self._max_choices}.")
        planned = []
        seed = limits.seed_of(body)
        sampling: Sampling | None = None
        for prompt in prompts:
            ids = await self.ids_of(prompt)
            limit = limits.output_limit(body, len(ids), self._card)
            sampling = self._sampling(body, limit, seed, sampling)
            planned.append(Prompt(ids, self._echo(prompt, body), sampling))
        return self._plan(body, False, planned, n, tenant)

    async def chat(self, body: ChatRequest, tenant: str) -> Plan:
        self._check(body)
        n = limits.choices(body)
        if n > self._max_choices:
            raise invalid("n", f"n must be at most {self._max_choices}.")
        messages = plain_messages(body.messages)
        keep_open = bool(body.continue_final_message)
        if keep_open and body.add_generation_prompt:
            raise invalid(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other.",
            )
        generate = body.add_generation_prompt is not False
        ids = await self.ids_of_chat(messages, generate=generate, keep_open=keep_open)
        limit = limits.output_limit(body, len(ids), self._card)
        sampling = self._sampling(body, limit, limits.seed_of(body), None)
        echo = messages[-1].content if body.echo and messages[-1].role == "assistant" else None
        return self._plan(body, True, [Prompt(ids, echo, sampling)], n, tenant)

    async def ids_of(self, prompt: str | list[int], *, add_special: bool = True) -> list[int]:
        """Raises for a text that is surely too long before encoding it, and for one that is nothing."""
        if not isinstance(prompt, str):
            return prompt
        # A token is at most as long as the longest of the vocabulary, so this text cannot fit.
        if len(prompt) > self._card.max_len * self._card.longest_token:
            self._too_long()
        ids = await self._card.encode(prompt, add_special=add_special)
        if not ids:
            raise invalid("prompt", "prompt must not be empty.")
        return ids

    async def ids_of_chat(self, messages: Sequence[Message], *, generate: bool, keep_open: bool) -> list[int]:
        if sum(len(m.content) for m in messages) > self._card.max_len * self._card.longest_token:
            self._too_long()
        ids = await self._template.encode(messages, generate=generate, keep_open=keep_open)
        if not ids:
            raise invalid("messages", "These messages make an empty prompt.")
        return ids

    def _too_long(self) -> None:
        message = f"The prompt is longer than this model's context of {self._card.max_len} tokens."
        raise ApiError(400, message, code="context_length_exceeded")

    def _check(self, body: Common) -> None:
        if body.model is not None and not self._card.knows(body.model):
            raise no_such_model(body.model)
        limits.refuse_unsupported(body)

    def _sampling(self, body: Common, limit: int, seed: int | None, like: Sampling | None) -> Sampling:
        if seed is None:
            # Greedy choice draws nothing, so it needs no seed of its own.
            seed = 0 if body.temperature == 0 else secrets.randbits(64)
        if like is not None:
            return msgspec.structs.replace(like, max_tokens=limit, seed=seed)
        return limits.sampling(body, self._card, limit, seed)

    def _echo(self, prompt: str | list[int], body: CompletionRequest) -> str | None:
        if not body.echo:
            return None
        if isinstance(prompt, str):
            return prompt
        return self._card.decode(prompt, skip_special=body.skip_special_tokens is not False)

    def _plan(self, body: Common, chat: bool, prompts: Sequence[Prompt], n: int, tenant: str) -> Plan:
        priority = limits.integer("priority", body.priority, -_PRIORITY, _PRIORITY - 1, 0)
        salt = limits.short_text("cache_salt", body.cache_salt)
        limits.short_text("request_id", body.request_id)
        return Plan(
            chat=chat,
            prompts=prompts,
            n=n,
            text=limits.text_options(body, self._card),
            stream=limits.stream_wishes(body),
            priority=priority,
            # A tenant cannot name another's salt: its own name always stands before.
            salt=f"{tenant}\0{salt}" if tenant or salt else "",
            open_ended=limits.is_open_ended(body),
        )


def no_such_model(name: str) -> ApiError:
    message = f"The model {name[:100]!r} does not exist. GET /v1/models lists what there is."
    return ApiError(404, message, param="model", code="model_not_found")


def plain_messages(bodies: list[MessageBody] | None) -> list[Message]:
    """Messages with their content as one text. Raises for media, unknown roles and empty lists."""
    if not bodies:
        raise invalid("messages", "messages must not be empty.", code="missing_required_parameter")
    if len(bodies) > MAX_MESSAGES:
        raise invalid("messages", f"At most {MAX_MESSAGES} messages are allowed.")
    messages = []
    for number, body in enumerate(bodies):
        where = f"messages[{number}]"
        if body.role not in _ROLES:
            raise invalid(f"{where}.role", f"role must be one of {', '.join(sorted(_ROLES))}.")
        if body.tool_calls or body.function_call:
            raise invalid(
                f"{where}.tool_calls", "Tool calls are not supported.", code="unsupported_parameter"
            )
        if body.content is None and body.role != "assistant":
            raise invalid(f"{where}.content", "content must be a text.", code="missing_required_parameter")
        role = "system" if body.role == "developer" else body.role
        messages.append(Message(role, _text(body.content, f"{where}.content")))
    return messages


def _text(content: str | list[object] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        at = f"{where}[{number}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise invalid(at, "A content part must be an object with type 'text'.", code="invalid_type")
        kind = part.get("type")
        if kind not in ("text", "input_text"):
            raise invalid(
                at, f"Only text parts are supported, not {str(kind)[:50]!r}.", code="unsupported_media"
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise invalid(f"{at}.text", "text must be a string.", code="invalid_type")
        texts.append(text)
    return "".join(texts)
