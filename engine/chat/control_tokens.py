"""Control tokens written out in a conversation's text: `<|im_end|>` in a message is text, not the end of it.

The way is transformers' (5.24, `sanitize_control_tokens`): the texts are marked before the template sees
them, and what is marked is encoded as ordinary text. Which tokens are meant differs: a plain tag that is
no special token, such as `<think>` or `<tool_call>`, stays the token it is, since clients explain such
formats to a model in their own words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from chairlift.engine.chat.conversation import Conversation
from chairlift.engine.errors import InvalidParameter

_PLAIN_TAG = re.compile(r"</?\w+>")
_THINKING = re.compile(r"</?\w*think\w*>", re.IGNORECASE)
_MARK = "\U000f0000"
"""transformers' mark before a control token that is text."""


def has_marks(rendered: str) -> bool:
    return _MARK in rendered


class ControlTokens:
    """Args: tokenizer: of transformers, its calls in turn. template: its text, as far as it is known."""

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._tokenizer = tokenizer
        self._pattern = _pattern(_control_tokens(added.values(), template or ""))

    def marked(self, conversation: Conversation) -> tuple[Conversation, bool]:
        """The conversation with its control tokens marked, and whether it has any."""
        if self._pattern is None:
            return conversation, False
        given = (
            list(conversation.messages),
            list(conversation.tools),
            list(conversation.documents),
            dict(conversation.variables),
        )
        if not _holds(given, self._pattern):
            return conversation, False
        from transformers.utils.chat_template_utils import mark_control_tokens

        messages, tools, documents, variables = mark_control_tokens(given, self._pattern)
        marked = replace(
            conversation,
            messages=tuple(messages),
            tools=tuple(tools),
            documents=tuple(documents),
            variables=variables,
        )
        return marked, True

    def encode(self, rendered: str) -> list[int]:
        """Token ids of what a template made of a marked conversation.

        Raises:
            InvalidParameter: the tokenizer makes the control token even of its bare text.
        """
        from transformers.utils.chat_template_utils import encode_marked_chat

        try:
            return [int(token) for token in encode_marked_chat(self._tokenizer, rendered)]
        except ValueError as error:
            raise InvalidParameter(
                "messages", "messages hold the text of a control token, which this model cannot read as text."
            ) from error


def _control_tokens(added: Iterable[Any], template: str) -> list[str]:
    """Special tokens but those around thoughts, and others that the template writes, as DeepSeek's marks of
    roles are."""
    return [
        token.content
        for token in added
        if (token.special and not _THINKING.fullmatch(token.content))
        or (
            token.content in template
            and not token.content.isspace()
            and not _PLAIN_TAG.fullmatch(token.content)
            and not token.content.isalnum()
        )
    ]


def _pattern(tokens: list[str]) -> re.Pattern[str] | None:
    longest_first = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _holds(value: object, pattern: re.Pattern[str]) -> bool:
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, dict):
        return any(_holds(item, pattern) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds(item, pattern) for item in value)
    return False
