"""Requests made up from `/openapi.json`, good and bad: no 500, and answers as described."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS, load_all_checks

from chairlift.server.openapi.document import openapi
from chairlift.server.openapi.operations import OPERATIONS, Operation
from chairlift.server.security.gate import HEALTH
from chairlift.server.wire.messages import CountTokensRequest
from tests.fakes import FakeRunner, answering
from tests.server.embedding_harness import EMBEDDER, embedding_lift
from tests.server.harness import MODEL, on_socket
from tests.server.security.keyring import ROOT, bearer, secured

GOOD, BAD = 8, 4
"""Requests for each operation: making them up takes most of the time."""
CHECKED = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
]


class Server:
    """On a loop in a thread of its own, since the library's calls block."""

    def __init__(self) -> None:
        self.url: Future[str] = Future()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()

    async def _serve(self) -> None:
        runner = FakeRunner(answering("abc"))
        async with (
            embedding_lift(runner=runner, context_length=64, settings=secured()) as server,
            on_socket(server.app) as url,
        ):
            self.url.set_result(url)
            await self._end.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = Server()
    try:
        yield server.url.result(10)
    finally:
        server.close()


def with_model() -> dict[str, object]:
    """The description, of a server whose models are known: else nearly every answer would be a 404."""
    document = openapi("t", "1")
    for schema in document["components"]["schemas"].values():
        if schema.get("additionalProperties") is False and "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": [MODEL, EMBEDDER], "type": "string"}
    return document


def _what(operation: Operation) -> object:
    return (operation.body, id(operation.surface)) if operation.body else (operation.method, operation.path)


DISTINCT = tuple({_what(operation): operation for operation in OPERATIONS}.values())
"""One of those that are the same under several paths."""


def run(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


load_all_checks()
SCHEMA = schemathesis.openapi.from_dict(with_model())


@pytest.mark.parametrize("operation", DISTINCT, ids=lambda operation: f"{operation.method} {operation.path}")
def test_no_request_made_up_from_the_description_is_a_500(operation: Operation, url: str) -> None:
    described = SCHEMA[operation.path][operation.method.upper()]
    checks = CHECKS.get_by_names(CHECKED)

    def call(case: schemathesis.Case) -> None:
        case.call_and_validate(base_url=url, checks=checks, headers=bearer(ROOT), timeout=10)

    good, bad = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
    run(GOOD)(given(described.as_strategy(generation_mode=good))(call))()
    if (operation.body is not None or operation.query) and operation.body is not CountTokensRequest:
        run(BAD)(given(described.as_strategy(generation_mode=bad))(call))()


@pytest.mark.parametrize("operation", DISTINCT, ids=lambda operation: f"{operation.method} {operation.path}")
def test_whatever_is_sent_without_a_key_is_401_in_the_form_described(operation: Operation, url: str) -> None:
    described = SCHEMA[operation.path][operation.method.upper()]
    checks = CHECKS.get_by_names(CHECKED)

    def call(case: schemathesis.Case) -> None:
        for headers in ({}, {"Authorization": "Bearer nobody"}):
            response = case.call_and_validate(base_url=url, checks=checks, headers=headers, timeout=10)
            assert operation.path in HEALTH or response.status_code == 401

    run(2)(given(described.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE))(call))()
