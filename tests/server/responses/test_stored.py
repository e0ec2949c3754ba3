"""What is kept: conversations that go on, retrieval, deletion, items, and what is not kept."""

from __future__ import annotations

from pathlib import Path

from chairlift.engine.engine import Engine
from chairlift.server.metrics import ServerMetrics
from chairlift.server.responses.database import Bounds, ResponseDatabase, Stored
from chairlift.server.serve import listen, serve_models
from chairlift.server.settings import ResponsesSettings, ServerSettings
from tests.fakes import FakeRunner, answering, fake_model
from tests.server.given_engines import models_of
from tests.server.harness import JSON, Lift, error_of, lift
from tests.server.responses.asking import (
    RESPONSES,
    Recorder,
    checked,
    checked_item,
    respond,
    response_of,
    stream_of,
)


def keeping(**more: object) -> ServerSettings:
    return ServerSettings(responses=ResponsesSettings(**more))  # type: ignore[arg-type]


async def retrieved(server: Lift, id: object) -> JSON:
    response = await server.client.get(f"{RESPONSES}/{id}")
    assert response.status_code == 200, response.text
    return checked(response.json())


async def is_gone(server: Lift, id: object) -> bool:
    error_of(await server.client.get(f"{RESPONSES}/{id}/input_items"), 404)
    return error_of(await server.client.get(f"{RESPONSES}/{id}"), 404)["param"] == "response_id"


async def items_of(server: Lift, id: object, **query: str | int) -> JSON:
    response = await server.client.get(f"{RESPONSES}/{id}/input_items", params=query)
    assert response.status_code == 200, response.text
    page: JSON = response.json()
    data = page["data"]
    assert isinstance(data, list)
    for item in data:
        checked_item(item)
    assert page["first_id"] == (data[0]["id"] if data else None)
    assert page["last_id"] == (data[-1]["id"] if data else None)
    return page


async def test_a_conversation_goes_on() -> None:
    tokenizer = Recorder()
    async with lift(FakeRunner(answering("Hello!")), tokenizer=tokenizer) as server:
        first = await response_of(server, instructions="Be kind.", input="Hi")
        second = (await stream_of(server, input="And?", previous_response_id=first["id"]))[-1]["response"]
        assert isinstance(second, dict)
        third = await response_of(
            server,
            instructions="Be brief.",
            input=[{"role": "user", "content": "So?"}],
            previous_response_id=second["id"],
        )
        assert third["previous_response_id"] == second["id"]
    assert [[(m["role"], m["content"]) for m in c] for c in tokenizer.conversations] == [
        [("system", "Be kind."), ("user", "Hi")],
        [("user", "Hi"), ("assistant", "Hello!"), ("user", "And?")],
        [
            ("system", "Be brief."),
            *(("user", "Hi"), ("assistant", "Hello!"), ("user", "And?"), ("assistant", "Hello!")),
            ("user", "So?"),
        ],
    ]


async def test_a_conversation_may_branch() -> None:
    tokenizer = Recorder()
    async with lift(FakeRunner(answering("Hello!")), tokenizer=tokenizer) as server:
        first = await response_of(server)
        for text in ("left", "right"):
            await response_of(server, input=text, previous_response_id=first["id"])
        empty = await response_of(server, input=[], previous_response_id=first["id"])
        assert empty["status"] == "completed"
    assert [[m["content"] for m in c] for c in tokenizer.conversations[1:]] == [
        ["Hi", "Hello!", "left"],
        ["Hi", "Hello!", "right"],
        ["Hi", "Hello!"],
    ]


async def test_retrieval_and_deletion() -> None:
    async with lift(FakeRunner(answering("Hello!"))) as server:
        response = await response_of(server)
        streamed = (await stream_of(server))[-1]["response"]
        assert isinstance(streamed, dict)
        for made in (response, streamed):
            assert await retrieved(server, made["id"]) == made
        after = await response_of(server, previous_response_id=response["id"])
        deleted = await server.client.delete(f"{RESPONSES}/{response['id']}")
        assert deleted.json() == {"id": response["id"], "object": "response", "deleted": True}
        assert await is_gone(server, response["id"])
        error_of(await server.client.delete(f"{RESPONSES}/{response['id']}"), 404)
        refused = error_of(await respond(server, previous_response_id=response["id"]), 400)
        assert (refused["param"], refused["code"]) == (
            "previous_response_id",
            "previous_response_not_found",
        )
        # What came of it is whole.
        page = await items_of(server, after["id"], order="asc")
        assert [item["role"] for item in page["data"]] == ["user", "assistant", "user"]  # type: ignore[attr-defined]


async def test_what_is_not_to_be_kept_is_not() -> None:
    async with lift(FakeRunner(answering("Hello!"))) as server:
        response = await response_of(server, store=False)
        streamed = (await stream_of(server, store=False))[-1]["response"]
        assert isinstance(streamed, dict)
        for made in (response, streamed):
            assert made["store"] is False
            assert await is_gone(server, made["id"])


async def test_a_server_that_keeps_nothing() -> None:
    async with lift(FakeRunner(answering("Hello!")), settings=keeping(keep=False)) as server:
        response = await response_of(server)
        assert response["store"] is False
        assert await is_gone(server, response["id"])
        error_of(await server.client.delete(f"{RESPONSES}/{response['id']}"), 404)
        error_of(await server.client.post(f"{RESPONSES}/{response['id']}/cancel"), 404)
        for more, param in (
            ({"store": True}, "store"),
            ({"background": True}, "background"),
            ({"previous_response_id": response["id"]}, "previous_response_id"),
            ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ):
            assert error_of(await respond(server, **more), 400)["param"] == param  # type: ignore[arg-type]


async def test_input_items() -> None:
    given: list[JSON] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}], "type": "message"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
        {"role": "assistant", "content": "b", "phase": "commentary"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "done"}],
        },
        {"role": "user", "content": "c", "id": "msg_mine"},
    ]
    async with lift(FakeRunner(answering("d"))) as server:
        response = await response_of(server, input=given)
        page = await items_of(server, response["id"], order="asc")
        data = page["data"]
        assert isinstance(data, list)
        kinds = ["message", "message", "reasoning", "message", "function_call", "function_call_output"]
        assert [item["type"] for item in data] == [
            *kinds,
            "custom_tool_call",
            "custom_tool_call_output",
            "message",
        ]
        assert all(item["status"] == "completed" for item in data)
        assert data[0]["content"] == [{"type": "input_text", "text": "Be kind."}]
        assert data[2]["id"] == "rs_1" and data[2]["encrypted_content"] == "gAAA"
        assert data[3]["content"] == [{"type": "output_text", "text": "b", "annotations": []}]
        assert data[3]["phase"] == "commentary"
        assert data[8]["id"] == "msg_mine"
        ids = [item["id"] for item in data]
        assert len(set(ids)) == 9
        # They come back as they are.
        again = await response_of(server, input=data)
        assert (await items_of(server, again["id"], order="asc"))["data"] == data

        assert [item["id"] for item in (await items_of(server, response["id"]))["data"]] == ids[::-1]  # type: ignore[attr-defined]
        seen: list[object] = []
        after: dict[str, str] = {}
        while True:
            page = await items_of(server, response["id"], order="asc", limit=4, **after)
            seen += [item["id"] for item in page["data"]]  # type: ignore[attr-defined]
            if not page["has_more"]:
                break
            after = {"after": str(page["last_id"])}
        assert seen == ids
        end = await items_of(server, response["id"], order="asc", after=ids[-1])
        assert end["data"] == [] and end["has_more"] is False
        for query, param in (
            ("limit=0", "limit"),
            ("limit=101", "limit"),
            ("limit=x", "limit"),
            ("order=up", "order"),
            ("after=msg_0", "after"),
            ("before=msg_0", "before"),
            ("include=banana", "include"),
        ):
            url = f"{RESPONSES}/{response['id']}/input_items?{query}"
            assert error_of(await server.client.get(url), 400)["param"] == param


async def test_many_items_come_in_pages_of_twenty() -> None:
    given = [{"role": "user", "content": str(number)} for number in range(30)]
    async with lift(FakeRunner(answering("a"))) as server:
        response = await response_of(server, input=given)
        page = await items_of(server, response["id"])
        assert len(page["data"]) == 20 and page["has_more"] is True  # type: ignore[arg-type]


async def test_references_to_items() -> None:
    tokenizer = Recorder()
    async with lift(FakeRunner(answering("Hello!")), tokenizer=tokenizer) as server:
        first = await response_of(server)
        asked = (await items_of(server, first["id"]))["data"][0]["id"]  # type: ignore[index]
        answered = first["output"][0]["id"]  # type: ignore[index]
        await response_of(
            server,
            input=[
                {"type": "item_reference", "id": asked},
                {"id": answered},
                {"role": "user", "content": "Go on."},
            ],
        )
        assert [m["content"] for m in tokenizer.conversations[-1]] == ["Hi", "Hello!", "Go on."]
        # An id that a client made up may be another client's, too.
        await response_of(server, input=[{"role": "user", "content": "secret", "id": "msg_1"}])
        error = error_of(await respond(server, input=[{"type": "item_reference", "id": "msg_1"}]), 400)
        assert (error["param"], error["code"]) == ("input[0].id", "item_not_found")


async def test_a_file_outlives_the_server_and_serves_two(tmp_path: Path) -> None:
    settings = keeping(path=tmp_path / "responses.sqlite")
    async with lift(FakeRunner(answering("Hello!")), settings=settings) as one:
        response = await response_of(one)
        async with lift(FakeRunner(answering("Yes.")), settings=settings) as two:
            after = await response_of(two, previous_response_id=response["id"])
            assert await retrieved(one, after["id"]) == after
    async with lift(FakeRunner(answering("a")), settings=settings) as later:
        assert await retrieved(later, response["id"]) == response
        page = await items_of(later, after["id"], order="asc")
        assert [item["role"] for item in page["data"]] == ["user", "assistant", "user"]  # type: ignore[attr-defined]


async def test_what_was_answered_by_a_server_that_died(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    async with lift(FakeRunner(answering("a")), settings=keeping(path=path)) as server:
        response = await response_of(server, background=True)
    kept = ResponseDatabase(path, Bounds(100, 10**9, 1e9))
    body = {**response, "id": "resp_dead", "status": "in_progress"}
    del body["output"]
    kept.put("resp_dead", Stored(body, (), (), owner="somebody"))
    kept.put("resp_dying", Stored({**body, "id": "resp_dying"}, (), (), owner="somebody"))
    kept.put("resp_alive", Stored({**body, "id": "resp_alive"}, (), (), owner="neighbour"))
    kept.seen("neighbour")
    kept.close()
    async with lift(FakeRunner(answering("a")), settings=keeping(path=path)) as server:
        dead = await retrieved(server, "resp_dead")
        assert dead["status"] == "failed"
        assert dead["error"] == {
            "code": "server_error",
            "message": "The server stopped while it was answering.",
        }
        assert (await retrieved(server, "resp_dead"))["status"] == "failed"
        assert (await retrieved(server, "resp_alive"))["status"] == "in_progress"
        assert (await response_of(server, previous_response_id="resp_dying"))["status"] == "completed"
        refused = await respond(server, previous_response_id="resp_alive")
        assert error_of(refused, 400)["param"] == "previous_response_id"
        error_of(await server.client.post(f"{RESPONSES}/resp_alive/cancel"), 409)


async def test_a_response_too_large_for_the_store_says_so() -> None:
    async with lift(FakeRunner(answering("a")), settings=keeping(max_bytes=3000)) as server:
        small = await response_of(server)
        assert small["store"] is True
        large = await response_of(server, input="x" * 3500)
        assert large["store"] is False
        assert await is_gone(server, large["id"])


async def test_a_store_that_fails(tmp_path: Path) -> None:
    """The answer is given and says that it is not kept; what needs the store is a 500 without a path."""
    path = tmp_path / "folder"
    path.mkdir()
    async with lift(FakeRunner(answering("a")), settings=keeping(path=path)) as server:
        assert (await response_of(server))["store"] is False
        error = error_of(await server.client.get(f"{RESPONSES}/resp_1"), 500)
        assert (error["code"], error["message"]) == ("store_error", "The store of responses failed.")
        error_of(await respond(server, background=True), 500)
        await server.until_idle()
        assert server.engine.stats().running == 0


async def test_a_store_that_cannot_be_opened_is_said_at_the_start(tmp_path: Path) -> None:
    complaints: list[str] = []
    announced: list[object] = []
    with listen("127.0.0.1", 0) as listener:
        metrics = ServerMetrics()
        code = await serve_models(
            models_of(metrics, Engine(fake_model())),
            listener,
            announced.append,
            complaints.append,
            metrics=metrics,
            settings=keeping(path=tmp_path),
            drain_timeout=0,
        )
    assert (code, announced) == (1, [])
    assert len(complaints) == 1 and str(tmp_path) in complaints[0] and "\n" not in complaints[0]
