"""tokenizer.json and tokenizer_config.json from the vocabulary and merges inside a GGUF file. Pure."""

from typing import Any

from shared.model.errors import ModelError
from shared.model.gguf_metadata import Metadata, flag, integer, items, text

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)
"""Kinds of tokens that are found in a text as they are, never made by merging."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(False)]


_PRETOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_byte_level(True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(True)],
    "llama-bpe": _split(_LLAMA3_SPLIT),
    "qwen2": _split(_QWEN2_SPLIT),
}


_SAME_PRETOKENIZER = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}
"""Other names that llama.cpp gives the same rule (llama-vocab.cpp)."""

_MAX_TOKEN = 1024
"""Characters of the longest token that is believed; real ones have up to about 200."""


def tokenizer_files(meta: Metadata, vocab_size: int) -> dict[str, dict[str, Any]]:
    """File name → content. Byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`); others ModelError."""
    kind, pre = _kind(meta)
    tokens = _tokens(meta, vocab_size)
    types = (
        items(meta, "tokenizer.ggml.token_type", int, len(tokens))
        if meta.get("tokenizer.ggml.token_type")
        else [_NORMAL] * len(tokens)
    )
    names = {
        role: tokens[integer(meta, key, 0, len(tokens) - 1)]
        for role, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        )
        if meta.get(key) not in (None, 0xFFFFFFFF)
    }
    # llama.cpp's own defaults: SentencePiece and the Llama 3 pre-tokenizer begin every text with a mark.
    marks = kind == "llama" or pre == "llama-bpe"
    add_bos = flag(meta, "tokenizer.ggml.add_bos_token", marks) and "bos_token" in names
    parts = _sentence_piece(meta, tokens, types) if kind == "llama" else _byte_level_bpe(meta, tokens, pre)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, tokens[i], t) for i, t in enumerate(types) if t in _ADDED],
        "post_processor": _starts_with(names["bos_token"], tokens) if add_bos else None,
        **parts,
    }
    context = meta.get(f"{meta.get('general.architecture')}.context_length")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context or None,
        **names,
    }
    if template := text(meta, "tokenizer.chat_template", ""):
        config["chat_template"] = template
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _kind(meta: Metadata) -> tuple[str, str]:
    """(tokenizer model, pre-tokenizer), both known here."""
    folder = "Use the model's Hugging Face folder, which brings its own tokenizer.json"
    if "tokenizer.ggml.model" not in meta or "tokenizer.ggml.tokens" not in meta:
        raise ModelError(f"the GGUF file has no tokenizer (tokenizer.ggml.model and .tokens). {folder}")
    kind, pre = text(meta, "tokenizer.ggml.model"), text(meta, "tokenizer.ggml.pre", "")
    pre = _SAME_PRETOKENIZER.get(pre, pre)
    if kind == "gpt2" and not pre:
        raise ModelError(
            "the GGUF file does not say how its tokenizer cuts texts (tokenizer.ggml.pre), as files before "
            f"May 2024 did not; convert it again with a current llama.cpp. {folder}"
        )
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and pre not in _PRETOKENIZERS):
        shown = f"{kind!r}" if kind != "gpt2" else f"{kind!r} with pre-tokenizer {pre!r}"
        raise ModelError(
            f"the GGUF file has a tokenizer of kind {shown}; known are 'llama', and 'gpt2' with "
            f"{', '.join(_PRETOKENIZERS)}. {folder}"
        )
    return kind, pre


def _tokens(meta: Metadata, vocab_size: int) -> list[str]:
    tokens = items(meta, "tokenizer.ggml.tokens", str)
    if not tokens or len(tokens) > vocab_size:
        raise ModelError(f"the GGUF file has {len(tokens)} tokens but an embedding of {vocab_size} rows")
    for number, token in enumerate(tokens):
        if len(token) > _MAX_TOKEN:
            raise ModelError(
                f"the GGUF file's token {number} has {len(token)} characters; the file is damaged"
            )
    if len(set(tokens)) != len(tokens):
        seen: dict[str, int] = {}
        for number, token in enumerate(tokens):
            if (first := seen.setdefault(token, number)) != number:
                raise ModelError(
                    f"the GGUF file's tokens {first} and {number} are both {token!r}; the file is damaged"
                )
    return tokens


def _added(number: int, token: str, kind: int) -> dict[str, Any]:
    return {
        "id": number,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": kind != _USER_DEFINED,
    }


def _bpe(tokens: list[str], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": merges,
        **options,
    }


def _byte_level_bpe(meta: Metadata, tokens: list[str], pre: str) -> dict[str, Any]:
    known = set(tokens)
    merges = []
    for number, merge in enumerate(items(meta, "tokenizer.ggml.merges", str)):
        left, _, right = merge.partition(" ")
        if left not in known or right not in known or left + right not in known:
            raise ModelError(
                f"the GGUF file's merge {number} ({merge[:60]!r}) is not of its own tokens; "
                "the file is damaged"
            )
        merges.append([left, right])
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRETOKENIZERS[pre]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(tokens, merges, ignore_merges=pre == "llama-bpe"),
    }


def _sentence_piece(meta: Metadata, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """SentencePiece merges whichever neighbours make the piece of the highest score; as BPE that is every way
    to cut a piece in two known ones, in order of the piece's score."""
    scores: list[float] = [-float(i) for i in range(len(tokens))]
    if meta.get("tokenizer.ggml.scores"):
        scores = items(meta, "tokenizer.ggml.scores", float, len(tokens))
    known = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _NORMAL}
    merges = [
        (-scores[number], number, [token[:cut], token[cut:]])
        for token, number in known.items()
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    merges.sort(key=lambda row: row[:2])
    prefix = flag(meta, "tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), spaces],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            tokens, [pair for *_, pair in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True
        ),
    }


def _starts_with(bos: str, tokens: list[str]) -> dict[str, Any]:
    special, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, special, second],
        "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }
