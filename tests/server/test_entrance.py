"""How a request is spelled: its query, its URL, its framing, the form of its body."""

from __future__ import annotations

import asyncio
import gzip
import json
import re

import httpx
import pytest

from chairlift.server.entrance import Entrance
from chairlift.server.openapi.operations import OPERATIONS
from tests.fakes import FakeRunner, answering
from tests.server.anthropic.asking import refusal
from tests.server.harness import CHAT, MODEL, chat_body, error_of, lift
from tests.server.test_connection import HALF_HEAD, answer, connected

VERSION = {"anthropic-version": "2023-06-01"}


async def test_what_an_endpoint_does_not_know_in_a_query_is_refused_on_every_route() -> None:
    async with lift() as server:
        for operation in OPERATIONS:
            path = operation.path.replace("{model_id}", MODEL).replace("{response_id}", "resp_1")
            response = await server.client.request(operation.method, f"{path}?foo=1&beta=true")
            if operation.anthropic:
                assert "foo" in str(refusal(response, 400)["message"]), path
            else:
                error = error_of(response, 400)
                assert (error["param"], error["code"]) == ("foo", "unsupported_parameter"), path
        assert (await server.client.head("/health?foo=1")).status_code == 400
        assert error_of(await server.client.get("/docs?foo=1"), 400)["param"] == "foo"


async def test_what_is_known_passes() -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        for path in (
            "/health?beta=true",
            "/v1/models?client_version=0.60.0",
            f"/v1/models/{MODEL}?beta=true",
        ):
            assert (await server.client.get(path)).status_code == 200
        assert (await server.client.post(CHAT + "?beta=true", json=chat_body())).status_code == 200


async def test_pages_of_models_are_of_anthropics_form_alone() -> None:
    async with lift() as server:
        for name in ("limit", "after_id", "before_id"):
            error = error_of(await server.client.get(f"/v1/models?{name}=1"), 400)
            assert error["param"] == name and "anthropic-version" in str(error["message"])
        whole = (await server.client.get("/v1/models?limit=1", headers=VERSION)).json()
        assert [card["id"] for card in whole["data"]] == [MODEL] and whole["has_more"] is False
        for edge in ("after_id", "before_id"):
            page = await server.client.get(f"/v1/models?{edge}={MODEL}", headers=VERSION)
            assert page.json()["data"] == []
        both = f"after_id={MODEL}&before_id={MODEL}"
        wrong = {"limit": "limit=0", "from 1": "limit=1001", "integer": "limit=x", "after_id": "after_id=x"}
        for word, query in {**wrong, "before_id and": both}.items():
            response = await server.client.get(f"/v1/models?{query}", headers=VERSION)
            assert word in str(refusal(response, 400)["message"])


@pytest.mark.parametrize("path", ["/health/ready/", "/v1/models/", f"/v1/models/{MODEL}/"])
async def test_a_slash_at_the_end_changes_nothing(path: str) -> None:
    async with lift() as server:
        with_slash, without = await server.client.get(path), await server.client.get(path[:-1])
        assert (with_slash.status_code, with_slash.content) == (200, without.content)


async def test_the_page_finds_its_files_behind_a_slash_too() -> None:
    async with lift() as server:
        for path in ("/", "/docs", "/docs/"):
            page = httpx.URL(f"http://test{path}")
            for found in re.findall(r"(?:src|href)=\"(.+?)\"", (await server.client.get(page)).text):
                assert (await server.client.get(page.join(found))).status_code == 200, (path, found)


async def test_a_slash_behind_a_post() -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        assert (await server.client.post(CHAT + "/", json=chat_body())).status_code == 200
        twice = await server.client.post(CHAT + "//", json=chat_body())
        assert error_of(twice, 404)["code"] == "unknown_url"


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://there:8000/health", 200),
        ("HTTPS://there/health/", 200),
        ("http://there/v1/models/org%2Ffake?beta=true", 200),
        ("http://there", 200),
        ("http://there/nowhere", 404),
        ("ftp://there/health", 404),
    ],
)
async def test_a_whole_url_as_the_target(target: str, status: int) -> None:
    async with connected() as (_, (reader, writer)):
        writer.write(f"GET {target} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(10):
            got = (await reader.read()).split()
        assert int(got[1]) == status


async def test_the_host_of_a_whole_url_is_the_one_that_counts() -> None:
    seen: list[tuple[str, list[tuple[bytes, bytes]]]] = []

    async def app(scope: object, receive: object, send: object) -> None:
        assert isinstance(scope, dict)
        seen.append((scope["path"], scope["headers"]))

    scope = {
        "type": "http",
        "path": "x",
        "raw_path": b"http://there:1/a%20b",
        "headers": [(b"host", b"here")],
    }
    await Entrance(app, None)(scope, None, None)  # type: ignore[arg-type]
    assert seen == [("/a b", [(b"host", b"there:1")])]


async def test_two_lengths_of_a_body_are_refused_and_end_the_connection() -> None:
    """What else comes is not read as a request of its own."""
    body = json.dumps(chat_body()).encode()
    chunked = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    head = HALF_HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with connected() as (_, (reader, writer)):
        writer.write(head + chunked + b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
        async with asyncio.timeout(10):
            status, got = await answer(reader)
            assert await reader.read() == b""
    error = got["error"]
    assert status == 400 and isinstance(error, dict) and error["code"] == "invalid_http"


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "application/json; charset=utf-8",
        "application/x-www-form-urlencoded",
        "text/plain",
        "application/vnd.x+json",
    ],
)
async def test_bodies_that_may_be_json_are_read(kind: str | None) -> None:
    """`curl -d` says that it sends a form."""
    async with lift(FakeRunner(answering("a"))) as server:
        headers = {} if kind is None else {"Content-Type": kind}
        content = json.dumps(chat_body()).encode()
        response = await server.client.post(CHAT, content=content, headers=headers)
        assert response.status_code == 200
        bad = await server.client.post(CHAT, content=b"model=x&messages=y", headers=headers)
        assert error_of(bad, 400)["code"] == "invalid_json"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/v1/cache/warm"])
@pytest.mark.parametrize(
    ("headers", "code", "said"),
    [
        ({"Content-Encoding": "gzip"}, "unsupported_encoding", {"accept-encoding": "identity"}),
        ({"Content-Encoding": "identity, br"}, "unsupported_encoding", {"accept-encoding": "identity"}),
        ({"Content-Type": "text/xml"}, "unsupported_media_type", {"accept": "application/json"}),
        ({"Content-Type": "multipart/form-data; boundary=x"}, "unsupported_media_type", {}),
    ],
)
async def test_other_bodies_are_415(
    path: str, headers: dict[str, str], code: str, said: dict[str, str]
) -> None:
    async with lift() as server:
        content = gzip.compress(json.dumps(chat_body()).encode())
        response = await server.client.post(path, content=content, headers=headers)
        assert error_of(response, 415)["code"] == code
        assert said.items() <= dict(response.headers).items()


async def test_a_packed_message_is_415_in_anthropics_form() -> None:
    async with lift() as server:
        response = await server.client.post(
            "/v1/messages", content=b"x", headers={"Content-Encoding": "gzip"}
        )
        assert refusal(response, 415)["type"] == "invalid_request_error"
        plain = await server.client.post(
            "/v1/messages", content=b"{}", headers=httpx.Headers({"Content-Encoding": "identity"})
        )
        assert "model" in str(refusal(plain, 400)["message"])
