"""Lines of the log, as a program or a person reads them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from chairlift.server.configuration.types import LogFormat
from chairlift.server.observe.logs import set_up_logging
from tests.fakes import FakeRunner, answering
from tests.server.harness import lift
from tests.server.observe.reading import LOGGING


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root, access = logging.getLogger(), logging.getLogger("chairlift.access")
    lifecycle = logging.getLogger("chairlift.lifecycle")
    before = root.handlers[:], root.level, access.level
    stages = lifecycle.level
    uvicorn = [logging.getLogger(name) for name in ("uvicorn", "uvicorn.error")]
    theirs = [(each.handlers[:], each.propagate, each.level) for each in uvicorn]
    for each in uvicorn:  # a server of another test may have set them up
        each.handlers[:], each.propagate = [], True
        each.setLevel(logging.NOTSET)
    yield
    for each, (handlers, propagate, own) in zip(uvicorn, theirs, strict=True):
        each.handlers[:], each.propagate = handlers, propagate
        each.setLevel(own)
    root.handlers[:], level, lines = before
    root.setLevel(level)
    access.setLevel(lines)
    lifecycle.setLevel(stages)
    logging.captureWarnings(False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_a_request_as_json() -> None:
    stream = io.StringIO()
    set_up_logging("warning", access_log=True, file=logging.StreamHandler(stream))
    async with lift(FakeRunner(answering("abc")), settings=LOGGING) as server:
        answer = await server.chat()
    (line,) = lines(stream)
    assert (line["level"], line["logger"]) == ("INFO", "chairlift.access")
    assert line["message"] == "POST /v1/chat/completions 200"
    assert (line["status"], line["output_tokens"]) == (200, 4)
    assert line["request_id"] == answer.json()["id"]
    assert datetime.fromisoformat(str(line["timestamp"])).tzinfo is not None
    assert "taskName" not in line


async def test_a_request_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    set_up_logging("warning", access_log=True)
    async with lift(FakeRunner(answering("abc")), settings=LOGGING) as server:
        answer = await server.chat()
    (line,) = stream.getvalue().splitlines()
    assert "INFO chairlift.access: POST /v1/chat/completions 200 request_id=" in line
    assert f"request_id={answer.json()['id']} " in line and " output_tokens=4 " in line


@pytest.mark.parametrize("kind", LogFormat)
async def test_no_line_unless_asked(kind: LogFormat) -> None:
    stream = io.StringIO()
    set_up_logging("debug", kind, access_log=False, file=logging.StreamHandler(stream))
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    async with lift(FakeRunner(answering("abc")), settings=LOGGING) as server:
        await server.chat()
    assert "chairlift.access" not in stream.getvalue()


@pytest.mark.parametrize(
    ("level", "shown"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)], ids=str
)
def test_levels(level: str, shown: int) -> None:
    stream = io.StringIO()
    set_up_logging(level, file=logging.StreamHandler(stream))
    for name in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("uvicorn.error"), name)("up we go")
    assert [line["logger"] for line in lines(stream)] == ["uvicorn.error"] * shown


@pytest.mark.parametrize(("level", "shown"), [("info", True), ("warning", True), ("error", False)])
def test_what_becomes_of_models_is_told_by_default(level: str, shown: bool) -> None:
    stream = io.StringIO()
    set_up_logging(level, file=logging.StreamHandler(stream))
    logging.getLogger("chairlift.lifecycle").info("a is loaded")
    assert [line["message"] for line in lines(stream)] == ["a is loaded"] * shown


def test_what_was_raised() -> None:
    for kind in (LogFormat.JSON, LogFormat.PRETTY):
        stream = io.StringIO()
        set_up_logging("info", kind, file=logging.StreamHandler(stream))
        try:
            raise RuntimeError("derailed")
        except RuntimeError:
            logging.getLogger("chairlift.server").exception("it failed")
        if kind is LogFormat.JSON:
            (line,) = lines(stream)
            assert line["message"] == "it failed" and "RuntimeError: derailed" in str(line["exc_info"])
        else:
            assert stream.getvalue().rstrip().endswith("RuntimeError: derailed")


async def test_a_failure_in_a_request_says_which() -> None:
    stream = io.StringIO()
    set_up_logging("info", file=logging.StreamHandler(stream))
    runner = FakeRunner(answering("abc"))
    async with lift(runner, settings=LOGGING) as server:
        next(iter(server.app.state.context.models))._output = object()
        answer = await server.chat()
    assert answer.status_code == 500
    told = [line for line in lines(stream) if line["level"] == "ERROR"]
    assert told and all(line["request_id"] == answer.headers["x-request-id"] for line in told)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text(), st.text())
def test_nothing_that_is_logged_breaks_a_line(message: str, value: str) -> None:
    for kind in (LogFormat.JSON, LogFormat.PRETTY):
        stream = io.StringIO()
        set_up_logging("info", kind, file=logging.StreamHandler(stream))
        logging.getLogger("chairlift.server").warning("said", extra={"path": value})
        assert stream.getvalue().count("\n") == 1 and stream.getvalue().isascii()
    stream = io.StringIO()
    set_up_logging("info", LogFormat.JSON, file=logging.StreamHandler(stream))
    logging.getLogger("chairlift.server").warning("%s", message, extra={"path": value})
    (line,) = stream.getvalue().rstrip("\n").split("\n")
    assert json.loads(line)["message"] == message and json.loads(line)["path"] == value
