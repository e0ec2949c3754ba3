"""Refusals that have nothing to do with parameters: bodies, paths, methods, limits, the engine's own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from chairlift.engine.engine import EngineConfig
from chairlift.engine.request import Request
from chairlift.server.models.models import Models
from chairlift.server.settings import ServerSettings
from tests.fake_tokenizer import FakeTokenizer
from tests.fakes import FakeRunner, Fault, all_rows, answering
from tests.server.harness import CHAT, COMPLETIONS, MODEL, chat_body, error_of, lift, sse

GOOD = json.dumps(chat_body()).encode()
MESSAGE = b'{"model": "org/fake", "messages": [{"role": "user", "content": %s}]}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"hello",
        b"null",
        b"[]",
        b'"text"',
        b"3",
        GOOD + b"}",
        GOOD + GOOD,
        b"\xff\xfe" + GOOD,
        GOOD.decode().encode("utf-16"),
        MESSAGE % b'"\xff"',
        MESSAGE % b'"\xed\xa0\x80"',
        MESSAGE % b'"a\x00b"',
        MESSAGE % b'"a\nb"',
        b"\x00" + GOOD,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        MESSAGE % (b"[" * 70 + b"]" * 70),
        b'{"model": "org/fake", "temperature": NaN}',
        b'{"model": "org/fake", "temperature": -Infinity}',
        b'{"model": "org/fake", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "org/fake",}',
        b"{'model': 'org/fake'}",
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_bodies_that_are_no_json_object(path: str, body: bytes) -> None:
    async with lift() as server:
        error = error_of(await server.client.post(path, content=body), 400)
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (MESSAGE % rb'"a\ud800b"', "messages[0].content"),
        (MESSAGE % rb'[{"type": "text", "text": "\udfff"}]', "messages[0].content[0].text"),
        (rb'{"model": "\ud800"}', "model"),
        (rb'{"model": "org/fake", "stop": ["a", "\udc00"]}', "stop[1]"),
        (rb'{"\ud800": 1}', None),
        (b'{"model": "org/fake", "messages": [], "temperature": 1e400}', "temperature"),
        (b'{"model": "org/fake", "messages": [], "temperature": -1e400}', "temperature"),
        (b'{"model": "org/fake", "messages": [], "top_p": 1e-400}', "messages"),
        (b'{"messages": []}', "model"),
        (b"{}", "model"),
    ],
)
async def test_values_that_json_can_spell_and_nobody_can_serve(body: bytes, param: str | None) -> None:
    async with lift() as server:
        assert error_of(await server.client.post(CHAT, content=body), 400)["param"] == param


async def test_a_surrogate_pair_and_an_escaped_nul_are_characters() -> None:
    async with lift(FakeRunner(answering("ok"))) as server:
        for text, tokens in ((rb'"\ud83d\ude00"', 4), (rb'"\u0000"', 1)):
            response = await server.client.post(CHAT, content=MESSAGE % text)
            assert response.status_code == 200, response.text
            empty = await server.client.post(CHAT, content=MESSAGE % b'""')
            grown = response.json()["usage"]["prompt_tokens"] - empty.json()["usage"]["prompt_tokens"]
            assert grown == tokens


async def test_the_content_type_and_a_byte_order_mark_do_not_matter() -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"):
            response = await server.client.post(
                CHAT, content=b"\xef\xbb\xbf" + GOOD, headers={"Content-Type": kind}
            )
            assert response.status_code == 200


async def test_a_body_over_the_limit() -> None:
    limit, sent = len(GOOD) + 10, 0

    async def chunked() -> AsyncIterator[bytes]:
        nonlocal sent
        yield GOOD
        for _ in range(1000):
            yield b" "
            sent += 1

    async with lift(FakeRunner(answering("a")), settings=ServerSettings(max_body_bytes=limit)) as server:
        announced = await server.client.post(CHAT, content=GOOD + b" " * 11)
        assert error_of(announced, 413)["code"] == "request_too_large"
        assert error_of(await server.client.post(CHAT, content=chunked()), 413)["code"] == "request_too_large"
        assert sent <= 12  # nobody read to the end
        assert (await server.client.post(CHAT, content=GOOD + b" " * 10)).status_code == 200


async def test_unknown_models_and_paths() -> None:
    async with lift() as server:
        error = error_of(await server.chat(model="gpt-6"), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "gpt-6" in str(error["message"])
        assert error_of(await server.complete(model=""), 404)["code"] == "model_not_found"
        for path in ("/v1", "/v1/chat", "/v1/chat/completions//", "/v1/audio", "/v1/model"):
            assert error_of(await server.client.get(path), 404)["code"] == "unknown_url"
        long = await server.client.get("/" + "x" * 5000)
        assert len(str(error_of(long, 404)["message"])) < 300


@pytest.mark.parametrize(
    ("path", "allow"),
    [
        ("/", "GET, HEAD, OPTIONS"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/models/org/fake", "GET, HEAD, OPTIONS"),
        (CHAT, "POST, OPTIONS"),
        (COMPLETIONS, "POST, OPTIONS"),
        ("/health", "GET, HEAD, OPTIONS"),
        ("/health/ready", "GET, HEAD, OPTIONS"),
        ("/metrics", "GET, HEAD, OPTIONS"),
    ],
)
async def test_methods(path: str, allow: str) -> None:
    async with lift() as server:
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "BREW"):
            if method in allow:
                continue
            response = await server.client.request(method, path)
            assert response.status_code == 405
            if method != "HEAD":  # which has no body
                assert error_of(response, 405)["code"] == "method_not_allowed"
            assert response.headers["allow"] == allow
        options = await server.client.options(path)
        assert (options.status_code, options.headers["allow"], options.content) == (204, allow, b"")
        if "HEAD" in allow:
            assert (await server.client.head(path)).status_code == 200


async def test_a_full_queue() -> None:
    runner = FakeRunner()
    async with lift(runner, config=EngineConfig(max_num_seqs=1, max_waiting=0)) as server:
        runner.close_gate()
        async with server.engine.submit(Request("one", (97,))):
            response = await server.chat()
            error = error_of(response, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert int(response.headers["retry-after"]) >= 1
            stream = await server.chat(stream=True)
            assert error_of(stream, 429)["code"] == "queue_full"
            runner.open_gate()


async def test_before_the_model_is_loaded_and_after_the_end() -> None:
    async with lift(start=False) as server:
        for response in (await server.chat(), await server.complete()):
            error = error_of(response, 503)
            assert (error["type"], error["code"]) == ("server_error", "unavailable")
            assert response.headers["retry-after"] == "5"
        await server.engine.start()
        assert (await server.chat(max_tokens=1)).status_code == 200
        await server.engine.stop()
        for response in (await server.chat(), await server.client.get("/v1/models")):
            assert "shutting down" in str(error_of(response, 503)["message"])


async def test_a_failed_step() -> None:
    async with lift(FakeRunner(answering("abc"))) as server:
        server.runner.fail_next(Fault(fail=all_rows))
        error = error_of(await server.chat(), 500)
        assert (error["type"], error["code"]) == ("server_error", "engine_error")
        assert (await server.chat()).json()["choices"][0]["message"]["content"] == "abc"


async def test_a_failure_in_mid_stream_is_an_error_event_and_no_done() -> None:
    faults = iter((None, None, Fault(fail=all_rows)))
    async with lift(FakeRunner(answering("abcdef"))) as server:
        server.runner.fault = lambda plan: next(faults, None)
        response = await server.chat(stream=True)
        events = sse(response.text)
        *chunks, (name, data) = events
        assert name == "error"
        error = json.loads(data)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "engine_error"
        assert "[DONE]" not in response.text
        text = "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for _, chunk in chunks)
        assert text and "abcdef".startswith(text)


async def test_one_failed_choice_ends_the_stream_and_the_other_choices() -> None:
    async with lift() as server:
        server.runner.fail_next(Fault(fail=lambda plan: plan.rows[:1]))
        response = await server.complete(prompt=["a", "b"], max_tokens=4000, stream=True)
        assert [event for event, _ in sse(response.text)][-1] == "error"
        await server.until_idle()
        server.runner.fail_next(Fault(fail=lambda plan: plan.rows[:1]))
        error_of(await server.complete(prompt=["a", "b"], max_tokens=4000), 500)
        await server.until_idle()
        assert server.engine.stats().running == 0
        assert await server.metric('request_success_total{finished_reason="abort"}') == 2


class Broken(FakeTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if text == "boom":
            raise RuntimeError("secret/path/of/the/server")
        return super().encode(text, add_special_tokens=add_special_tokens)


async def test_what_nobody_foresaw_says_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    async with lift(tokenizer=Broken()) as server:
        response = await server.complete(prompt="boom")
        assert error_of(response, 500)["code"] == "internal_error"
        assert "secret" not in response.text and "RuntimeError" not in response.text
        assert "secret/path" in caplog.text  # the operator sees it, and whose it was
        assert response.headers["x-request-id"] in caplog.text
        assert (await server.complete(max_tokens=1)).status_code == 200


async def test_a_path_writes_no_lines_of_its_own_into_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Models, name: str) -> None:
        raise RuntimeError

    async with lift() as server:
        monkeypatch.setattr(Models, "find", broken)
        error_of(await server.client.get("/v1/models/a%0DINFO%20forged%1B[2J"), 500)
    (message,) = (message for message in caplog.messages if "failed (" in message)
    assert "/v1/models/a\\rINFO forged\\x1b[2J failed" in message and message.isprintable()


async def test_models() -> None:
    async with lift() as server:
        listed = (await server.client.get("/v1/models")).json()
        card = {
            "id": MODEL,
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "chairlift",
            "max_model_len": 4096,
            "input_modalities": ["text"],
            "aliases": [],
            "state": "loaded",
            "reason": None,
        }
        assert listed == {"object": "list", "data": [card]}
        for path in ("/v1/models/org/fake", "/v1/models/org%2Ffake"):
            assert (await server.client.get(path)).json() == card
        for path in ("/v1/models/fake", "/v1/models/org/fake//", "/v1/models//"):
            assert error_of(await server.client.get(path), 404)["code"] == "model_not_found"
