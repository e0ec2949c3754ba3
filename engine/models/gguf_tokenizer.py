"""The tokenizer of a GGUF file as the files that transformers reads.

A GGUF file holds the vocabulary, its token types, merges (BPE) or scores (SentencePiece), and the name of the
pre-tokenizer; the pre-tokenizers themselves are those of llama.cpp, `llama-vocab.cpp`, written as the
`tokenizers` library spells them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.models.gguf_file import GGUFFile

SPACE = "\u2581"
"""SentencePiece's sign for a space."""

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_TOKENS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>"}
)
"""Control tokens that end an answer in whatever model has them (llama.cpp does the same, by name)."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`"""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def write_tokenizer(file: GGUFFile, folder: Path, *, context_length: int) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json; the token ids that belong into config.json.

    Raises:
        ModelUnavailable: a pre-tokenizer or tokenizer model that is not known here, or a damaged vocabulary.
    """
    description = tokenizer_description(file)
    text = json.dumps(description, ensure_ascii=False)
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise file.damaged(f"has a vocabulary that makes no tokenizer ({error})") from None
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    tokens = _strings(file, "tokens")
    special = {
        "bos": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "unk": file.metadata.get("tokenizer.ggml.unknown_token_id"),
        "pad": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    for role, token in special.items():
        if token is not None and not 0 <= token < len(tokens):
            raise file.damaged(f"names token {token} as {role}, which its vocabulary lacks")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        **{f"{role}_token": tokens[token] for role, token in special.items() if token is not None},
    }
    if template := file.metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    ids: dict[str, Any] = {
        f"{role}_token_id": special[role] for role in ("bos", "pad") if special[role] is not None
    }
    if ends := end_token_ids(file):
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return ids


def end_token_ids(file: GGUFFile) -> list[int]:
    """Tokens that end an answer: those the file names, its end-of-sequence token first, then those known by
    name."""
    named = (file.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom"))
    known = (
        token
        for token, (text, kind) in enumerate(zip(_strings(file, "tokens"), _types(file), strict=True))
        if kind == TokenType.CONTROL and text in END_TOKENS
    )
    return list(dict.fromkeys([*(token for token in named if token is not None), *known]))


def tokenizer_description(file: GGUFFile) -> dict[str, Any]:
    """The content of tokenizer.json."""
    model = file.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        parts = _byte_level_bpe(file)
    elif model == "llama":
        parts = _sentencepiece(file)
    else:
        raise ModelUnavailable(f"{file.path}: the tokenizer model {model!r} is not supported.")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(file),
        "normalizer": parts.get("normalizer"),
        "pre_tokenizer": parts.get("pre_tokenizer"),
        "post_processor": _post_processor(file, bos_by_default=parts["bos_by_default"]),
        "decoder": parts["decoder"],
        "model": {
            "type": "BPE",
            "dropout": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            **parts["model"],
        },
    }


def added_tokens(file: GGUFFile) -> list[dict[str, Any]]:
    """Tokens that are matched whole in the text, before anything else: control tokens, which are special
    (left out of plain text), and those that the model's makers added."""
    whole = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
    return [
        {
            "id": token,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": whole[TokenType(kind)],
        }
        for token, (text, kind) in enumerate(zip(_strings(file, "tokens"), _types(file), strict=True))
        if kind in whole and text
    ]


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _smollm() -> dict[str, Any]:
    digits = {"type": "Digits", "individual_digits": True}
    return {"type": "Sequence", "pretokenizers": [digits, _byte_level(use_regex=True)]}


def _llama3() -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


PRE_TOKENIZERS: dict[str, Callable[[], dict[str, Any]]] = {
    "smollm": _smollm,
    "gpt-2": lambda: _byte_level(use_regex=True),
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
}


def _byte_level_bpe(file: GGUFFile) -> dict[str, Any]:
    pre = file.metadata.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        what = "names no pre-tokenizer" if pre is None else f"uses the pre-tokenizer {pre!r}"
        raise ModelUnavailable(f"{file.path} {what}, which is not supported; {known} are.")
    pre_tokenizer = PRE_TOKENIZERS[pre]()
    llama3 = PRE_TOKENIZERS[pre] is _llama3
    merges = [merge.split(" ") for merge in _strings(file, "merges")]
    if any(len(merge) != 2 for merge in merges):
        raise file.damaged("has a merge that does not join two tokens")
    return {
        "pre_tokenizer": pre_tokenizer,
        "decoder": _byte_level(use_regex=True),
        "bos_by_default": llama3,
        "model": {
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": llama3,
            "vocab": _vocabulary(file),
            "merges": merges,
        },
    }


def _sentencepiece(file: GGUFFile) -> dict[str, Any]:
    if file.metadata.get("tokenizer.ggml.remove_extra_whitespaces") or file.metadata.get(
        "tokenizer.ggml.precompiled_charsmap"
    ):
        raise ModelUnavailable(f"{file.path}: its tokenizer normalizes text, which is not supported.")
    prefixed = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    restore = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "decoder": {
            "type": "Sequence",
            "decoders": [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "bos_by_default": True,
        "model": {
            "unk_token": None if unknown is None else _strings(file, "tokens")[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": _vocabulary(file),
            "merges": sentencepiece_merges(file),
        },
    }


def sentencepiece_merges(file: GGUFFile) -> list[tuple[str, str]]:
    """Merges that build the same pieces as SentencePiece's scores: the best-scored piece is joined first
    (the way of transformers' `generate_merges`)."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    tokens = _strings(file, "tokens")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise file.damaged("has no score for each token")
    pieces = {
        text: (score, token)
        for token, (text, score, kind) in enumerate(zip(tokens, scores, _types(file), strict=True))
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for text, (score, token) in pieces.items():
        for middle in range(1, len(text)):
            left, right = text[:middle], text[middle:]
            if left in pieces and right in pieces:
                ranked.append((-score, token, pieces[left][1], pieces[right][1], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _post_processor(file: GGUFFile, *, bos_by_default: bool) -> dict[str, Any] | None:
    """What puts the beginning-of-sequence token (and the end's, if the file says so) around a prompt."""
    tokens = _strings(file, "tokens")
    special: dict[str, Any] = {}

    def piece(role: str, wanted: bool) -> list[dict[str, Any]]:
        token = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if not file.metadata.get(f"tokenizer.ggml.add_{role}_token", wanted) or token is None:
            return []
        special[tokens[token]] = {"id": tokens[token], "ids": [token], "tokens": [tokens[token]]}
        return [{"SpecialToken": {"id": tokens[token], "type_id": 0}}]

    before, after = piece("bos", bos_by_default), piece("eos", False)
    if not special:
        return None
    first, second = ({"Sequence": {"id": part, "type_id": 0}} for part in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*before, first, *after],
        "pair": [*before, first, *after, *before, second, *after],
        "special_tokens": special,
    }


def _vocabulary(file: GGUFFile) -> dict[str, int]:
    tokens = _strings(file, "tokens")
    vocabulary = {text: token for token, text in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise file.damaged("holds a token twice")
    return vocabulary


def _strings(file: GGUFFile, key: str) -> list[str]:
    values = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise file.damaged(f"lacks tokenizer.ggml.{key}")
    return values


def _types(file: GGUFFile) -> list[int]:
    types = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(_strings(file, "tokens")):
        raise file.damaged("has no type for each token")
    return types
