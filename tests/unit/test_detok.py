"""Detokenizing one id at a time must say exactly what decoding all ids at once says."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.gateway.detok import ByteDetokenizer, ByteTable, Detokenizer, StreamDetokenizer, byte_pieces
from tests.support.tiny_model import SPECIAL, tiny_tokenizer

BYTE_LEVEL = tiny_tokenizer()
SPECIAL_IDS = frozenset(BYTE_LEVEL.token_to_id(text) for text in SPECIAL)
TABLES = {
    skip: ByteTable(byte_pieces(BYTE_LEVEL, SPECIAL_IDS if skip else frozenset())) for skip in (True, False)
}


def sentencepiece_like() -> Tokenizer:
    """As Llama 2: `▁` for spaces, bytes as <0xNN>, the first space dropped."""
    pieces = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁hello", "▁world", "é", "日本", "▁", "a", "b", "語", "😀"]
    tokenizer = Tokenizer(
        models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


SENTENCEPIECE = sentencepiece_like()
END = frozenset([SENTENCEPIECE.token_to_id("</s>")])


def pieces_of(detok: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detok.push(token) for token in ids), detok.finish()]


ids_of_bytes = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=60)
texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=40)


@given(ids=ids_of_bytes, skip=st.booleans())
def test_any_ids_say_what_a_full_decode_says(ids: list[int], skip: bool) -> None:
    said = "".join(pieces_of(ByteDetokenizer(TABLES[skip]), ids))
    assert said == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(text=texts)
def test_no_replacement_character_is_ever_shown_inside_valid_text(text: str) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    shown = ""
    detok = ByteDetokenizer(TABLES[False])
    for token in ids:
        shown += detok.push(token)
        assert text.startswith(shown)
    assert shown + detok.finish() == text


def fallback_ids(part: str) -> list[int]:
    """A whole piece where there is one, else its bytes."""
    whole = SENTENCEPIECE.token_to_id(part)
    if whole is not None:
        return [whole]
    return [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>") for byte in part.encode()]


words = st.sampled_from(["▁hello", "▁world", "é", "日本", "</s>", "<s>"])


@given(
    parts=st.lists(st.characters(codec="utf-8") | words | st.just("</s>"), max_size=120), skip=st.booleans()
)
def test_other_vocabularies_say_what_a_full_decode_says(parts: list[str], skip: bool) -> None:
    # Of invalid bytes the library itself says different things at different times, so only valid text here.
    ids = [token for part in parts for token in fallback_ids(part)]
    said = "".join(pieces_of(StreamDetokenizer(SENTENCEPIECE, END if skip else frozenset()), ids))
    assert said == SENTENCEPIECE.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte-level", "other"])
def test_an_unfinished_character_is_told_at_the_end(kind: str) -> None:
    if kind == "byte-level":
        detok: Detokenizer = ByteDetokenizer(TABLES[True])
        ids = [BYTE_LEVEL.token_to_id(char) for char in "ðŁ"]
    else:
        detok = StreamDetokenizer(SENTENCEPIECE, END)
        ids = [SENTENCEPIECE.token_to_id(piece) for piece in ("<0xF0>", "<0x9F>")]
    assert [detok.push(token) for token in ids] == ["", ""]
    assert detok.finish().strip("�") == ""
    assert detok.finish() == ""


@pytest.mark.parametrize("kind", ["byte-level", "other"])
def test_many_thousands_of_invalid_bytes_are_cheap_and_not_withheld(kind: str) -> None:
    if kind == "byte-level":
        detok: Detokenizer = ByteDetokenizer(TABLES[True])
        token = BYTE_LEVEL.token_to_id("ł")
    else:
        detok = StreamDetokenizer(SENTENCEPIECE, END)
        token = SENTENCEPIECE.token_to_id("<0x9F>")
    began = time.perf_counter()
    shown = "".join(detok.push(token) for _ in range(20_000))
    assert time.perf_counter() - began < 10.0
    assert len(shown) > 19_900
    assert shown + detok.finish() == "�" * 20_000


@pytest.mark.parametrize("token", [-1, 600, 1 << 40])
def test_an_id_outside_the_vocabulary_is_no_text(token: int) -> None:
    detok = ByteDetokenizer(TABLES[True])
    assert detok.push(token) == ""
    assert detok.push(BYTE_LEVEL.token_to_id("a")) == "a"
