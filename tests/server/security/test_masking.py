"""What is in a log, and what never is."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from chairlift.server.configuration.types import LogFormat
from chairlift.server.observe.logs import set_up_logging
from chairlift.server.observe.settings import ObserveSettings
from chairlift.server.security.keys import KeySources
from chairlift.server.security.masking import MASK, MaskedFormatter, SecretMask, mask_logs
from chairlift.server.settings import ServerSettings
from tests.fakes import FakeRunner, Fault, answering
from tests.server.harness import CHAT, MODEL, chat_body, lift, on_socket
from tests.server.security.keyring import ALICE, ROOT, bearer, secured

STRANGE = "Str/ange+key~0123=="
OTHERS = "sk-proj-0123456789abcdefABCDEF_-"
"""A key for something else, sent by mistake."""
KEYS = KeySources(api_keys=(f"alice:{ALICE}", STRANGE), admin_keys=(ROOT,))
SECRET_TEXT = "the-password-is-swordfish"


@pytest.fixture(params=[LogFormat.JSON, LogFormat.PRETTY])
def log(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """All that a server with these keys would log, at the lowest level."""
    root, access = logging.getLogger(), logging.getLogger("chairlift.access")
    before = root.handlers[:], root.level, access.level
    stream = io.StringIO()
    set_up_logging("debug", request.param, access_log=True, file=logging.StreamHandler(stream))
    mask = SecretMask()
    mask.learn(given.secret for given in KEYS.given())
    mask_logs(mask)
    yield stream
    root.handlers[:], level, access_level = before
    root.setLevel(level)
    access.setLevel(access_level)
    logging.captureWarnings(False)


def settings(*, log_prompts: bool = False) -> ServerSettings:
    observe = ObserveSettings(access_log=True, log_prompts=log_prompts)
    return replace(secured(KEYS), observe=observe)


async def test_keys_are_in_no_line(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent rightly, wrongly, in a URL, in a body, and with a failure that tells them all."""
    async with (
        lift(FakeRunner(answering("a")), settings=settings()) as server,
        on_socket(server.app) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        for key in (ALICE, STRANGE, ROOT, OTHERS):
            for headers in (bearer(key), {"x-api-key": key}, {"Authorization": key}, {"Cookie": key}):
                await client.post(CHAT, json=chat_body(), headers=headers)
                await client.get("/v1/models", params={"api_key": key, key: "1"}, headers=headers)
                await client.get(f"/v1/models/{key}", headers=headers)
                await client.post(CHAT, content=key, headers=headers)
                await client.post(CHAT, json={**chat_body(), key: key}, headers=headers)

        def fail(*given: object) -> None:
            raise RuntimeError(f"{bearer(ALICE)} x-api-key={STRANGE!r} {ROOT} {OTHERS}")

        with monkeypatch.context() as broken:
            broken.setattr("chairlift.server.routes.models.context_of", fail)
            failed = await client.get("/v1/models", headers=bearer(ALICE))
        assert failed.status_code == 500
    written = log.getvalue()
    assert "RuntimeError" in written and MASK in written and "alice" in written and "401" in written
    for key in (ALICE, STRANGE, ROOT, OTHERS, "Str%2Fange"):
        assert key not in written


async def test_what_is_asked_and_answered_is_in_no_line(log: io.StringIO) -> None:
    """Values, that is; the name of a parameter that there is not is told."""
    text = SECRET_TEXT
    messages = [{"role": "user", "content": text}]
    bodies = [
        (CHAT, chat_body(messages=messages)),
        (CHAT, chat_body(messages=messages, stream=True)),
        (CHAT, chat_body(messages=messages, temperature=9)),
        (CHAT, {**chat_body(), "unknown": text}),
        (CHAT, chat_body(model=text)),
        (CHAT, chat_body(messages=[{"role": "user", "content": {"x": text}}])),
        ("/v1/completions", {"model": MODEL, "prompt": text}),
        ("/v1/responses", {"model": MODEL, "input": text}),
        ("/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": messages}),
        ("/v1/messages", {"model": text, "max_tokens": 9, "messages": messages}),
        ("/tokenize", {"prompt": text}),
    ]
    runner = FakeRunner(answering(text))
    async with lift(runner, settings=settings()) as server:
        for path, body in bodies:
            await server.client.post(path, json=body, headers=bearer(ALICE))
        await server.client.post(CHAT, content=json.dumps(chat_body(messages=messages))[:-1] + text)
        runner.fail_next(Fault(RuntimeError("the step broke")))
        await server.client.post(CHAT, json=bodies[0][1], headers=bearer(ALICE))
    written = log.getvalue()
    assert "chat/completions" in written and "alice" in written
    assert text not in written and "swordfish" not in written


async def test_unless_that_is_wanted(log: io.StringIO) -> None:
    messages = [{"role": "user", "content": f"{SECRET_TEXT} {ALICE}"}]
    async with lift(FakeRunner(answering("a")), settings=settings(log_prompts=True)) as server:
        await server.client.post(CHAT, json=chat_body(messages=messages), headers=bearer(ALICE))
    assert SECRET_TEXT in log.getvalue() and ALICE not in log.getvalue()


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"key {ALICE} and {STRANGE}", "key [key] and [key]"),
        ("q=Str%2Fange%2Bkey~0123%3D%3D&b=1", "q=[key]&b=1"),
        ("Authorization: Bearer abcdef123", "Authorization: Bearer [key]"),
        ("'x-api-key': 'abcd1234'", "'x-api-key': '[key]'"),
        ('{"api_key": "abcd1234"}', '{"api_key": "[key]"}'),
        ("?api_key=abcd1234&x=1", "?api_key=[key]&x=1"),
        (f"see {OTHERS}.", "see [key]."),
        (
            "tokens=512 key=alice max_tokens: 4096 task-force",
            "tokens=512 key=alice max_tokens: 4096 task-force",
        ),
        ("Keys were read again: alice, key-1", "Keys were read again: alice, key-1"),
    ],
)
def test_what_is_masked(text: str, masked: str) -> None:
    mask = SecretMask()
    mask.learn((ALICE, STRANGE))
    assert mask(text) == masked


def test_what_was_learnt_is_replaced() -> None:
    mask = SecretMask()
    assert mask("plain-word-1") == "plain-word-1"
    mask.learn(["plain-word-1"])
    assert mask("plain-word-1") == MASK
    mask.learn([])
    assert mask("plain-word-1") == "plain-word-1"


def test_the_mask_is_laid_once() -> None:
    root = logging.getLogger()
    handler = logging.StreamHandler(io.StringIO())
    root.addHandler(handler)
    try:
        mask_logs(SecretMask())
        mask_logs(SecretMask())
        assert isinstance(handler.formatter, MaskedFormatter)
        assert not isinstance(handler.formatter.inner, MaskedFormatter)
    finally:
        root.removeHandler(handler)
