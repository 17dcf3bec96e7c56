"""Tokenizers made from GGUF metadata, against the algorithms written out slowly."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.model import ModelError
from shared.model.gguf_tokenizer import tokenizer_files

BYTES = [f"<0x{b:02X}>" for b in range(256)]


def build(meta):
    files = tokenizer_files(meta, 100_000)
    return Tokenizer.from_str(json.dumps(files["tokenizer.json"])), files["tokenizer_config.json"]


def sentence_piece(pieces: dict[str, float], **extra):
    """Metadata of a vocabulary: marks, 256 bytes, then the pieces with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **extra,
    }


def merge_slowly(text: str, pieces: dict[str, float]) -> list[str]:
    """SentencePiece's rule: while two neighbours make a piece, join those whose piece scores highest."""
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(pieces[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in pieces]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [q for p in parts for q in ([p] if p in pieces else [f"<0x{b:02X}>" for b in p.encode()])]


# No letter twice in a piece: where two ways to make one piece overlap, the two algorithms may differ.
words = st.text("abcd▁", min_size=2, max_size=4).filter(lambda w: len(set(w)) == len(w))


@settings(deadline=None, max_examples=100)
@given(
    pieces=st.sets(words, max_size=30),
    order=st.randoms(use_true_random=False),
    text=st.text("abcd é\n", max_size=30),
)
def test_sentence_piece_vocabularies_encode_as_their_own_algorithm_does(pieces, order, text):
    scored = [*"abcd▁", *sorted(pieces)]
    order.shuffle(scored)
    scores = {piece: -float(rank) for rank, piece in enumerate(scored)}
    tokenizer, _ = build(sentence_piece(scores, **{"tokenizer.ggml.add_bos_token": False}))
    encoded = tokenizer.encode(text)
    assert encoded.tokens == merge_slowly(text, scores)
    assert tokenizer.decode(encoded.ids) == text


def test_sentence_piece_texts_begin_with_a_mark_unless_the_file_says_no():
    pieces = {"▁": -1.0, "a": -2.0}
    tokenizer, config = build(sentence_piece(pieces))
    assert tokenizer.encode("a").tokens == ["<s>", "▁", "a"]
    assert tokenizer.decode(tokenizer.encode("a").ids) == "a"
    assert (config["bos_token"], config["add_bos_token"]) == ("<s>", True)
    tokenizer, _ = build(sentence_piece(pieces, **{"tokenizer.ggml.add_bos_token": False}))
    assert tokenizer.encode("a</s>").tokens == ["▁", "a", "</s>"]
    tokenizer, _ = build(sentence_piece(pieces, **{"tokenizer.ggml.add_space_prefix": False}))
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


def byte_level(pre, merges=("a b", "1 2", "12 3"), **extra):
    tokens = ["<|end|>", "<think>", *(chr(c) for c in range(33, 127)), "Ġ", "Ċ", "ab", "12", "123"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 4] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        **extra,
    }


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["ab", "Ġ", "123"]),
        ("smollm", ["ab", "Ġ", "1", "2", "3"]),  # every digit by itself
        ("qwen2", ["ab", "Ġ", "1", "2", "3"]),
        ("llama-bpe", ["<|end|>", "ab", "Ġ", "123"]),  # up to three digits, and a mark in front
    ],
)
def test_each_pre_tokenizer_cuts_digits_its_own_way(pre, tokens):
    tokenizer, _ = build(byte_level(pre))
    assert tokenizer.encode("ab 123").tokens == tokens
    assert tokenizer.decode(tokenizer.encode("ab 123").ids) == "ab 123"


def test_control_tokens_are_hidden_and_the_users_own_are_shown():
    tokenizer, _ = build(byte_level("smollm"))
    ids = tokenizer.encode("a<think>b<|end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"


def test_more_tokens_than_embedding_rows_are_refused():
    with pytest.raises(ModelError, match="embedding of 10 rows"):
        tokenizer_files(byte_level("smollm"), 10)
