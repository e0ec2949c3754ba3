"""A tokenizer without a model: bytes, token id = byte."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from llguidance import LLTokenizer

from chairlift.engine.chat.conversation import Conversation
from chairlift.engine.chat.template import ChatTemplate
from chairlift.engine.errors import InvalidParameter
from tests.vocabularies import vocabulary

BOS, EOS, START, END = 256, 257, 258, 259
SPECIALS = {BOS: "<s>", EOS: "</s>", START: "<|im_start|>", END: "<|im_end|>"}


class FakeTokenizer:
    """Bytes, plus a few special tokens; a chat template in ChatML.

    Args:
        refuse: the chat template refuses every conversation with this message.
        chat_template: False for a model that has none.
        template: what the template's text is said to be; conversations are rendered as ChatML in any case.
        opens: what the template writes at the end of the prompt, behind the assistant's name.
        specials: further special tokens.
        jinja: a real chat template, which renders conversations.
    """

    tool_parser: str | None = None

    def __init__(
        self,
        *,
        refuse: str | None = None,
        chat_template: bool = True,
        template: str = "",
        opens: str = "",
        specials: Sequence[str] = (),
        jinja: str | None = None,
    ) -> None:
        self.refuse = refuse
        self.template = None if jinja is None else ChatTemplate(jinja, {"bos_token": "", "eos_token": ""})
        self.has_chat_template = chat_template
        self.chat_templates = (template if jinja is None else jinja,) if chat_template else ()
        self.opens = opens
        self._specials = {**SPECIALS, **{260 + index: text for index, text in enumerate(specials)}}
        self.template_arguments: list[dict[str, object]] = []
        """What each call of the template got beside the messages."""

    @property
    def vocab_size(self) -> int:
        return 256 + len(self._specials)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return {text: token for token, text in self._specials.items()}

    def token_id(self, text: str) -> int | None:
        return self.special_tokens.get(text)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({EOS, END})

    def grammar_vocabulary(self) -> LLTokenizer:
        tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in self._specials.values()]
        return vocabulary(tokens, (EOS, END), set(self._specials))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def template_mentions(self, variable: str) -> bool:
        return any(re.search(rf"\b{re.escape(variable)}\b", text) for text in self.chat_templates)

    def marked(self, text: str) -> list[int]:
        """Tokens of a text in which special tokens are written out, as a model would draw them."""
        tokens: list[int] = []
        pattern = "|".join(re.escape(mark) for mark in self._specials.values())
        for part in re.split(f"({pattern})", text):
            token = self.token_id(part)
            tokens += part.encode() if token is None else [token]
        return tokens

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        parts = bytearray()
        for token in token_ids:
            if token < 256:
                parts.append(token)
            elif not skip_special_tokens:
                parts += self._specials[token].encode()
        return parts.decode(errors="replace")

    def token_strings(self, token_ids: list[int]) -> list[str]:
        return [SPECIALS.get(token, chr(token)) for token in token_ids]

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
        self.template_arguments.append({"tools": tools, **kwargs})
        if self.refuse is not None:
            raise InvalidParameter("messages", self.refuse)
        if self.template is not None:
            end = (add_generation_prompt, continue_final_message)
            said = Conversation(tuple(messages), tuple(tools or ()), tuple(documents), *end, kwargs)
            return self.encode(self.template.render(said))
        tokens: list[int] = []
        for message in messages:
            tokens += [START, *self.encode(f"{message['role']}\n{message['content']}"), END, *b"\n"]
        if continue_final_message:
            del tokens[-2:]
        if add_generation_prompt:
            tokens += [START, *self.encode("assistant\n" + self.opens)]
        return tokens
