"""Several models in one process, over HTTP: found by name, loaded on demand, unloaded for others."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.engine.embedding.types import BatchCost
from chairlift.engine.engine import EngineConfig
from chairlift.engine.errors import EngineStopped, ModelUnavailable
from chairlift.engine.memory.guard import LEAST_CACHE, SPARE
from chairlift.server.models.model import Use
from chairlift.server.models.models import UNLOADED
from tests.fakes import FakeRunner, answering
from tests.server.harness import CHAT, chat_body, error_of, on_socket
from tests.server.models.fleet import Fake, fleet
from tests.server.test_disconnect import connection

VECTOR = "/v1/embeddings"
SAID = [{"role": "user", "content": "Hi"}]


async def test_a_request_is_answered_by_the_model_that_it_names() -> None:
    async with fleet(Fake("a", at_start=True, aliases=("gpt-4",)), Fake("b", at_start=True)) as lift:
        assert [await lift.says(name) for name in ("a", "b", "gpt-4")] == ["a", "b", "a"]
        body = {"model": "b", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
        message = (await lift.client.post("/v1/messages", json=body)).json()
        assert (message["model"], message["content"][0]["text"]) == ("b", "b")
        response = (await lift.client.post("/v1/responses", json={"model": "b", "input": "Hi"})).json()
        assert response["output"][0]["content"][0]["text"] == "b"
        completion = (await lift.client.post("/v1/completions", json={"model": "b", "prompt": "Hi"})).json()
        assert completion["choices"][0]["text"] == "b"
        for path, more in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("/v1/completions", {"prompt": "Hi"}),
            ("/v1/responses", {"input": "Hi"}),
            ("/tokenize", {"prompt": "Hi"}),
            (VECTOR, {"input": "Hi"}),
        ):
            refused = error_of(await lift.client.post(path, json={"model": "c", **more}), 404)
            assert (refused["code"], refused["param"]) == ("model_not_found", "model")


async def test_an_answer_tells_the_models_own_name_however_it_was_asked_for() -> None:
    said = [{"role": "user", "content": "Hi"}]
    async with fleet(Fake("a", at_start=True, aliases=("gpt-4",))) as lift:
        for path, more in (
            ("/v1/chat/completions", {"messages": said}),
            ("/v1/completions", {"prompt": "Hi"}),
            ("/v1/responses", {"input": "Hi"}),
            ("/v1/messages", {"messages": said, "max_tokens": 5}),
        ):
            answer = (await lift.client.post(path, json={"model": "gpt-4", **more})).json()
            assert answer["model"] == "a", path
        kept = (await lift.client.post("/v1/responses", json={"model": "gpt-4", "input": "Hi"})).json()
        assert (await lift.client.get(f"/v1/responses/{kept['id']}")).json()["model"] == "a"


async def test_one_on_demand_is_loaded_by_the_first_request_and_others_go_on() -> None:
    a, b = Fake("a", at_start=True), Fake("b")
    async with fleet(a, b) as lift:
        assert lift.states() == {"a": "loaded", "b": "unloaded"} and b.finds == 0
        b.gate.close()
        waiting = [asyncio.create_task(lift.says("b")) for _ in range(3)]
        await b.at_gate()
        assert (await lift.card("b"))["state"] == "loading"
        assert await lift.says("a") == "a"
        b.gate.open()
        assert await asyncio.gather(*waiting) == ["b", "b", "b"]
        assert len(b.runners) == 1
        card = await lift.card("b")
        assert (card["state"], card["max_model_len"], card["input_modalities"]) == ("loaded", 4096, ["text"])
        text = (await lift.client.get("/metrics")).text
        assert 'chairlift_model_ready{model_name="a"} 1.0' in text
        assert 'chairlift_request_success_total{finished_reason="stop",model_name="b"} 3.0' in text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": -5},
            "max_tokens",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "odd": 1}, "odd"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "n": 0}, "n"),
        ("completions", {"prompt": "Hi", "temperature": -1}, "temperature"),
        ("completions", {"prompt": "Hi", "n": 2, "best_of": 1}, "best_of"),
        ("messages", {"messages": SAID}, "max_tokens"),
        ("responses", {"input": "Hi", "odd": 1}, "odd"),
    ],
)
async def test_what_is_wrong_whatever_the_model_loads_none(
    path: str, body: dict[str, object], param: str
) -> None:
    b = Fake("b")
    async with fleet(Fake("a", at_start=True), b) as lift:
        refused = await lift.client.post(f"/v1/{path}", json={"model": "b", **body})
        assert refused.status_code == 400 and param in refused.json()["error"]["message"]
        told = await lift.client.post(f"/v1/{path}", json={"model": "a", **body})
        assert told.json()["error"] == refused.json()["error"], "as where the model is loaded"
        assert lift.states() == {"a": "loaded", "b": "unloaded"} and b.finds == 0


async def test_a_request_waits_so_long_and_no_longer_and_the_load_goes_on() -> None:
    b = Fake("b")
    async with fleet(Fake("a", at_start=True), b, load_timeout=0.05) as lift:
        b.gate.close()
        refused = await lift.chat("b")
        assert error_of(refused, 503)["code"] == "model_loading"
        assert int(refused.headers["retry-after"]) >= 1
        b.gate.open()
        await lift.until(lambda: lift.states()["b"] == "loaded")
        assert await lift.says("b") == "b"


async def test_only_so_many_wait_for_a_model() -> None:
    b = Fake("b")
    async with fleet(Fake("a", at_start=True), b, max_waiting=1) as lift:
        b.gate.close()
        first = asyncio.create_task(lift.says("b"))
        await b.at_gate()
        assert error_of(await lift.chat("b"), 429)["code"] == "queue_full"
        b.gate.open()
        assert await first == "b"


async def test_a_load_that_fails_is_told_without_paths_and_tried_again() -> None:
    fault = ModelUnavailable("/home/me/models/b is no model folder: it has no config.json.")
    b = Fake("b", faults=[fault, RuntimeError("cannot read /home/me/x.safetensors")])
    async with fleet(Fake("a", at_start=True), b) as lift:
        refused = await lift.chat("b")
        error = error_of(refused, 503)
        assert error["code"] == "model_failed" and "/home" not in str(error["message"])
        assert "b is no model folder: it has no config.json." in str(error["message"])
        assert 1 <= int(refused.headers["retry-after"]) <= 5
        card = await lift.card("b")
        assert (card["state"], card["reason"]) == ("failed", "b is no model folder: it has no config.json.")
        again = error_of(await lift.chat("b"), 503)
        assert again["code"] == "model_failed" and b.faults, "it was not tried again at once"
        assert error_of(await lift.operate("load", model="b"), 503)["code"] == "model_failed"
        assert not b.faults and "x.safetensors" in str((await lift.card("b"))["reason"])
        assert "/home" not in str((await lift.card("b"))["reason"])
        loaded = await lift.operate("load", model="b")
        assert (loaded.status_code, loaded.json()["state"]) == (200, "loaded")
        assert await lift.says("a") == "a"


async def test_the_least_recently_used_makes_room_and_memory_is_reserved_before_a_load() -> None:
    a, b, c = Fake("a", 40, at_start=True), Fake("b", 40, at_start=True), Fake("c", 60)
    async with fleet(a, b, c, total=100) as lift:
        assert await lift.says("b") == "b" and await lift.says("a") == "a"
        c.gate.close()
        asking = asyncio.create_task(lift.says("c"))
        await c.at_gate()
        assert lift.states() == {"a": "loaded", "b": "unloaded", "c": "loading"}
        assert lift.budget is not None and lift.budget.available == 0
        assert b.runners[0].closed
        c.gate.open()
        assert await asking == "c"
        assert await lift.says("b") == "b"  # which takes the place of the one that was not used since
        assert lift.states() == {"a": "unloaded", "b": "loaded", "c": "unloaded"} or lift.states() == {
            "a": "unloaded",
            "b": "loaded",
            "c": "loaded",
        }
        assert lift.budget.reserved <= 100


async def test_one_that_answers_is_waited_for_and_a_pinned_one_stays() -> None:
    a = Fake("a", 60, at_start=True, make_runner=FakeRunner)
    b, pin = Fake("b", 60), Fake("pin", 40, at_start=True, pinned=True)
    async with fleet(a, b, pin, total=100) as lift:
        a.runners[0].close_gate()
        running = asyncio.create_task(lift.chat("a", stream=True, max_tokens=400))
        await lift.until(lambda: lift.model("a").busy)
        asking = asyncio.create_task(lift.says("b"))
        await lift.until(lambda: b.finds == 1)
        assert lift.states() == {"a": "loaded", "b": "loading", "pin": "loaded"} and not b.runners
        a.runners[0].open_gate()
        assert (await running).text.endswith("data: [DONE]\n\n")
        assert await asking == "b"
        assert lift.states() == {"a": "unloaded", "b": "loaded", "pin": "loaded"}


async def test_two_that_do_not_fit_together_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.server.models.roster.YIELD_AFTER_S", 0.0)
    a, b = Fake("a", 60, at_start=True), Fake("b", 60)
    async with fleet(a, b, total=100) as lift:
        first = a.runners[0]
        first.close_gate()
        running = asyncio.create_task(lift.says("a"))
        await lift.until(lambda: lift.model("a").busy)
        asking = asyncio.create_task(lift.says("b"))
        await lift.until(lambda: lift.model("b").entry.blocked is not None)
        later = asyncio.create_task(lift.says("a"))
        await asyncio.sleep(0)
        first.open_gate()
        assert await asyncio.gather(running, asking, later) == ["a", "b", "a"]
        assert len(a.runners) == 2, "the later request did not go before the one that waited"


async def test_what_never_fits_is_refused_with_the_numbers() -> None:
    async with fleet(Fake("pin", 50, at_start=True, pinned=True), Fake("huge", 60), total=100) as lift:
        error = error_of(await lift.chat("huge"), 503)
        assert "it takes 60 B, and 50 B can be had" in str(error["message"])
        assert await lift.says("pin") == "pin"


async def test_an_idle_one_is_unloaded_and_comes_back() -> None:
    a = Fake("a", at_start=True, idle_unload_s=0.05)
    async with fleet(a, Fake("b", at_start=True)) as lift:
        await lift.until(lambda: lift.states()["a"] == "unloaded")
        assert a.runners[0].closed and lift.states()["b"] == "loaded"
        text = (await lift.client.get("/metrics")).text
        assert 'chairlift_model_ready{model_name="a"}' not in text
        assert 'chairlift_model_state{model_name="a",state="unloaded"} 1.0' in text
        assert 'chairlift_model_loads_total{model_name="a",outcome="loaded"} 1.0' in text
        assert await lift.says("a") == "a" and len(a.runners) == 2


async def test_an_operator_loads_and_unloads() -> None:
    a = Fake("a", at_start=True, make_runner=FakeRunner)
    async with fleet(a, Fake("pin", at_start=True, pinned=True), drain_timeout=0.1) as lift:
        assert error_of(await lift.operate("unload", model="pin"), 409)["code"] == "model_pinned"
        assert error_of(await lift.operate("unload", model="x"), 404)["code"] == "model_not_found"
        assert error_of(await lift.operate("load", model=5), 400)["param"] == "model"
        assert error_of(await lift.operate("load", model="a", more=1), 400)["param"] == "more"
        a.runners[0].close_gate()
        running = asyncio.create_task(lift.chat("a", max_tokens=4000))
        await lift.until(lambda: lift.model("a").busy)
        assert error_of(await lift.operate("unload", model="a"), 409)["code"] == "model_in_use"
        assert lift.states()["a"] == "loaded"
        forced = asyncio.create_task(lift.operate("unload", model="a", force=True))
        await lift.until(lambda: lift.states()["a"] == "unloading")
        a.runners[0].open_gate()
        assert (await forced).json()["state"] == "unloaded"
        ended = error_of(await running, 503)  # the server itself goes on
        assert (ended["code"], ended["message"]) == ("unavailable", UNLOADED)
        assert (await lift.operate("unload", model="a")).json()["state"] == "unloaded"
        assert (await lift.operate("load", model="a")).json()["state"] == "loaded"


async def test_one_that_is_to_go_takes_no_new_requests_until_it_has_gone_and_come_back() -> None:
    a = Fake("a", at_start=True)
    async with fleet(a, Fake("b", at_start=True)) as lift:
        a.runners[0].close_gate()
        running = asyncio.create_task(lift.says("a"))
        await lift.until(lambda: lift.model("a").busy)
        unloading = asyncio.create_task(lift.operate("unload", model="a"))
        await lift.until(lambda: lift.states()["a"] == "unloading")
        assert (await lift.card("a"))["state"] == "unloading"
        later = asyncio.create_task(lift.says("a"))
        await lift.until(lambda: lift.model("a").entry.deferred == 1)
        assert await lift.says("b") == "b"
        a.runners[0].open_gate()
        assert (await unloading).status_code == 200
        assert await asyncio.gather(running, later) == ["a", "a"]
        assert len(a.runners) == 2 and a.runners[0].closed


async def test_one_that_does_not_get_to_go_takes_requests_again_and_every_operator_is_told() -> None:
    a = Fake("a", at_start=True)
    async with fleet(a, drain_timeout=0.1, max_waiting=1) as lift:
        a.runners[0].close_gate()
        running = asyncio.create_task(lift.says("a"))
        await lift.until(lambda: lift.model("a").busy)
        unloads = [asyncio.create_task(lift.operate("unload", model="a")) for _ in range(2)]
        await lift.until(lambda: lift.states()["a"] == "unloading")
        left = asyncio.create_task(lift.chat("a"))
        await lift.until(lambda: lift.model("a").entry.deferred == 1)
        assert error_of(await lift.chat("a"), 429)["code"] == "queue_full"
        for refused in await asyncio.gather(*unloads):
            assert error_of(refused, 409)["code"] == "model_in_use"
        assert lift.states() == {"a": "loaded"} and not left.done()
        a.runners[0].open_gate()
        assert await running == "a" and (await left).status_code == 200
        assert len(a.runners) == 1


async def test_who_leaves_while_a_model_is_to_go_waits_no_more() -> None:
    a = Fake("a", at_start=True)
    async with fleet(a) as lift:
        a.runners[0].close_gate()
        running = asyncio.create_task(lift.says("a"))
        await lift.until(lambda: lift.model("a").busy)
        unloading = asyncio.create_task(lift.operate("unload", model="a"))
        await lift.until(lambda: lift.states()["a"] == "unloading")
        async with on_socket(lift.app) as url, connection(url) as client:
            await client.send(CHAT, chat_body(model="a"))
            await lift.until(lambda: lift.model("a").entry.deferred == 1)
            await client.leave()
            await lift.until(lambda: lift.model("a").entry.deferred == 0)
        a.runners[0].open_gate()
        assert await running == "a" and (await unloading).json()["state"] == "unloaded"


async def test_by_force_streams_and_texts_end_with_what_has_happened() -> None:
    a, e = Fake("a", at_start=True, make_runner=FakeRunner), Fake("e", use=Use.EMBEDDING, at_start=True)
    async with fleet(a, e) as lift:
        a.runners[0].close_gate()
        stream = asyncio.create_task(lift.chat("a", stream=True, max_tokens=4000))
        await lift.until(lambda: lift.model("a").busy)
        forced = asyncio.create_task(lift.operate("unload", model="a", force=True))
        await lift.until(lambda: lift.states()["a"] == "unloading")
        a.runners[0].open_gate()
        assert (await forced).json()["state"] == "unloaded"
        assert UNLOADED in (await stream).text
        engine = lift.model("e").engine
        assert isinstance(engine, EmbeddingEngine)
        assert (await lift.operate("unload", model="e", force=True)).json()["state"] == "unloaded"
        with pytest.raises(EngineStopped, match=UNLOADED):
            await engine.encode([])


async def test_each_load_and_unload_is_a_line_that_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "chairlift.lifecycle")
    a, b, c = Fake("a", 60, at_start=True), Fake("b", 60, idle_unload_s=0.05), Fake("c", 30)
    async with fleet(a, b, c, total=100) as lift:
        assert await lift.says("b") == "b"
        await lift.until(lambda: lift.states()["b"] == "unloaded")
        for force in (False, True):
            assert (await lift.operate("load", model="c")).status_code == 200
            assert (await lift.operate("unload", model="c", force=force)).status_code == 200
    said = [record.getMessage().partition(" (")[0] for record in caplog.records]
    assert said == [
        "a is loaded: at the start",
        "a is unloaded: b needs its room",
        "b is loaded: asked for",
        "b is unloaded: no request came for 0.05 s",
        "c is loaded: asked for",
        "c is unloaded: an operator asked for it",
        "c is loaded: asked for",
        "c is unloaded: an operator forced it",
    ]


async def test_an_embedding_model_is_a_model_like_any() -> None:
    a, e = Fake("a", at_start=True), Fake("e", use=Use.EMBEDDING, known=False)
    async with fleet(a, e) as lift:
        answer = await lift.client.post(VECTOR, json={"model": "e", "input": "up"})
        assert answer.status_code == 200 and answer.json()["model"] == "e"
        assert "generates no text" in str(error_of(await lift.chat("e"), 400)["message"])
        refused = error_of(await lift.client.post(VECTOR, json={"model": "a", "input": "up"}), 400)
        assert "makes no embeddings" in str(refused["message"])
        assert (await lift.operate("unload", model="e")).json()["state"] == "unloaded"
        assert error_of(await lift.chat("e"), 400)["code"] == "unsupported_value"
        assert lift.states()["e"] == "unloaded", "a request that it cannot answer does not load it"


async def test_what_an_embedding_models_batches_take_counts_as_its_weights_do() -> None:
    batches = LEAST_CACHE + int(SPARE * 64 * 1000)
    e = Fake("e", size=500, use=Use.EMBEDDING, batch_cost=BatchCost(1000))
    a = Fake("a", size=1000)
    async with fleet(e, a, total=batches + 1200) as lift:
        assert (await lift.client.post(VECTOR, json={"model": "e", "input": "Hi"})).status_code == 200
        assert lift.budget is not None and lift.budget.reserved == batches + 500
        assert await lift.says("a") == "a"  # beside the weights alone there would be room
        assert lift.states() == {"e": "unloaded", "a": "loaded"} and lift.budget.reserved == 1000
        assert (await lift.client.post(VECTOR, json={"model": "e", "input": "Hi"})).status_code == 200
        assert lift.states() == {"e": "loaded", "a": "unloaded"}


async def test_a_models_defaults_count_where_a_request_says_nothing() -> None:
    runner = FakeRunner(answering("a"))
    a = Fake("a", at_start=True, defaults={"temperature": 0.25, "max_tokens": 3}, make_runner=lambda: runner)
    async with fleet(a, Fake("b", at_start=True)) as lift:
        seen = []
        for more in ({"temperature": None}, {"temperature": 0.5, "max_completion_tokens": 7}):
            body = {key: value for key, value in chat_body(model="a", **more).items() if value is not None}
            assert (await lift.client.post("/v1/chat/completions", json=body)).status_code == 200
            admitted = [new for plan in runner.plans for new in plan.admit]
            seen.append((admitted[-1].sampling.temperature, admitted[-1].sampling.max_tokens))
        assert seen == [(0.25, 3), (0.5, 7)]
        response = await lift.client.post("/v1/responses", json={"model": "a", "input": "Hi"})
        assert response.json()["temperature"] == 0.25


async def test_the_list_and_the_health_while_nothing_is_loaded() -> None:
    async with fleet(Fake("a"), Fake("b", use=Use.EMBEDDING)) as lift:
        listed = (await lift.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["state"], card["max_model_len"]) for card in listed] == [
            ("a", "unloaded", 4096),
            ("b", "unloaded", 4096),
        ]
        anthropic = {"anthropic-version": "2023-06-01"}
        page = (await lift.client.get("/v1/models", headers=anthropic)).json()
        assert [card["id"] for card in page["data"]] == ["a"]
        assert (await lift.client.get("/health/ready")).status_code == 200
        health = (await lift.client.get("/health")).json()
        assert (health["status"], health["running"], health["stalled_s"]) == ("ok", 0, 0.0)


async def test_while_the_models_of_the_start_load_only_loaded_ones_answer() -> None:
    a, b = Fake("a", at_start=True), Fake("b", at_start=True)
    async with fleet(a, b, start=False) as lift:
        b.gate.close()
        starting = asyncio.create_task(lift.models.start())
        await b.at_gate()
        assert await lift.says("a") == "a"
        assert error_of(await lift.chat("b"), 503)["code"] == "unavailable"
        ready = await lift.client.get("/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "loading")
        b.gate.open()
        await starting
        assert (await lift.client.get("/health/ready")).status_code == 200


async def test_one_that_fails_at_the_start_does_not_keep_the_others_from_it() -> None:
    a, b = Fake("a", at_start=True, faults=[ModelUnavailable("No such weights.")]), Fake("b", at_start=True)
    async with fleet(a, b) as lift:
        assert lift.states() == {"a": "failed", "b": "loaded"}
        ((failed, fault),) = lift.models.faults
        assert (failed.name, fault.message) == ("a", "No such weights.")


async def test_where_none_can_be_loaded_the_start_fails() -> None:
    a = Fake("a", at_start=True, faults=[ModelUnavailable("No such weights.")])
    async with fleet(a, start=False) as lift:
        with pytest.raises(ModelUnavailable, match="No such weights."):
            await lift.models.start()


async def test_one_that_never_fits_is_told_at_the_start_with_the_numbers() -> None:
    told = "huge does not fit: it takes 1.1 kB, and 1 kB can be had"
    async with fleet(Fake("huge", 1100, at_start=True), total=1000, start=False) as lift:
        with pytest.raises(ModelUnavailable, match=told):
            await lift.models.start()
    async with fleet(Fake("huge", 1100, at_start=True), Fake("a", 10, at_start=True), total=1000) as lift:
        assert [(model.name, told in fault.message) for model, fault in lift.models.faults] == [
            ("huge", True)
        ]
        assert await lift.says("a") == "a"


async def test_those_that_do_not_fit_at_the_start_come_when_they_are_asked_for() -> None:
    a, b = Fake("a", 60, at_start=True), Fake("b", 60, at_start=True)
    async with fleet(a, b, total=100) as lift:
        assert lift.states() == {"a": "loaded", "b": "unloaded"}
        assert await lift.says("b") == "b"
        assert lift.states() == {"a": "unloaded", "b": "loaded"}


async def test_models_are_told_of_from_the_first_moment_and_the_server_is_ready_once_all_are_there() -> None:
    a, b, c = Fake("a", at_start=True), Fake("b", at_start=True), Fake("c")
    async with fleet(a, b, c, start=False) as lift:
        b.gate.close()
        starting = asyncio.create_task(lift.models.start())
        await b.at_gate()
        listed = (await lift.client.get("/v1/models")).json()["data"]
        states = {"a": "loaded", "b": "loading", "c": "unloaded"}
        assert {card["id"]: card["state"] for card in listed} == states
        assert (await lift.card("b"))["state"] == "loading"
        page = await lift.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert [card["id"] for card in page.json()["data"]] == ["a", "b", "c"]
        ready = await lift.client.get("/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "loading")
        assert (await lift.client.get("/health")).json()["status"] == "loading"
        b.gate.open()
        await starting
        assert (await lift.client.get("/health/ready")).status_code == 200


async def test_when_it_stops_those_who_wait_are_told_and_running_answers_end() -> None:
    a, b = Fake("a", at_start=True), Fake("b")
    async with fleet(a, b) as lift:
        b.gate.close()
        waiting = asyncio.create_task(lift.chat("b"))
        await b.at_gate()
        a.runners[0].close_gate()
        running = asyncio.create_task(lift.says("a"))
        await lift.until(lambda: lift.model("a").busy)
        stopping = asyncio.create_task(lift.models.stop(10.0))
        assert error_of(await waiting, 503)["code"] == "unavailable"
        assert error_of(await lift.chat("a"), 503)["code"] == "unavailable"
        assert (await lift.client.get("/health/ready")).json()["status"] == "draining"
        a.runners[0].open_gate()
        assert await running == "a"
        await stopping
        assert lift.models.abandoned and not lift.models.wedged
        b.gate.open()


async def test_a_client_that_leaves_while_its_model_loads_waits_no_more() -> None:
    b = Fake("b")
    async with fleet(Fake("a", at_start=True), b) as lift:
        b.gate.close()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(lift.chat("b"), 0.2)
        await lift.until(lambda: lift.model("b").entry.waiters == 0)
        b.gate.open()
        await lift.until(lambda: lift.states()["b"] == "loaded")


async def test_one_at_a_time_is_a_plain_queue() -> None:
    runner = FakeRunner()
    a = Fake("a", at_start=True, config=EngineConfig(max_num_seqs=1), make_runner=lambda: runner)
    async with fleet(a) as lift:
        runner.close_gate()
        asked: list[asyncio.Task[httpx.Response]] = []
        for count in range(4):
            asked.append(asyncio.create_task(lift.chat("a", max_tokens=5, seed=count, temperature=1)))
            await lift.until(lambda count=count: _queued(lift.model("a").busy, lift, count + 1))  # type: ignore[misc]
        runner.open_gate()
        answers = await asyncio.gather(*asked)
        assert all(answer.status_code == 200 for answer in answers)
        admitted = [new.row for plan in runner.plans for new in plan.admit][1:]  # but the self-test's
        assert [new.seed for plan in runner.plans for new in plan.admit][1:] == [0, 1, 2, 3]
        order = [row for plan in runner.plans for row in plan.rows if row in admitted]
        assert order == sorted(order, key=admitted.index), "one after the other, in the order they came"
        assert all(len(set(plan.rows)) <= 1 for plan in runner.plans)


def _queued(busy: bool, lift: object, count: int) -> bool:
    stats = lift.model("a").generation().stats()  # type: ignore[attr-defined]
    return bool(busy) and stats.running + stats.waiting == count


async def test_kept_prefixes_go_for_one_model_or_for_all() -> None:
    async with fleet(
        Fake("a", at_start=True), Fake("b"), Fake("e", use=Use.EMBEDDING, at_start=True)
    ) as lift:
        for query in ("", "?model=a", "?model=b&disk=true"):
            cleared = await lift.client.delete(f"/v1/cache{query}")
            assert (cleared.status_code, cleared.json()["memory_bytes"]) == (200, 0), cleared.text
        assert lift.states()["b"] == "unloaded"
        assert error_of(await lift.client.delete("/v1/cache?model=x"), 404)["code"] == "model_not_found"
        assert "generates no text" in str(
            error_of(await lift.client.delete("/v1/cache?model=e"), 400)["message"]
        )
