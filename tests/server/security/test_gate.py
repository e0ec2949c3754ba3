"""Every route is behind the key, whatever comes to be a route."""

from __future__ import annotations

import re
from collections.abc import Iterator

import anthropic
import openai
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.types import Message, Receive, Scope, Send

from chairlift.server.app import create_app
from chairlift.server.errors import APIError, request_id_of
from chairlift.server.metrics import ServerMetrics
from chairlift.server.security.gate import Gate, credentials
from chairlift.server.security.keys import Keys, KeySources
from tests.fakes import FakeRunner, answering
from tests.server.harness import CHAT, MODEL, chat_body, error_of, lift, on_socket
from tests.server.security.keyring import ALICE, BOB, ROOT, SOURCES, WITHOUT_ADMIN, bearer, secured

OPEN = {"/health", "/health/ready"}


def routes_of(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Method and path of every route, in the description of the API or not."""
    for route in iter_route_contexts(app.routes):
        path, methods = route.path, route.methods
        assert path and methods, "a route of another kind: this test does not see what it serves"
        for method in methods:
            yield method, path


APP = create_app(None, secured(), ServerMetrics())
ADMIN = (
    ("DELETE", "/v1/cache"),
    ("POST", "/v1/cache/warm"),
    ("POST", "/v1/models/load"),
    ("POST", "/v1/models/unload"),
)
ROUTES = sorted(set(routes_of(APP)))
PATHS = {path for _, path in ROUTES}


def test_these_are_the_routes() -> None:
    assert {
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/cache",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/",
    } <= PATHS
    assert PATHS > OPEN and len(ROUTES) > 30


def address(path: str) -> str:
    return re.sub(r"{\w+(:path)?}", "x", path)


async def test_every_route_wants_a_key() -> None:
    async with lift(settings=secured()) as server:
        for method, path in ROUTES:
            for headers in ({}, bearer("sk-wrong-0123456789"), {"x-api-key": ALICE + "x"}):
                response = await server.client.request(method, address(path), headers=headers)
                if path in OPEN:
                    assert response.status_code == 200
                else:
                    assert response.status_code == 401, (method, path)
                    assert response.headers["www-authenticate"] == 'Bearer realm="chairlift"'


async def test_every_route_is_open_to_a_key() -> None:
    """What it answers then is its own affair."""
    async with lift(settings=secured()) as server:
        for method, path in ROUTES:
            response = await server.client.request(method, address(path), headers=bearer(ROOT))
            assert response.status_code not in (401, 403), (method, path)


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/v1", "/health/x", "//health", "/HEALTH", "/health/../metrics", "/v1/../health"]
    + [
        "/healthz",
        "/health/ready/../../metrics",
        "/health;/metrics",
        "/health\0",
        "",
        "/v1/models/",
        "/health//",
    ],
)
async def test_what_is_no_route_is_401_to_whoever_has_no_key(path: str) -> None:
    """The path as it is, which clients would tidy up."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    await APP(scope, receive, send)
    assert sent[0]["status"] == 401


async def test_so_are_options() -> None:
    async with lift(settings=secured()) as server:
        for path in ("/v1/models", "/health/x"):
            assert (await server.client.options(path)).status_code == 401


async def test_without_keys_nothing_is_asked_for() -> None:
    async with lift() as server:
        assert (await server.client.get("/v1/models")).status_code == 200
        assert (await server.client.get("/nothing")).status_code == 404
        assert (await server.client.delete("/v1/cache")).status_code == 200


async def test_metrics_may_be_public() -> None:
    async with lift(settings=secured(metrics_public=True)) as server:
        assert (await server.client.get("/metrics")).status_code == 200
        assert (await server.client.get("/metrics/x")).status_code == 401
        assert (await server.client.get("/v1/models")).status_code == 401


async def test_the_envelopes() -> None:
    async with lift(settings=secured()) as server:
        missing = error_of(await server.client.post(CHAT, json=chat_body()), 401)
        assert (missing["type"], missing["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "x-api-key" in str(missing["message"])
        wrong = error_of(await server.client.post(CHAT, headers=bearer("sk-wrong-012345")), 401)
        assert wrong["code"] == "invalid_api_key" and "sk-wrong" not in str(wrong["message"])
        for path, headers in (("/v1/messages", {}), ("/v1/models", {"anthropic-version": "2023-06-01"})):
            refused = await server.client.get(path, headers=headers)
            assert refused.status_code == 401 and "www-authenticate" in refused.headers
            body = refused.json()
            assert body["type"] == "error" and body["error"]["type"] == "authentication_error"
            assert body["request_id"] == refused.headers["request-id"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": f"Bearer {ALICE}"}, 200),
        ({"Authorization": f"bearer   {ALICE} "}, 200),
        ({"x-api-key": BOB}, 200),
        ({"X-API-KEY": ROOT}, 200),
        ({"x-api-key": "dummy", "Authorization": f"Bearer {ALICE}"}, 200),
        ({"x-api-key": ALICE, "Authorization": "Bearer dummy"}, 200),
        ({"Authorization": ALICE}, 401),
        ({"Authorization": f"Basic {ALICE}"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"x-api-key": ""}, 401),
        ({"Authorization": f"Bearer {ALICE} {BOB}"}, 401),
        ({"Cookie": f"api_key={ALICE}"}, 401),
    ],
)
async def test_where_a_key_may_stand(headers: dict[str, str], status: int) -> None:
    async with lift(settings=secured()) as server:
        assert (await server.client.get("/v1/models", headers=headers)).status_code == status


async def test_a_key_in_the_query_is_none() -> None:
    async with lift(settings=secured()) as server:
        assert (await server.client.get("/v1/models", params={"api_key": ALICE})).status_code == 401


def test_of_a_header_given_twice_the_first_counts() -> None:
    headers = [(b"x-api-key", b"a"), (b"x-api-key", b"b"), (b"authorization", b"Bearer c")]
    assert credentials(headers) == [b"a", b"c"]


async def test_answers_are_for_those_with_keys() -> None:
    async with lift(FakeRunner(answering("bonjour")), settings=secured()) as server:
        response = await server.client.post(CHAT, json=chat_body(), headers=bearer(ALICE))
        assert response.json()["choices"][0]["message"]["content"] == "bonjour"


async def test_the_sdks_raise_what_they_raise_for_a_wrong_key() -> None:
    async with lift(FakeRunner(answering("a")), settings=secured()) as server, on_socket(server.app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=ALICE, max_retries=0) as right:
            assert [model.id async for model in right.models.list()] == [MODEL]
            with pytest.raises(openai.AuthenticationError) as refused:
                await right.with_options(api_key="sk-wrong-0123456").models.retrieve(MODEL)
            assert refused.value.code == "invalid_api_key"
        async with anthropic.AsyncAnthropic(base_url=url, api_key=ALICE, max_retries=0) as client:
            assert (await client.models.retrieve(MODEL)).id == MODEL
            with pytest.raises(anthropic.AuthenticationError):
                await client.copy(api_key="sk-wrong").models.retrieve(MODEL)
        async with anthropic.AsyncAnthropic(base_url=url, auth_token=ALICE, max_retries=0) as token:
            assert (await token.models.retrieve(MODEL)).id == MODEL


@pytest.mark.parametrize("sources", [SOURCES, KeySources(admin_keys=(ROOT,))])
async def test_admin_routes_want_an_admins_key(sources: KeySources) -> None:
    async with lift(settings=secured(sources)) as server:
        ask = server.client.request
        assert (await ask("DELETE", "/v1/cache", headers=bearer(ROOT))).status_code == 200
        assert (await ask("GET", "/v1/models", headers=bearer(ROOT))).status_code == 200
        if sources is SOURCES:
            for method, path in ADMIN:
                error = error_of(await ask(method, path, headers=bearer(ALICE)), 403)
                assert (error["type"], error["code"]) == ("permission_error", "admin_key_needed")


async def test_without_an_admins_key_nobody_administers() -> None:
    async with lift(settings=secured(WITHOUT_ADMIN)) as server:
        error = error_of(await server.client.delete("/v1/cache", headers=bearer(ALICE)), 403)
        assert error["code"] == "admin_key_needed" and "--admin-key-file" in str(error["message"])


async def test_keys_may_change_while_the_server_runs() -> None:
    async with lift(settings=secured()) as server:
        server.app.state.context.keys.replace(KeySources(api_keys=("sk-new-0123456789",)).read())
        assert (await server.client.get("/v1/models", headers=bearer(ALICE))).status_code == 401
        assert (await server.client.get("/v1/models", headers=bearer("sk-new-0123456789"))).status_code == 200


async def test_other_kinds_of_connection_do_not_get_through() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        seen.append(f"{message['type']} {message['code']}")

    def respond(error: APIError, scope: Scope) -> object:
        return error.response(request_id_of(scope))

    for keys in (Keys(), Keys(SOURCES.read())):
        gate = Gate(app, keys, respond, metrics_public=False)  # type: ignore[arg-type]
        for kind in ("websocket", "lifespan"):
            await gate({"type": kind, "path": "/health", "headers": []}, receive, send)
    assert seen == ["websocket.close 1008", "lifespan"] * 2
