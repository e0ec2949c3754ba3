"""The `Tokenizer` of the engine over transformers' tokenizers, as mlx-lm loads them."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from llguidance import LLTokenizer

from chairlift.engine.errors import InvalidParameter, ModelUnavailable

_RESERVED = frozenset(
    {
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""Arguments of transformers' `apply_chat_template` itself, which are not for the template to see."""


def load_tokenizer(folder: Path) -> HFTokenizer:
    """The tokenizer of a model folder.

    Raises:
        ModelUnavailable: its files are missing or cannot be read.
    """
    from mlx_lm.utils import load_tokenizer as load

    try:
        # Code that came with a model is not run; left unset, transformers would ask at the terminal.
        wrapper = load(
            folder, {"trust_remote_code": False}, eos_token_ids=sorted(configured_eos(folder)) or None
        )
    except Exception as error:  # transformers raises whatever its parsers do
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ModelUnavailable(f"The tokenizer of {folder} cannot be loaded: {reason}") from error
    return HFTokenizer(wrapper)


def configured_eos(folder: Path) -> frozenset[int]:
    """End-of-sequence tokens by the model's configuration and its generation settings."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        try:
            settings = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for part in (settings, settings.get("text_config") or {}):
            ends = part.get("eos_token_id")
            found.update(ends if isinstance(ends, list) else [] if ends is None else [ends])
    return frozenset(found)


class HFTokenizer:
    """`chairlift.engine.plan.Tokenizer`; safe to call from any thread.

    A tokenizer that changes its own settings during a call (truncation, padding) makes the tokenizers
    library refuse the calls of other threads ('Already borrowed'), so calls take turns. Decoding has a copy
    and a turn of its own: a long prompt being encoded holds up no answer.
    """

    def __init__(self, wrapper: Any) -> None:
        # The wrapper's own apply_chat_template sets `enable_thinking` whether the caller did or not; what a
        # template does by default is its own business, so transformers' method is used where there is one.
        self._tokenizer = wrapper._tokenizer
        # It would warn of prompts beyond the model's context, which the engine refuses.
        self._tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        self._renders = wrapper if wrapper._chat_template is not None else self._tokenizer
        self._decoder = copy.deepcopy(self._tokenizer)
        self._encoding = threading.Lock()
        self._decoding = threading.Lock()
        self._has_chat_template = bool(wrapper.has_chat_template)
        self._eos_token_ids = frozenset(int(token) for token in wrapper.eos_token_ids)
        self._vocab_size = len(self._tokenizer)
        self._special_tokens = {
            added.content: int(token)
            for token, added in self._tokenizer.added_tokens_decoder.items()
            if added.special
        }
        self._vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.wrapper = wrapper
        """mlx-lm's `TokenizerWrapper`, for what it knows of thinking and tool calls. Not thread-safe."""

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        with self._encoding:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return [int(token) for token in ids]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text of the tokens, spaces as they have them; bytes that are no whole character give U+FFFD."""
        with self._decoding:
            text: str = self._decoder.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """Each token as the vocabulary writes it (`Ġthe`); an id without a token is an empty string."""
        with self._decoding:
            strings = self._decoder.convert_ids_to_tokens(token_ids)
        return [string or "" for string in strings]

    def grammar_vocabulary(self) -> LLTokenizer:
        """What constraints are compiled against: the bytes of every token. Takes a second.

        Raises:
            Exception: a kind of tokenizer that llguidance cannot read.
        """
        from llguidance.hf import from_tokenizer

        with self._encoding:
            return from_tokenizer(self._tokenizer, eos_token=sorted(self._eos_token_ids) or None)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return self._special_tokens

    def token_id(self, text: str) -> int | None:
        return self._vocabulary.get(text)

    @property
    def has_chat_template(self) -> bool:
        return self._has_chat_template

    @property
    def chat_templates(self) -> tuple[str, ...]:
        template = self._tokenizer.chat_template
        texts = template.values() if isinstance(template, dict) else [template]
        return tuple(text for text in texts if isinstance(text, str))

    def template_mentions(self, variable: str) -> bool:
        return any(re.search(rf"\b{re.escape(variable)}\b", text) for text in self.chat_templates)

    @property
    def tool_parser(self) -> str | None:
        name = self._tokenizer.init_kwargs.get("tool_parser_type")
        return name if isinstance(name, str) else None

    @property
    def chat_template(self) -> str | None:
        """The template's text; None where there is none or where it is Python code."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return template if isinstance(template, str) else None

    @property
    def chat_template_hash(self) -> str | None:
        """SHA-256 of the template's text."""
        template = self.chat_template
        return None if template is None else hashlib.sha256(template.encode()).hexdigest()

    def apply_chat_template(
        self,
        messages: list[dict[str, object]],
        *,
        tools: list[dict[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> list[int]:
        """Token ids of the rendered conversation; `kwargs` are variables for the template.

        Raises:
            InvalidParameter: `messages`: the template refused them, in its own words;
                `chat_template_kwargs`: a name that is not the template's.
        """
        if not self._has_chat_template:
            raise InvalidParameter(
                "messages",
                "The model has no chat template; use /v1/completions with a prompt of its own form.",
            )
        with self._encoding:
            rendered = render_chat(
                self._renders, messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
            )
        return self.encode(rendered, add_special_tokens=False)


def render_chat(
    renderer: Any,
    messages: list[dict[str, object]],
    *,
    tools: list[dict[str, object]] | None,
    add_generation_prompt: bool,
    **kwargs: object,
) -> str:
    """The conversation as the template of `renderer`, a transformers tokenizer, writes it.

    Raises:
        InvalidParameter: as `HFTokenizer.apply_chat_template`.
    """
    for name in sorted(_RESERVED.intersection(kwargs)):
        raise InvalidParameter("chat_template_kwargs", f"chat_template_kwargs may not set {name!r}.")
    # Templates may add to what they are given, and the caller's request is not theirs to change.
    conversation, tools = copy.deepcopy((messages, tools))
    try:
        rendered: str = renderer.apply_chat_template(
            conversation,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **kwargs,
        )
    except jinja2.TemplateError as error:  # raise_exception() is one too
        reason = (error.message or type(error).__name__).strip()
        raise InvalidParameter("messages", f"The model's chat template refused: {reason}") from error
    except Exception as error:  # an expression of the template that met a value of another type
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise InvalidParameter(
            "messages", f"The model's chat template cannot render this conversation: {reason}"
        ) from error
    return rendered
