"""Messages to token ids through the model's chat template.

What a user writes can never become a control token: if any content spells one out, contents are marked while
the template is rendered, and only text of the template itself is searched for control tokens.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.gateway.errors import ApiError, invalid
from services.gateway.tokenizer import ModelCard


@dataclass(frozen=True, slots=True)
class Message:
    """One turn, its content already plain text."""

    role: str
    content: str


class ChatTemplate:
    """The template of one model, compiled once."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = _tojson
        self._compiled = None if card.chat_template is None else environment.from_string(card.chat_template)
        specials = sorted(card.special.ids, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, specials))) if specials else None

    async def encode(self, messages: Sequence[Message], *, generate: bool, keep_open: bool) -> list[int]:
        """Ids of the conversation. `generate` opens the assistant's turn; `keep_open` leaves the last message
        unfinished, so that generation goes on with it. Raises ApiError(400) when the template refuses."""
        forged = self._specials is not None and any(self._specials.search(m.content) for m in messages)
        mark = secrets.token_hex(16)
        begin, end, cut = f"<{mark}b>", f"<{mark}e>", f"<{mark}c>"
        turns = []
        for number, message in enumerate(messages):
            content = message.content
            if keep_open and number == len(messages) - 1:
                content += cut
            if forged:
                content = begin + content + end
            turns.append({"role": message.role, "content": content})
        text = self._render(turns, generate and not keep_open)
        if keep_open:
            text = text[: text.rindex(cut)] if cut in text else text
        if not forged:
            return await self._card.encode(text, add_special=False)
        return await self._encode_marked(text, begin, end)

    def _render(self, turns: list[dict[str, str]], generate: bool) -> str:
        if self._compiled is None:
            message = "This model has no chat template. Use /v1/completions."
            raise ApiError(400, message, param="messages", code="unsupported_parameter")
        try:
            return self._compiled.render(
                messages=turns,
                add_generation_prompt=generate,
                tools=None,
                documents=None,
                **self._card.template_names,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise invalid("messages", f"The model's chat template refuses these messages: {error}") from None

    async def _encode_marked(self, text: str, begin: str, end: str) -> list[int]:
        assert self._specials is not None
        ids: list[int] = []
        plain = ""
        inside = False
        for part in re.split(f"({begin}|{end})", text):
            if part in (begin, end):
                inside = part == begin
            elif inside:
                plain += part
            else:
                at = 0
                for special in self._specials.finditer(part):
                    plain += part[at : special.start()]
                    ids += await self._card.encode_literal(plain)
                    ids.append(self._card.special.ids[special.group()])
                    plain, at = "", special.end()
                plain += part[at:]
        return ids + await self._card.encode_literal(plain)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
