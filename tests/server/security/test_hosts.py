"""Pages that their user merely visits."""

from __future__ import annotations

import socket

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.server.security.keys import KeySources
from chairlift.server.security.names import check_host_pattern, check_origin, host_name, is_allowed
from tests.fakes import FakeRunner, answering
from tests.server.harness import CHAT, Lift, chat_body, error_of, lift
from tests.server.security.keyring import ALICE, bearer, secured

NO_KEYS = KeySources()
PAGE = "https://chat.example.org"


async def ask(server: Lift, host: str, **headers: str) -> httpx.Response:
    return await server.client.post(CHAT, json=chat_body(max_tokens=1), headers={"Host": host, **headers})


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "localhost.:8000",
        "127.0.0.1:8000",
        "[::1]:8000",
        "[::1]",
        "192.168.1.5:1",
    ]
    + ["app.localhost", "host.docker.internal:8000", "llm.example.org:443", "a.lan.example.com"],
)
async def test_names_that_are_answered_to(host: str) -> None:
    wanted = secured(NO_KEYS, allowed_hosts=("llm.example.org", "*.lan.example.com"))
    async with lift(FakeRunner(answering("a")), settings=wanted) as server:
        assert (await ask(server, host)).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "llm.example.org.evil",
        "lan.example.com",
    ]
    + [
        "xllm.example.org",
        "",
        "a b",
        "[::1",
        "127.0.0.1:x",
        "user@localhost",
        "localhost/",
        "[evil.example]",
    ],
)
async def test_names_that_are_not(host: str) -> None:
    wanted = secured(NO_KEYS, allowed_hosts=("llm.example.org", "*.lan.example.com"))
    async with lift(settings=wanted) as server:
        error = error_of(await ask(server, host), 403)
        assert error["code"] == "host_not_allowed" and "--allowed-host" in str(error["message"])
        assert (await server.client.get("/health", headers={"Host": host})).status_code == 403


def test_this_machines_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Studio.example.org")
    assert is_allowed("studio.local", ()) and is_allowed("studio.example.org", ())
    assert not is_allowed("other.local", ()) and not is_allowed("studio", ())
    assert is_allowed("other.local", ("*",))


async def test_by_default_every_name_is_answered_to() -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        assert (await ask(server, "whatever.example")).status_code == 200


@pytest.mark.parametrize(
    "origin",
    [PAGE, "http://localhost:3000", "http://127.0.0.1:8000", "http://[::1]:5173", "http://app.localhost"],
)
async def test_pages_that_may_ask(origin: str) -> None:
    wanted = secured(NO_KEYS, cors_origins=(PAGE,))
    async with lift(FakeRunner(answering("a")), settings=wanted) as server:
        assert (await ask(server, "localhost", Origin=origin)).status_code == 200


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "file://", "chrome-extension://abc", "http://localhost.evil.example", ""]
    + [
        "http://chat.example.org",
        "https://chat.example.org:8443",
        "http://127.0.0.1.evil.example",
        "http://x@localhost",
    ],
)
async def test_pages_that_may_not(origin: str) -> None:
    wanted = secured(NO_KEYS, cors_origins=(PAGE,))
    async with lift(settings=wanted) as server:
        error = error_of(await ask(server, "localhost", Origin=origin), 403)
        assert error["code"] == "origin_not_allowed"
        await server.until_idle()
        assert server.runner.rows == {}


async def test_a_page_of_the_server_itself_may_ask() -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        assert (await ask(server, "studio:8000", Origin="http://studio:8000")).status_code == 200
        assert (await ask(server, "studio:8000", Origin="http://studio")).status_code == 403


async def test_with_a_key_the_page_does_not_matter() -> None:
    async with lift(FakeRunner(answering("a")), settings=secured()) as server:
        assert (await ask(server, "x", Origin="https://evil.example", **bearer(ALICE))).status_code == 200
        assert (await ask(server, "x", Origin="https://evil.example")).status_code == 401


@settings(deadline=None)
@given(st.text(max_size=20))
def test_no_host_is_taken_for_this_machine_by_its_looks(text: str) -> None:
    name = host_name(text)
    if name is not None:
        assert name == name.lower() and not set(name) & set("/@?# []")


def test_what_operators_may_write() -> None:
    assert check_host_pattern(" LLM.example.org. ") == "llm.example.org"
    assert [check_host_pattern(text) for text in ("*", "*.example.org", "studio")] == [
        "*",
        "*.example.org",
        "studio",
    ]
    for text in ("", "http://a", "a:80", "a*", "*a", "a/", "*.*", "a..b"):
        with pytest.raises(ValueError, match="host name"):
            check_host_pattern(text)
    assert check_origin("HTTPS://Chat.example.org") == PAGE
    assert [check_origin(text) for text in ("*", "app://obsidian.md", "http://localhost:3000")]
    for text in ("", "example.org", "https://", "https://a/", "https://a/b", "null", "https://a b"):
        with pytest.raises(ValueError, match="origin"):
            check_origin(text)
