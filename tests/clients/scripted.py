"""A server whose answers are told by the conversation: `python -m tests.clients.scripted`.

The real server and engine over a fake model. A message in which `@@` stands at least twice holds a script:
what stands between one `@@` and the next is an answer. The first is given to that message, the second once
the result of a tool has come after it, and so on, the last to everything further. `{result}` in an answer
becomes the latest result, so that an answer shows that it arrived. A conversation without a script is
answered by `ready`.
"""

from __future__ import annotations

import asyncio
import re
import sys

from chairlift.engine.engine import Engine
from chairlift.server.metrics import ServerMetrics
from chairlift.server.serve import listen, serve_models
from chairlift.server.served import EmbeddingServing, Serving
from chairlift.server.settings import ServerSettings
from tests.clients.template import TEMPLATE
from tests.fake_tokenizer import EOS, FakeTokenizer
from tests.fakes import FakeRow, FakeRunner, fake_model
from tests.server.given_engines import models_of

NAME = "scripted"
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
SCRIPT = re.compile(r"@@(?:(?!<\|im_end\|>).)+@@", re.DOTALL)


def answer(prompt: str) -> str:
    """What the last script in a rendered conversation says now."""
    scripts = list(SCRIPT.finditer(prompt))
    if not scripts:
        return "ready"
    answers = scripts[-1][0].split("@@")[1:-1]
    results = RESULT.findall(prompt[scripts[-1].end() :])
    said = answers[min(len(results), len(answers) - 1)]
    return said.replace("{result}", results[-1]) if results else said


class Scripted:
    """Draws the answer that a row's prompt tells, byte by byte."""

    def __init__(self) -> None:
        self._answers: dict[int, bytes] = {}

    def __call__(self, row: FakeRow) -> int:
        if row.drawn == 0:
            prompt = bytes(token for token in row.tokens if token < 256).decode(errors="replace")
            self._answers[row.new.row] = answer(prompt).encode()
        said = self._answers[row.new.row]
        return said[row.drawn] if row.drawn < len(said) else EOS


def announce(serving: Serving | EmbeddingServing) -> None:
    print(serving.url, flush=True)


def complain(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    metrics = ServerMetrics()
    tokenizer = FakeTokenizer(jinja=TEMPLATE)
    model = fake_model(FakeRunner(Scripted()), tokenizer, name=NAME, context_length=1_000_000)
    engine = Engine(model, observer=metrics.model(NAME))
    metrics.model(NAME).watch(engine)
    with listen("127.0.0.1", 0) as listener:
        return asyncio.run(
            serve_models(
                models_of(metrics, engine),
                listener,
                announce,
                complain,
                metrics=metrics,
                settings=ServerSettings(),
                drain_timeout=5.0,
            )
        )


if __name__ == "__main__":
    sys.exit(main())
