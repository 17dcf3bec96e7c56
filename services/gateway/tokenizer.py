"""The model as the gateway needs it: its tokenizer, its end-of-sequence ids, its limits and names."""

import asyncio
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer, decoders

from services.gateway.detok import (
    ByteDetokenizer,
    ByteTable,
    Detokenizer,
    StreamDetokenizer,
    byte_pieces,
)

LONG_TEXT = 8192
"""Characters from which encoding leaves the event loop, so that running streams do not stutter."""


class CardError(ValueError):
    """A model folder the gateway cannot use; says which file is at fault."""


@dataclass(frozen=True)
class SpecialTokens:
    """Texts that a tokenizer turns into one control id each, and their ids."""

    ids: dict[str, int]

    def found_in(self, text: str) -> bool:
        return any(content in text for content in self.ids)


@dataclass(frozen=True)
class ModelCard:
    """Made by `load_card`. Ids at or above `vocab_size` do not exist."""

    name: str
    aliases: frozenset[str]
    tokenizer: Tokenizer
    literal: Tokenizer
    """The same, but special tokens written out in a text stay text."""
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_len: int
    """Prompt and output together."""
    chat_template: str | None
    template_names: dict[str, Any] = field(default_factory=dict)
    """What a chat template may use besides messages: bos_token and the like."""

    @cached_property
    def special(self) -> SpecialTokens:
        added = self.tokenizer.get_added_tokens_decoder()
        return SpecialTokens({token.content: number for number, token in added.items() if token.special})

    @cached_property
    def byte_level(self) -> bool:
        return isinstance(self.tokenizer.decoder, decoders.ByteLevel)

    @cached_property
    def shown(self) -> ByteTable:
        """Special tokens as text."""
        return ByteTable(byte_pieces(self.tokenizer, frozenset()))

    @cached_property
    def hidden(self) -> ByteTable:
        """Special tokens as nothing."""
        return ByteTable(byte_pieces(self.tokenizer, frozenset(self.special.ids.values())))

    @cached_property
    def hidden_json(self) -> dict[int, bytes]:
        """`hidden.texts` as JSON strings, ready for a stream; without ids that are no whole text."""
        return {token: orjson.dumps(text) for token, text in enumerate(self.hidden.texts) if text is not None}

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, at most; a bound for texts that cannot fit."""
        return max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)))

    def detokenizer(self, skip_special: bool) -> Detokenizer:
        if self.byte_level:
            return ByteDetokenizer(self.hidden if skip_special else self.shown)
        skipped = frozenset(self.special.ids.values()) if skip_special else frozenset()
        return StreamDetokenizer(self.tokenizer, skipped)

    async def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text in which special tokens count as such."""
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens=add_special).ids
        return await asyncio.to_thread(_encode_batch, self.tokenizer, text, add_special)

    async def encode_literal(self, text: str) -> list[int]:
        """Ids of a text in which special tokens are only text."""
        if len(text) < LONG_TEXT:
            return self.literal.encode(text, add_special_tokens=False).ids
        return await asyncio.to_thread(_encode_batch, self.literal, text, False)

    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for by itself."""
        if self.byte_level:
            return self.shown.pieces[token] if 0 <= token < len(self.shown.pieces) else b""
        return self.tokenizer.decode([token], skip_special_tokens=False).encode()

    def token_text(self, token: int) -> str:
        """The same as text; `bytes:\\xe2\\x80` for a part of a character, as OpenAI writes it."""
        piece = self.token_bytes(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def knows(self, name: str) -> bool:
        return name == self.name or name in self.aliases or name.lower() in self.aliases


def load_card(folder: Path, name: str, aliases: tuple[str, ...] = (), max_len: int = 0) -> ModelCard:
    """Read `folder`. `name` is what clients call the model; the folder's own names become aliases.

    Raises CardError naming the file that is missing or unusable.
    """
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.is_file():
        given = (
            f"no tokenizer.json in {folder.absolute()}" if folder.is_dir() else f"there is no folder {folder}"
        )
        if folder == Path():
            given = f"HORTATOR_MODEL_DIR is not set, and there is {given}"
        raise CardError(
            f"{given}: set HORTATOR_MODEL_DIR to a model folder with a tokenizer; "
            "`hortator model pull` (extra `local`) fetches one and prints where it is"
        )
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        literal = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises bare Exception
        raise CardError(f"{tokenizer_file} cannot be read: {error}") from None
    for each in (tokenizer, literal):
        each.no_truncation()
        each.no_padding()
    literal.encode_special_tokens = True
    config = _json(folder / "config.json")
    tokenizer_config = _json(folder / "tokenizer_config.json")
    manifest = _json(folder / "manifest.json")
    context = max_len or config.get("max_position_embeddings") or tokenizer_config.get("model_max_length")
    if not isinstance(context, int) or context < 2:
        raise CardError(f"{folder}/config.json has no usable max_position_embeddings")
    own = {str(folder.name), str(manifest.get("name") or ""), *map(str, manifest.get("aliases") or ())}
    card = ModelCard(
        name=name,
        aliases=frozenset(alias for alias in {*own, *aliases} if alias and alias != name),
        tokenizer=tokenizer,
        literal=literal,
        eos_ids=_eos_ids(folder, config, tokenizer_config, tokenizer),
        vocab_size=int(config.get("vocab_size") or tokenizer.get_vocab_size(with_added_tokens=True)),
        max_len=context,
        chat_template=_chat_template(folder, tokenizer_config),
        template_names=_template_names(tokenizer_config),
    )
    # Built now, not in the first request.
    _ = card.longest_token, card.special, card.byte_level and (card.hidden_json, card.shown)
    return card


def _encode_batch(tokenizer: Tokenizer, text: str, add_special: bool) -> list[int]:
    # Unlike encode, encode_batch lets other threads run meanwhile.
    return tokenizer.encode_batch([text], add_special_tokens=add_special)[0].ids


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CardError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(body, dict):
        raise CardError(f"{path} must hold a JSON object")
    return body


def _eos_ids(
    folder: Path, config: dict[str, Any], tokenizer_config: dict[str, Any], tokenizer: Tokenizer
) -> tuple[int, ...]:
    """Of generation_config.json, else config.json; the tokenizer's own eos_token always belongs to them."""
    declared = _json(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    ids = declared if isinstance(declared, list) else [declared]
    text = tokenizer_config.get("eos_token")
    if isinstance(text, dict):
        text = text.get("content")
    if isinstance(text, str):
        ids = [*ids, tokenizer.token_to_id(text)]
    return tuple(sorted({i for i in ids if isinstance(i, int)}))


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named ones; "default" is the one for chat
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _template_names(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    names = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = tokenizer_config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            names[key] = value
    return names
