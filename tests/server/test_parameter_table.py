"""docs/api.md lists every parameter of the libraries as the code treats it; none is unknown."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
from openai.types import chat

from chairlift.server.wire.chat import ImagePart, ImageURL, Message, TextPart, ToolCall
from tests.server.parameter_table import COLUMNS, PAGE, written


def test_the_page_is_up_to_date() -> None:
    """`python -m tests.server.parameter_table` makes it so."""
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page


def test_every_parameter_is_decided_on() -> None:
    for column in COLUMNS:
        for parameter in column.theirs:
            assert column.cell(parameter) != "–"
        assert column.no_effect & column.theirs <= set(column.wire.model_fields)


ROLES = [
    chat.ChatCompletionDeveloperMessageParam,
    chat.ChatCompletionSystemMessageParam,
    chat.ChatCompletionUserMessageParam,
    chat.ChatCompletionAssistantMessageParam,
    chat.ChatCompletionToolMessageParam,
    chat.ChatCompletionFunctionMessageParam,
]


@pytest.mark.parametrize("theirs", ROLES)
def test_every_field_of_a_message_is_known(theirs: type) -> None:
    hints = get_type_hints(theirs)
    assert set(hints) <= set(Message.model_fields)
    assert set(get_args(hints["role"])) <= set(get_args(Message.model_fields["role"].annotation))


def test_every_role_of_openai_is_known() -> None:
    assert set(get_args(chat.ChatCompletionMessageParam)) == set(ROLES)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (chat.ChatCompletionContentPartTextParam, TextPart),
        (chat.ChatCompletionContentPartImageParam, ImagePart),
        (chat.chat_completion_content_part_image_param.ImageURL, ImageURL),
        (chat.ChatCompletionMessageFunctionToolCallParam, ToolCall),
    ],
)
def test_every_field_of_a_part_is_known(theirs: type, ours: type) -> None:
    assert set(get_type_hints(theirs)) <= set(ours.model_fields)  # type: ignore[attr-defined]
