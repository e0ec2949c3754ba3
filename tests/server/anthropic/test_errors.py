"""Refusals in Anthropic's envelope, also of what no route has seen."""

from __future__ import annotations

import pytest

from chairlift.engine.engine import EngineConfig
from chairlift.engine.request import Request
from chairlift.server.settings import ServerSettings
from tests.fake_tokenizer import FakeTokenizer
from tests.fakes import FakeRunner, Fault, all_rows, answering
from tests.server.anthropic.asking import COUNT, MESSAGES_PATH, ask, events_of, refusal
from tests.server.harness import MODEL, error_of, lift

VERSION = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize("path", [MESSAGES_PATH, COUNT, MESSAGES_PATH + "?beta=true"])
async def test_bodies_that_are_no_json_object(path: str) -> None:
    async with lift() as server:
        for body in (b"", b"{", b"[]", b"\xff", b'{"model": NaN}', b"[" * 100_000, b'{"a": "\\ud800"}'):
            error = refusal(await server.client.post(path, content=body), 400)
            assert error["type"] == "invalid_request_error"


async def test_a_body_over_the_limit() -> None:
    async with lift(settings=ServerSettings(max_body_bytes=100)) as server:
        error = refusal(await server.client.post(MESSAGES_PATH, content=b" " * 101), 413)
        assert error["type"] == "request_too_large"


async def test_other_methods_and_paths() -> None:
    async with lift() as server:
        for path in (MESSAGES_PATH, COUNT):
            wrong = await server.client.get(path)
            assert refusal(wrong, 405)["type"] == "invalid_request_error"
            assert wrong.headers["allow"] == "POST, OPTIONS"
            options = await server.client.options(path)
            assert (options.status_code, options.headers["allow"]) == (204, "POST, OPTIONS")
        for path in ("/v1/messages/batches", "/v1/messages//"):
            assert refusal(await server.client.post(path, json={}), 404)["type"] == "not_found_error"
        # Elsewhere the header tells whose client it is.
        unknown = await server.client.get("/v1/files", headers=VERSION)
        assert refusal(unknown, 404)["type"] == "not_found_error"
        assert error_of(await server.client.get("/v1/files"), 404)["code"] == "unknown_url"
        assert error_of(await server.client.get("/v1/messagesx"), 404)["code"] == "unknown_url"


async def test_unknown_models() -> None:
    async with lift() as server:
        for path in (MESSAGES_PATH, COUNT):
            error = refusal(await ask(server, path, model="claude"), 404)
            assert error["type"] == "not_found_error" and "claude" in str(error["message"])
        missing = await server.client.get("/v1/models/claude", headers=VERSION)
        assert refusal(missing, 404)["type"] == "not_found_error"


async def test_models_in_the_form_of_who_asks() -> None:
    async with lift() as server:
        plain = await server.client.get("/v1/models")
        assert plain.json()["object"] == "list" and "request-id" not in plain.headers
        listed = await server.client.get("/v1/models", headers=VERSION)
        assert listed.headers["request-id"].startswith("req_")
        card = {
            "type": "model",
            "id": MODEL,
            "display_name": MODEL,
            "created_at": "2023-11-14T22:13:20Z",
            "max_input_tokens": 4096,
            "max_tokens": 4096,
            "lifecycle": "active",
            "line": None,
            "deprecated_at": None,
            "retires_at": None,
            "capabilities": None,
        }
        assert listed.json() == {"data": [card], "has_more": False, "first_id": MODEL, "last_id": MODEL}
        one = await server.client.get(f"/v1/models/{MODEL}", headers=VERSION)
        assert one.json() == card
        after = await server.client.get("/v1/models", params={"after_id": MODEL}, headers=VERSION)
        assert after.json() == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize("headers", [{"x-api-key": "k"}, {"Authorization": "Bearer k"}, {}])
async def test_any_key_passes(headers: dict[str, str]) -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
        response = await server.client.post(MESSAGES_PATH, json=body, headers={**headers, **VERSION})
        assert response.status_code == 200
        assert response.headers["request-id"].startswith("req_")
        assert response.headers["x-request-id"] == response.json()["id"]


async def test_a_full_queue_and_no_model() -> None:
    runner = FakeRunner()
    async with lift(runner, config=EngineConfig(max_num_seqs=1, max_waiting=0), start=False) as server:
        for path in (MESSAGES_PATH, COUNT):
            assert refusal(await ask(server, path), 529)["type"] == "overloaded_error"
        await server.engine.start()
        runner.close_gate()
        async with server.engine.submit(Request("one", (97,))):
            for stream in (False, True):
                response = await ask(server, stream=stream)
                assert refusal(response, 429)["type"] == "rate_limit_error"
                assert int(response.headers["retry-after"]) >= 1
            runner.open_gate()


async def test_a_prompt_that_is_too_long_can_be_counted() -> None:
    async with lift(context_length=50) as server:
        messages = [{"role": "user", "content": "a" * 100}]
        error = refusal(await ask(server, messages=messages), 400)
        assert error["type"] == "invalid_request_error" and "context" in str(error["message"])
        assert (await ask(server, COUNT, messages=messages)).json()["input_tokens"] > 100


async def test_what_the_template_refuses() -> None:
    async with lift(tokenizer=FakeTokenizer(refuse="Roles must alternate.")) as server:
        for path in (MESSAGES_PATH, COUNT):
            assert "Roles must alternate." in str(refusal(await ask(server, path), 400)["message"])


async def test_images_for_a_model_of_text() -> None:
    async with lift() as server:
        image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        messages = [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [image]}]},
        ]
        error = refusal(await ask(server, system="s", messages=messages), 400)
        assert "messages[1].content[0].content[0] is an image" in str(error["message"])


async def test_a_refused_thread_tells_the_sdk_to_go_on_without() -> None:
    async with lift() as server:
        error = refusal(await ask(server, thread={"type": "create"}), 400)
        assert error["details"] == {"error_code": "thread_unsupported_request"}
        assert "details" not in refusal(await ask(server, container="c"), 400)


async def test_a_failed_step() -> None:
    async with lift(FakeRunner(answering("abc"))) as server:
        server.runner.fail_next(Fault(fail=all_rows))
        assert refusal(await ask(server), 500)["type"] == "api_error"
        assert (await ask(server)).json()["content"] == [{"type": "text", "text": "abc"}]


async def test_a_failure_in_mid_stream_is_an_error_event() -> None:
    faults = iter((None, None, Fault(fail=all_rows)))
    async with lift(FakeRunner(answering("abcdef"))) as server:
        server.runner.fault = lambda plan: next(faults, None)
        response = await ask(server, stream=True)
        *events, last = events_of(response)
        assert last["type"] == "error" and last["request_id"] == response.headers["request-id"]
        assert last["error"]["type"] == "api_error"  # type: ignore[index]
        assert [event["type"] for event in events][:2] == ["message_start", "content_block_start"]
        assert "message_stop" not in response.text
        await server.until_idle()
        assert await server.metric('request_success_total{finished_reason="error"}') == 1


class Broken(FakeTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if "boom" in text:
            raise RuntimeError("secret/path/of/the/server")
        return super().encode(text, add_special_tokens=add_special_tokens)


async def test_what_nobody_foresaw_says_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    async with lift(tokenizer=Broken()) as server:
        thinking = {"type": "thinking", "thinking": "boom", "signature": ""}
        edit = {"type": "clear_thinking_20251015"}
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [thinking, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{**thinking, "thinking": "c"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "a"},
        ]
        response = await ask(server, messages=messages, context_management={"edits": [edit]})
        assert refusal(response, 500)["type"] == "api_error"
        assert "secret" not in response.text and "RuntimeError" not in response.text
        assert "secret/path" in caplog.text  # the operator sees it
