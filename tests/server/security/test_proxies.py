"""Whose word counts for where a request comes from."""

from __future__ import annotations

from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from chairlift.server.configuration.read import read
from chairlift.server.configuration.secrets import connection_limits
from chairlift.server.security.settings import ConnectionLimits
from chairlift.server.serve import _uvicorn_config

PROXY = ("10.1.2.3", 4)


async def seen(limits: ConnectionLimits) -> tuple[str, str]:
    """Address and scheme of a request that comes from `PROXY` and says that it comes from elsewhere."""
    found: list[tuple[str, str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append((scope["client"][0], scope["scheme"]))

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    config = _uvicorn_config(app, limits, None)
    config.load()
    headers = [(b"x-forwarded-for", b"192.0.2.7"), (b"x-forwarded-proto", b"https")]
    scope = {"type": "http", "client": PROXY, "scheme": "http", "headers": headers}
    await config.loaded_app(scope, receive, send)  # type: ignore[arg-type]
    return found[0]


async def test_nobodys_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's own variable
    assert await seen(ConnectionLimits()) == ("10.1.2.3", "http")


async def test_that_of_the_proxies_that_are_named() -> None:
    assert await seen(ConnectionLimits(proxies=("10.0.0.0/8",))) == ("192.0.2.7", "https")
    assert await seen(ConnectionLimits(proxies=("10.1.2.4",))) == ("10.1.2.3", "http")


def test_how_long_an_idle_connection_is_kept() -> None:
    assert _uvicorn_config(object(), ConnectionLimits(idle_s=75), None).timeout_keep_alive == 75


def test_clients_give_an_idle_connection_up_before_the_server_does() -> None:
    """Otherwise a request that is on its way when the server closes is lost."""
    kept = connection_limits(read({}, Path("/dev/null"), {}).configuration).idle_s
    assert kept == ConnectionLimits().idle_s
    for theirs in (openai.DEFAULT_CONNECTION_LIMITS, anthropic.DEFAULT_CONNECTION_LIMITS, httpx.Limits()):
        assert theirs.keepalive_expiry is not None and theirs.keepalive_expiry < kept
