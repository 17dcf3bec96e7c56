"""Token ids to text, one at a time, never with half a character shown.

The pieces a choice yields, joined, equal `tokenizer.decode` of all its ids. Byte-level vocabularies (GPT-2,
Llama 3, Qwen, SmolLM2) are a table of bytes, so text is UTF-8 decoding of what the ids stand for; any other
kind goes through the tokenizers library's own `DecodeStream`.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_new_utf8 = codecs.getincrementaldecoder("utf-8")

MAX_HELD = 32
"""Ids `DecodeStream` may hold back; its cost grows faster than their number, and no character is so long."""


class Detokenizer(Protocol):
    """The state of one choice."""

    def push(self, token: int) -> str:
        """Text that is certain now; empty while a character is incomplete. Unknown ids are no text."""

    def finish(self) -> str:
        """What was held back: at most U+FFFD for a character that never became complete."""


class ByteTable:
    """What each id stands for in a byte-level vocabulary; shared by all choices."""

    __slots__ = ("pieces", "texts")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = tuple(pieces)
        self.texts = tuple(_whole(piece) for piece in pieces)
        """The text of a piece that is whole characters, else None."""


class ByteDetokenizer:
    """Detokenizer over a `ByteTable`: linear in the bytes, whatever they are."""

    __slots__ = ("_pieces", "_texts", "_utf8", "open")

    def __init__(self, table: ByteTable) -> None:
        self._pieces = table.pieces
        self._texts = table.texts
        self._utf8 = _new_utf8("replace")
        self.open = False
        """Whether a character has begun and is not complete."""

    def push(self, token: int) -> str:
        if token >= len(self._texts) or token < 0:
            return ""
        if not self.open:
            text = self._texts[token]
            if text is not None:
                return text
        text = self._utf8.decode(self._pieces[token])
        self.open = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        self.open = False
        return self._utf8.decode(b"", True)


class StreamDetokenizer:
    """Detokenizer for every other vocabulary."""

    __slots__ = ("_ids", "_shown", "_since", "_skipped", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        """`skipped` ids are no text."""
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._stream = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        """Since the stream began, with the id before it."""
        self._shown = 0
        """Characters of `_ids` handed out so far."""
        self._since = 0
        """Ids since the last text."""

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        self._ids.append(token)
        text = self._stream.step(self._tokenizer, token)
        if text:
            self._since = 0
            self._shown += len(text)
            return text
        self._since += 1
        return self._force() if self._since >= MAX_HELD else ""

    def finish(self) -> str:
        whole = self._decode()
        tail = whole[self._shown :]
        self._shown = len(whole)
        return tail

    def _force(self) -> str:
        """Hand out what is held and begin a new stream behind it."""
        tail = self.finish()
        self._ids = self._ids[-1:]
        self._shown = len(self._decode())
        self._stream = DecodeStream(ids=list(self._ids), skip_special_tokens=False)
        self._since = 0
        return tail

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)


def byte_pieces(tokenizer: Tokenizer, skipped: frozenset[int]) -> list[bytes]:
    """The bytes of each id of a byte-level tokenizer; none for `skipped` ids and gaps in the vocabulary."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    of_char = {char: byte for byte, char in _byte_chars().items()}
    pieces = []
    for token in range(max([size, *(i + 1 for i in added)])):
        text = tokenizer.id_to_token(token)
        if text is None or token in skipped:
            pieces.append(b"")
        elif all(char in of_char for char in text):
            pieces.append(bytes(of_char[char] for char in text))
        else:
            pieces.append(text.encode())
    return pieces


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _byte_chars() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(printable))
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + n) for n, byte in enumerate(others)})
    return table
