"""docs/api.md's table of every parameter that OpenAI's and Anthropic's libraries have, made from the code.

`python -m tests.server.parameter_table` writes it into the page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import EmbeddingCreateParams, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from chairlift.server.wire.chat import ChatRequest
from chairlift.server.wire.completions import CompletionRequest
from chairlift.server.wire.embeddings import EMBEDDINGS, EmbeddingRequest
from chairlift.server.wire.messages import MessagesRequest
from chairlift.server.wire.parameters import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Surface
from chairlift.server.wire.responses import ResponsesRequest
from tests.server.anthropic.test_parameters import HEADERS
from tests.server.anthropic.test_parameters import NO_EFFECT as MESSAGES_NO_EFFECT
from tests.server.responses.test_parameters import NO_EFFECT as RESPONSES_NO_EFFECT
from tests.server.test_parameters import NO_EFFECT as CHAT_NO_EFFECT

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
HEADING = "## Every parameter of OpenAI's and Anthropic's libraries\n"


@dataclass(frozen=True)
class Column:
    name: str
    theirs: frozenset[str]
    """Parameters of the library, `stream` included where there is one."""
    wire: type[BaseModel]
    surface: Surface
    no_effect: frozenset[str]

    def cell(self, parameter: str) -> str:
        """Of what the endpoint takes, whichever library has it."""
        if parameter in self.wire.model_fields:
            return "no effect" if parameter in self.no_effect else "works"
        if parameter not in self.theirs and parameter not in self.surface.neutral:
            return "–"
        values = self.surface.neutral[parameter]  # a KeyError: nobody has decided on it
        but = ", ".join(f"`{json.dumps(value)}`" for value in values)
        return f"refused but {but}" if but else "refused"


def keys(*types: type) -> frozenset[str]:
    return frozenset(key for each in types for key in _annotations(each)) | {"stream"}


def _annotations(each: type) -> Mapping[str, object]:
    return each.__annotations__


COLUMNS = (
    Column(
        "chat",
        keys(chat_create_params.CompletionCreateParamsBase),
        ChatRequest,
        CHAT,
        frozenset(CHAT_NO_EFFECT),
    ),
    Column(
        "completions",
        keys(completion_create_params.CompletionCreateParamsBase),
        CompletionRequest,
        COMPLETIONS,
        frozenset(CHAT_NO_EFFECT),
    ),
    Column(
        "responses",
        keys(response_create_params.ResponseCreateParamsBase),
        ResponsesRequest,
        RESPONSES,
        frozenset(RESPONSES_NO_EFFECT),
    ),
    Column(
        "embeddings",
        frozenset(_annotations(EmbeddingCreateParams)),
        EmbeddingRequest,
        EMBEDDINGS,
        frozenset({"user"}),
    ),
    Column(
        "messages",
        keys(
            message_create_params.MessageCreateParamsBase, beta_message_create_params.MessageCreateParamsBase
        )
        - HEADERS,
        MessagesRequest,
        MESSAGES,
        frozenset(MESSAGES_NO_EFFECT["messages"]),
    ),
)


def table() -> str:
    rows = ["| parameter | " + " | ".join(column.name for column in COLUMNS) + " |"]
    rows.append("|---" * (len(COLUMNS) + 1) + "|")
    for parameter in sorted(frozenset().union(*(column.theirs for column in COLUMNS))):
        cells = " | ".join(column.cell(parameter) for column in COLUMNS)
        rows.append(f"| `{parameter}` | {cells} |")
    return "\n".join(rows) + "\n"


def written(page: str) -> str:
    """The page with the table in place of the one under the heading."""
    before, heading, section = page.partition(HEADING)
    assert heading, "the page has no such heading"
    intro, _, rest = section.partition("\n| parameter |")
    after = rest.partition("\n\n")[2]
    return before + heading + intro + "\n" + table() + ("\n" + after if after else "")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
