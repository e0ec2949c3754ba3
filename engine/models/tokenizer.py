"""The `Tokenizer` of the engine over transformers' tokenizers, as mlx-lm loads them."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from llguidance import LLTokenizer

from chairlift.engine.chat.control_tokens import ControlTokens
from chairlift.engine.chat.conversation import Conversation
from chairlift.engine.chat.template import ChatTemplate, Source
from chairlift.engine.errors import InvalidParameter, ModelUnavailable
from chairlift.engine.models.soundness import TOKENIZERS, has_tokenizer

RESERVED_VARIABLES = frozenset(
    {
        "chat_template",
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


def load_tokenizer(folder: Path, chat_template: str | None = None) -> HFTokenizer:
    """The tokenizer of a model folder.

    Args:
        chat_template: in place of the folder's own; Jinja text.

    Raises:
        ModelUnavailable: its files are missing or cannot be read, or `chat_template` is no Jinja.
    """
    from mlx_lm.utils import load_tokenizer as load

    try:
        # Code that came with a model is not run; left unset, transformers would ask at the terminal.
        wrapper = load(
            folder, {"trust_remote_code": False}, eos_token_ids=sorted(configured_eos(folder)) or None
        )
    except Exception as error:  # transformers raises whatever its parsers do
        if not has_tokenizer(folder):
            raise ModelUnavailable(f"{folder} has no tokenizer ({', '.join(TOKENIZERS)}).") from None
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ModelUnavailable(f"The tokenizer of {folder} cannot be loaded: {reason}") from error
    if chat_template is not None:
        _check_template(chat_template)
        wrapper._tokenizer.chat_template = chat_template
        wrapper._chat_template = None
        wrapper.has_chat_template = True
    return HFTokenizer(wrapper)


def read_template(file: Path) -> str:
    """The text of a chat template. Raises: ModelUnavailable where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ModelUnavailable(f"The chat template {file} cannot be read: {reason}.") from error


def _check_template(text: str) -> None:
    try:
        ChatTemplate(text).written(Conversation(({"role": "user", "content": "a"},)))
    except InvalidParameter as refusal:  # which a template may have reasons for; only its grammar is judged
        error = refusal.__cause__
        if isinstance(error, jinja2.TemplateSyntaxError):
            raise ModelUnavailable(
                f"The chat template is no Jinja: {error.message} (line {error.lineno})."
            ) from error


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
        self._tokenizer = wrapper._tokenizer
        # It would warn of prompts beyond the model's context, which the engine refuses.
        self._tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        self._decoder = copy.deepcopy(self._tokenizer)
        self._decode = _plain_decode(self._decoder)
        self._encoding = threading.Lock()
        self._decoding = threading.Lock()
        self._has_chat_template = bool(wrapper.has_chat_template)
        self._template = ChatTemplate(_template_source(wrapper), special_tokens(self._tokenizer))
        self._control_tokens = ControlTokens(self._tokenizer, self._template.text)
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
            return self._decode(token_ids, skip_special_tokens=skip_special_tokens)

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
        return self._template.texts

    @property
    def tool_parser(self) -> str | None:
        settings = self._tokenizer.init_kwargs
        name = settings.get("tool_parser_type") or settings.get("chat_template_type")
        return name if isinstance(name, str) else None

    @property
    def chat_template(self) -> str | None:
        """The template's text; None where there is none or where it is Python code."""
        return self._template.text

    @property
    def chat_template_hash(self) -> str | None:
        """SHA-256 of the template's text."""
        template = self.chat_template
        return None if template is None else hashlib.sha256(template.encode()).hexdigest()

    def template_mentions(self, variable: str) -> bool:
        """Whether the chat template may read this variable."""
        return self._template.mentions(variable)

    def apply_chat_template(
        self,
        messages: list[dict[str, object]],
        *,
        tools: list[dict[str, object]] | None = None,
        documents: Sequence[dict[str, object]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> list[int]:
        """Token ids of the rendered conversation; `kwargs` are variables for the template.

        Control tokens that stand in the conversation's own text are encoded as text.

        Raises:
            InvalidParameter: `messages…`, `tools`, `documents`: as `ChatTemplate.render`;
                `chat_template_kwargs`: a name that is not the template's.
        """
        if not self._has_chat_template:
            raise no_template()
        conversation, marked = self._control_tokens.marked(
            asked(messages, tools, documents, add_generation_prompt, continue_final_message, kwargs)
        )
        rendered = self._template.render(conversation)
        if not marked:
            return self.encode(rendered, add_special_tokens=False)
        with self._encoding:
            return self._control_tokens.encode(rendered)


def _plain_decode(tokenizer: Any) -> Callable[..., str]:
    """The tokenizer's `decode`, without clean-up of spaces: straight from the tokenizers library where
    transformers adds nothing else to that, which takes four fifths off a token's time."""
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    kind = type(tokenizer)
    if (
        isinstance(tokenizer, TokenizersBackend)
        and kind.decode is TokenizersBackend.decode
        and kind._decode is TokenizersBackend._decode
    ):
        decode: Callable[..., str] = tokenizer.backend_tokenizer.decode
        return decode
    return partial(tokenizer.decode, clean_up_tokenization_spaces=False)


def _template_source(wrapper: Any) -> Source:
    """The wrapper's own `apply_chat_template` sets `enable_thinking` whether the caller did or not; what a
    template does by default is its own business, so the wrapper renders only what it brings itself."""
    tokenizer = wrapper._tokenizer
    if wrapper._chat_template is not None:
        renderer: Source = wrapper.apply_chat_template
        return renderer
    if tokenizer.chat_template is None and wrapper.has_chat_template:  # a tokenizer class that renders
        renderer = tokenizer.apply_chat_template
        return renderer
    return tokenizer.chat_template or ""


def special_tokens(tokenizer: Any) -> dict[str, object]:
    return dict(getattr(tokenizer, "special_tokens_map", {}))


def asked(
    messages: Sequence[dict[str, object]],
    tools: Sequence[dict[str, object]] | None,
    documents: Sequence[dict[str, object]],
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: dict[str, object],
) -> Conversation:
    """The arguments of `apply_chat_template` as a conversation.

    Raises:
        InvalidParameter: a variable that is an argument of the call that renders.
    """
    for name in sorted(RESERVED_VARIABLES.intersection(variables)):
        raise InvalidParameter("chat_template_kwargs", f"chat_template_kwargs may not set {name!r}.")
    given = (tuple(messages), tuple(tools or ()), tuple(documents))
    return Conversation(*given, add_generation_prompt, continue_final_message, variables)


def no_template() -> InvalidParameter:
    """What there is to say where a model has none."""
    return InvalidParameter(
        "messages", "The model has no chat template; use /v1/completions with a prompt of its own form."
    )
