"""A model's chat template: conversations as text, said in another way where the template needs one.

Plain Python beside transformers' Jinja; may be called from any thread.
"""

from __future__ import annotations

import copy
import itertools
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jinja2

from chairlift.engine.chat.conversation import Conversation, appended, tidied
from chairlift.engine.chat.rewrites import REWRITES, Rewrite
from chairlift.engine.chat.shadow import SENTINEL, Mark, Shadow, shadow_of
from chairlift.engine.errors import InvalidParameter

logger = logging.getLogger("chairlift.engine")

KEPT_WAYS = 1024
"""Forms of conversations whose way through the template is remembered."""
MOST_TRIES = 200
"""Sets of rewrites that are tried for one form of a conversation."""
MOST_MESSAGES = 20_000
"""Messages rendered in all those tries together, roughly."""
MOST_REWRITTEN = 100_000
"""Messages rewritten for them, roughly."""

Source = str | Mapping[str, str] | Callable[..., str]
"""Jinja text, several by name (`default`, `tool_use`), or a function that renders."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How one form of conversation is said: by these rewrites, or not at all."""

    rewrites: tuple[Rewrite, ...] = ()
    refusal: InvalidParameter | None = None
    lost: Mark | None = None


class ChatTemplate:
    """Args: special_tokens: variables such as `bos_token` that every rendering gets."""

    def __init__(self, source: Source, special_tokens: Mapping[str, object] | None = None) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens or {})
        self._ways: OrderedDict[bytes, _Way] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def texts(self) -> tuple[str, ...]:
        """All of its texts; none where it is a function."""
        if callable(self._source):
            return ()
        return tuple(filter(None, [self._source] if isinstance(self._source, str) else self._source.values()))

    @property
    def text(self) -> str | None:
        """The template itself; None where it is a function."""
        if isinstance(self._source, str):
            return self._source or None
        return self._source.get("default") if isinstance(self._source, Mapping) else None

    def mentions(self, name: str) -> bool:
        """Whether the variable stands anywhere in its texts."""
        return any(re.search(rf"\b{re.escape(name)}\b", text) for text in self.texts)

    def render(self, conversation: Conversation) -> str:
        """The prompt's text.

        The conversation is said as it was sent where the template takes it whole; else by those
        rewrites that go least far.

        Raises:
            InvalidParameter: `messages…`, `tools` or `documents`: the template refuses the conversation, in
                its own words, or has no place for a part of it.
        """
        if not conversation.messages:
            raise InvalidParameter("messages", "The conversation has no message.")
        conversation = replace(conversation, messages=tuple(tidied(list(conversation.messages))))
        if conversation.continue_final_message:
            conversation = _marked_end(conversation)
        shadow = shadow_of(conversation)
        way = self._way(shadow)
        if way.lost is not None:
            raise InvalidParameter(way.lost.param, _no_place(way.lost))
        for rewrite in way.rewrites:
            conversation = rewrite.apply(conversation)
        rendered = self.written(
            conversation
        )  # one that no way leads through is refused here, or taken after all
        if conversation.continue_final_message:
            end = rendered.rfind(SENTINEL)
            if end < 0:
                where = f"messages[{len(conversation.messages) - 1}]"
                raise InvalidParameter(where, "The model's chat template cannot continue the last message.")
            return rendered[:end]
        return rendered + conversation.suffix.removesuffix(SENTINEL)

    def _way(self, shadow: Shadow) -> _Way:
        key = shadow.key
        with self._lock:
            known = self._ways.get(key)
            if known is not None:
                self._ways.move_to_end(key)
                return known
        way = self._find(shadow)
        if way.rewrites:
            names = ", ".join(rewrite.name for rewrite in way.rewrites)
            logger.debug("a conversation is rewritten for the chat template: %s", names)
        with self._lock:
            self._ways[key] = way
            while len(self._ways) > KEPT_WAYS:
                self._ways.popitem(last=False)
        return way

    def _find(self, shadow: Shadow) -> _Way:
        """The first set of rewrites with which nothing is refused and nothing lost."""
        first: _Way | None = None
        tries = MOST_TRIES
        for rewrites in _sets(shadow.conversation):
            conversation = _rewritten(shadow.conversation, rewrites)
            if conversation is None:
                continue
            if tries <= 0:
                break
            tries -= 1 + MOST_TRIES * len(conversation.messages) // MOST_MESSAGES
            try:
                rendered = self.written(conversation) + conversation.suffix
            except InvalidParameter as refusal:
                first = first or _Way(refusal=refusal)
                continue
            missing = shadow.missing(rendered, conversation)
            if not missing:
                return _Way(rewrites)
            first = first or _Way(lost=missing[0])
        assert first is not None
        return first

    def written(self, conversation: Conversation) -> str:
        """What the template makes of the conversation as it stands. Raises: InvalidParameter in its words."""
        try:
            return self._render(conversation)
        except InvalidParameter:
            raise
        except jinja2.TemplateError as error:  # raise_exception() is one too
            reason = (error.message or type(error).__name__).strip()
            raise InvalidParameter("messages", f"The model's chat template refused: {reason}") from error
        except Exception as error:  # an expression of the template that met a value of another type
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise InvalidParameter(
                "messages", f"The model's chat template cannot render this conversation: {reason}"
            ) from error

    def _render(self, conversation: Conversation) -> str:
        # Templates may add to what they are given, and the caller's conversation is not theirs to change.
        messages, tools, documents = copy.deepcopy(
            (list(conversation.messages), list(conversation.tools), list(conversation.documents))
        )
        given: dict[str, Any] = {
            "tools": tools or None,
            "add_generation_prompt": conversation.add_generation_prompt,
            **conversation.variables,
        }
        if documents:
            given["documents"] = documents
        if callable(self._source):
            return self._source(messages, tokenize=False, **given)
        from transformers.utils.chat_template_utils import render_jinja_template

        # Not by the tokenizer's own method, which drops what is null: some templates ask for just that.
        rendered, _ = render_jinja_template(
            conversations=[messages],
            chat_template=self._text_for(bool(tools)),
            **{**self._special_tokens, **given},
        )
        return str(rendered[0])

    def _text_for(self, tools: bool) -> str:
        assert not callable(self._source)
        if isinstance(self._source, str):
            return self._source
        names = ("tool_use", "default") if tools else ("default",)
        for name in (*names, *self._source):
            if name in self._source:
                return self._source[name]
        raise InvalidParameter("messages", "The model has no chat template.")


def _marked_end(conversation: Conversation) -> Conversation:
    *before, last = conversation.messages
    return replace(conversation, messages=(*before, appended(last, SENTINEL)))


def _rewritten(conversation: Conversation, rewrites: tuple[Rewrite, ...]) -> Conversation | None:
    """None where one of them has nothing to do: the set without it stands earlier in the order."""
    for rewrite in rewrites:
        before, conversation = conversation, rewrite.apply(conversation)
        if conversation is before:
            return None
    return conversation


def _sets(conversation: Conversation) -> list[tuple[Rewrite, ...]]:
    """Sets of rewrites that may have something to do, those that go least far first. Where there are more
    than can be tried, those that go farthest come after the first half: a strict template takes most."""
    applicable = [
        rewrite for rewrite in REWRITES if rewrite.follows or rewrite.apply(conversation) is not conversation
    ]
    sets = [
        chosen for size in range(len(applicable) + 1) for chosen in itertools.combinations(applicable, size)
    ]
    sets.sort(key=lambda chosen: sum(rewrite.cost for rewrite in chosen))
    half = MOST_TRIES // 2
    if len(sets) > MOST_TRIES:
        sets = sets[:half] + sets[half:][::-1]
    return sets[: max(MOST_TRIES, MOST_REWRITTEN // len(conversation.messages))]


def _no_place(mark: Mark) -> str:
    if mark.text == SENTINEL:
        return "The model's chat template cannot continue the last message."
    return f"The model's chat template has no place for {mark.param}."
