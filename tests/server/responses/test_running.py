"""Responses in the making: in the background, followed, cancelled, deleted, and left by their clients."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from chairlift.server.responses.answering import Answering
from chairlift.server.responses.database import Stored
from chairlift.server.settings import ResponsesSettings, ServerSettings
from tests.fakes import FakeRunner, Fault, all_rows, answering
from tests.server.harness import JSON, Lift, error_of, lift, on_socket
from tests.server.responses.asking import (
    RESPONSES,
    body,
    checked,
    checked_events,
    events_of,
    respond,
    response_of,
    stream_of,
)

PATIENCE = 10


async def get(server: Lift, id: object, **query: object) -> httpx.Response:
    return await server.client.get(f"{RESPONSES}/{id}", params=query)  # type: ignore[arg-type]


async def ended(server: Lift, id: object) -> JSON:
    async with asyncio.timeout(PATIENCE):
        while (response := (await get(server, id)).json())["status"] == "in_progress":
            await asyncio.sleep(0)
    return checked(response)


async def cancelled(server: Lift, id: object) -> JSON:
    answer = await server.client.post(f"{RESPONSES}/{id}/cancel")
    assert answer.status_code == 200, answer.text
    return checked(answer.json())


def counted(response: JSON) -> int:
    """Tokens of the answer."""
    usage = response["usage"]
    assert isinstance(usage, dict)
    return int(usage["output_tokens"])


@asynccontextmanager
async def streaming(server: Lift, method: str, path: str, **asked: object) -> AsyncIterator[Reader]:
    async with (
        on_socket(server.app) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client,
        client.stream(method, path, **asked) as response,  # type: ignore[arg-type]
    ):
        assert response.status_code == 200
        reader = Reader(response)
        async with aclosing(reader.lines):
            yield reader


class Reader:
    """The events of a stream as they come."""

    def __init__(self, response: httpx.Response) -> None:
        self.lines = response.aiter_lines()
        self.events: list[JSON] = []

    async def until(self, kind: str) -> JSON:
        async for line in self.lines:
            if line.startswith("data: "):
                self.events.append(json.loads(line.removeprefix("data: ")))
                if self.events[-1]["type"] == kind:
                    return self.events[-1]
        raise AssertionError(f"no {kind} came")

    async def rest(self) -> list[JSON]:
        async for line in self.lines:
            if line.startswith("data: "):
                self.events.append(json.loads(line.removeprefix("data: ")))
        return self.events


async def test_an_answer_in_the_background() -> None:
    async with lift(FakeRunner(answering("Hello!"))) as server:
        server.runner.close_gate()
        begun = await response_of(server, background=True)
        assert (begun["status"], begun["background"], begun["output"]) == ("in_progress", True, [])
        assert (await get(server, begun["id"])).json() == begun
        follow = error_of(await get(server, begun["id"], stream="true"), 400)
        assert follow["param"] == "stream"
        refused = error_of(await respond(server, previous_response_id=begun["id"]), 400)
        assert refused["param"] == "previous_response_id"
        items = await server.client.get(f"{RESPONSES}/{begun['id']}/input_items")
        assert len(items.json()["data"]) == 1
        server.runner.open_gate()
        done = await ended(server, begun["id"])
        assert done["status"] == "completed"
        assert done["output"][0]["content"][0]["text"] == "Hello!"  # type: ignore[index]
        after = await response_of(server, previous_response_id=begun["id"])
        assert after["usage"]["input_tokens"] > done["usage"]["input_tokens"]  # type: ignore[index]


async def test_a_failure_in_the_background_is_kept() -> None:
    async with lift(FakeRunner(answering("Hello!"))) as server:
        server.runner.fail_next(Fault(fail=all_rows))
        begun = await response_of(server, background=True)
        failed = await ended(server, begun["id"])
    assert failed["status"] == "failed"
    assert failed["error"] == {"code": "server_error", "message": "The fake failed this row."}


async def test_a_stream_in_the_background_outlives_its_reader_and_is_told_again() -> None:
    async with lift(FakeRunner(answering("Hello!"))) as server:
        server.runner.close_gate()
        asked = body(background=True, stream=True)
        async with streaming(server, "POST", RESPONSES, json=asked) as reader:
            created = await reader.until("response.in_progress")
        assert isinstance(created["response"], dict)
        id = created["response"]["id"]
        async with streaming(server, "GET", f"{RESPONSES}/{id}", params={"stream": "true"}) as reader:
            await reader.until("response.in_progress")
            server.runner.open_gate()
            whole = checked_events(await reader.rest())
        done = await ended(server, id)
        assert whole[-1]["response"] == done
        # The same again once it is kept, from any event on.
        assert events_of(await get(server, id, stream="true")) == whole
        late = await get(server, id, stream="true", starting_after=4)
        numbers = [
            json.loads(line.removeprefix("data: "))["sequence_number"]
            for line in late.text.splitlines()
            if line.startswith("data: ")
        ]
        assert numbers == list(range(5, len(whole)))
        beyond = await get(server, id, stream="true", starting_after=1000)
        assert beyond.status_code == 200 and "data:" not in beyond.text


async def test_whose_events_can_be_told_again() -> None:
    async with lift(FakeRunner(answering("Hello!"))) as server:
        for more in ({}, {"background": True}):
            made = await response_of(server, **more)
            await ended(server, made["id"])
            assert error_of(await get(server, made["id"], stream="true"), 400)["param"] == "stream"
        error_of(await get(server, "resp_0", stream="true"), 404)
        for query, param in (
            ({"stream": "yes"}, "stream"),
            ({"starting_after": 1}, "starting_after"),
            ({"stream": "true", "starting_after": -1}, "starting_after"),
            ({"include": "banana"}, "include"),
            ({"banana": 1}, "banana"),
        ):
            assert error_of(await get(server, made["id"], **query), 400)["param"] == param  # type: ignore[arg-type]
        again = await get(server, made["id"], stream="false", include="message.output_text.logprobs")
        assert again.status_code == 200


async def test_cancelling_in_the_background() -> None:
    async with lift() as server:
        begun = await response_of(server, background=True, max_output_tokens=4000)
        async with asyncio.timeout(PATIENCE):
            while not server.engine.stats().running:
                await asyncio.sleep(0)
        response = await cancelled(server, begun["id"])
        assert response["status"] == "cancelled"
        await server.until_idle()
        assert (await get(server, begun["id"])).json() == response
        assert await cancelled(server, begun["id"]) == response
        assert counted(response) == server.engine.stats().generation_tokens < 4000
        # What it had said is there to be gone on with.
        await response_of(server, previous_response_id=begun["id"], max_output_tokens=1)


async def test_cancelling_a_stream() -> None:
    async with lift() as server:
        asked = body(stream=True, max_output_tokens=4000)
        async with streaming(server, "POST", RESPONSES, json=asked) as reader:
            created = await reader.until("response.created")
            assert isinstance(created["response"], dict)
            id = created["response"]["id"]
            await reader.until("response.output_text.delta")
            making = (await get(server, id)).json()
            assert making["status"] == "in_progress"
            response = await cancelled(server, id)
            events = checked_events(await reader.rest())
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"] == response
        assert response["status"] == "cancelled"
        assert response["output"][0]["status"] == "incomplete"  # type: ignore[index]
        assert 0 < counted(response) == server.engine.stats().generation_tokens
        assert (await get(server, id)).json() == response


async def test_what_is_not_kept_is_seen_by_nobody_and_can_be_cancelled() -> None:
    async with lift() as server:
        asked = body(stream=True, store=False, max_output_tokens=4000)
        async with streaming(server, "POST", RESPONSES, json=asked) as reader:
            created = await reader.until("response.created")
            assert isinstance(created["response"], dict)
            id = created["response"]["id"]
            error_of(await get(server, id), 404)
            error_of(await server.client.delete(f"{RESPONSES}/{id}"), 404)
            assert (await cancelled(server, id))["status"] == "cancelled"
            assert checked_events(await reader.rest())[-1]["type"] == "response.incomplete"
        error_of(await get(server, id), 404)


async def test_what_cannot_be_cancelled() -> None:
    async with lift(FakeRunner(answering("a"))) as server:
        made = await response_of(server)
        error = error_of(await server.client.post(f"{RESPONSES}/{made['id']}/cancel"), 400)
        assert error["message"] == "Cannot cancel a response that is completed."
        error_of(await server.client.post(f"{RESPONSES}/resp_0/cancel"), 404)


async def test_deleting_what_is_in_the_making() -> None:
    async with lift() as server:
        begun = await response_of(server, background=True, max_output_tokens=4000)
        deleted = await server.client.delete(f"{RESPONSES}/{begun['id']}")
        assert deleted.json()["deleted"] is True
        await server.until_idle()
        async with asyncio.timeout(PATIENCE):
            while server.app.state.context.responses._running:
                await asyncio.sleep(0)
        error_of(await get(server, begun["id"]), 404)


async def test_deleting_what_is_about_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, deleted = threading.Event(), threading.Event()
    stored = Answering._stored

    def slowly(self: Answering, response: JSON) -> Stored:
        begun.set()
        assert deleted.wait(PATIENCE)
        return stored(self, response)

    monkeypatch.setattr(Answering, "_stored", slowly)
    async with lift(FakeRunner(answering("a"))) as server:
        asked = body(stream=True)
        async with streaming(server, "POST", RESPONSES, json=asked) as reader:
            created = await reader.until("response.created")
            assert isinstance(created["response"], dict)
            id = created["response"]["id"]
            assert await asyncio.to_thread(begun.wait, PATIENCE)
            assert (await server.client.delete(f"{RESPONSES}/{id}")).json()["deleted"] is True
            deleted.set()
            await reader.rest()
        error_of(await get(server, id), 404)


async def test_a_client_that_leaves_a_stream() -> None:
    async with lift() as server:
        asked = body(stream=True, max_output_tokens=4000)
        async with streaming(server, "POST", RESPONSES, json=asked) as reader:
            created = await reader.until("response.created")
            await reader.until("response.output_text.delta")
        await server.until_idle()
        assert server.engine.stats().generation_tokens < 4000
        assert isinstance(created["response"], dict)
        left = (await get(server, created["response"]["id"])).json()
        assert checked(left)["status"] == "cancelled"
        assert left["output"][0]["content"][0]["text"]
        assert 0 < counted(left) == server.engine.stats().generation_tokens
        assert server.app.state.context.responses._running == {}


async def test_a_client_that_leaves_a_whole_response() -> None:
    async with lift() as server, on_socket(server.app) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            asking = asyncio.create_task(client.post(RESPONSES, json=body(max_output_tokens=4000)))
            async with asyncio.timeout(PATIENCE):
                while not server.engine.stats().running:
                    await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        await server.until_idle()
        assert server.engine.stats().generation_tokens < 4000
        assert server.app.state.context.responses._running == {}


async def test_a_server_that_stops_ends_what_it_answers(tmp_path: Path) -> None:
    settings = ServerSettings(responses=ResponsesSettings(path=tmp_path / "responses.sqlite"))
    async with lift(settings=settings) as server:
        begun = await response_of(server, background=True, max_output_tokens=4000)
    async with lift(settings=settings) as server:
        failed = (await get(server, begun["id"])).json()
    assert checked(failed)["status"] == "failed"
    assert failed["error"]["message"] == "The model is shutting down."


async def test_a_fault_of_ours_ends_a_stream_well(monkeypatch: pytest.MonkeyPatch) -> None:
    from chairlift.server.responses.encoder import ResponseEncoder

    def broken(self: ResponseEncoder, event: object) -> list[JSON]:
        raise KeyError("a secret")

    monkeypatch.setattr(ResponseEncoder, "add", broken)
    async with lift(FakeRunner(answering("Hello!"))) as server:
        events = await stream_of(server)
        failed = events[-1]["response"]
        assert isinstance(failed, dict)
        assert failed["error"] == {
            "code": "server_error",
            "message": "The server had an error while answering.",
        }
        error = error_of(await respond(server), 500)
        assert "secret" not in json.dumps([events, error])
        await server.until_idle()
        assert server.runner.rows == {}
