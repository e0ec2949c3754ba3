"""Whose responses are: with keys, nobody reaches those of others."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from chairlift.server.security.keys import KeySources
from chairlift.server.settings import ResponsesSettings, ServerSettings
from tests.fakes import FakeRunner, answering
from tests.server.harness import JSON, Lift, error_of, lift
from tests.server.responses.asking import RESPONSES, body
from tests.server.security.keyring import ALICE, BOB, ROOT, bearer, secured

ALICE_TOO = "sk-alice-second-key"
KEYS = KeySources(api_keys=(f"alice:{ALICE}", f"alice:{ALICE_TOO}", BOB), admin_keys=(f"root:{ROOT}",))


async def ask(server: Lift, secret: str, **more: object) -> httpx.Response:
    return await server.client.post(RESPONSES, json=body(**more), headers=bearer(secret))


async def made(server: Lift, secret: str, **more: object) -> JSON:
    response = await ask(server, secret, **more)
    assert response.status_code == 200, response.text
    found: JSON = response.json()
    return found


async def statuses(server: Lift, secret: str | None, id: object) -> list[int]:
    """Of everything that can be done with a response but to delete it."""
    headers = {} if secret is None else bearer(secret)
    path = f"{RESPONSES}/{id}"
    client = server.client
    follows = body(previous_response_id=id, max_output_tokens=3)
    answers = [
        await client.get(path, headers=headers),
        await client.get(path, params={"stream": "true"}, headers=headers),
        await client.get(f"{path}/input_items", headers=headers),
        await client.post(f"{path}/cancel", headers=headers),
        await client.post(RESPONSES, json=follows, headers=headers),
        await client.post(f"{RESPONSES}/input_tokens", json=body(previous_response_id=id), headers=headers),
    ]
    return [answer.status_code for answer in answers]


THERE = [200, 400, 200, 400, 200, 200]
"""Its events are not kept, and it has ended."""
NOT_THERE = [404, 404, 404, 404, 400, 400]
"""The last two are refusals of a parameter, `previous_response_not_found`."""


async def test_a_response_is_there_for_its_client_and_admins() -> None:
    async with lift(FakeRunner(answering("Hello!")), settings=secured(KEYS)) as server:
        id = (await made(server, ALICE))["id"]
        assert await statuses(server, ALICE, id) == THERE
        assert await statuses(server, ALICE_TOO, id) == THERE  # keys of one name are one client
        assert await statuses(server, ROOT, id) == THERE
        assert await statuses(server, BOB, id) == NOT_THERE
        admins = (await made(server, ROOT))["id"]
        assert await statuses(server, ALICE, admins) == NOT_THERE


async def test_what_is_not_ones_own_looks_as_if_it_were_not_there() -> None:
    async with lift(FakeRunner(answering("Hello!")), settings=secured(KEYS)) as server:
        id = str((await made(server, ALICE))["id"])
        nothing = "resp_" + "0" * len(id.removeprefix("resp_"))
        told: list[str] = []
        for each in (id, nothing):
            refused = error_of(await ask(server, BOB, previous_response_id=each), 400)
            assert refused["code"] == "previous_response_not_found"
            missing = error_of(await server.client.get(f"{RESPONSES}/{each}", headers=bearer(BOB)), 404)
            told.append(str((refused, missing)).replace(each, ""))
        assert told[0] == told[1]


async def test_only_its_client_and_admins_delete_it() -> None:
    async with lift(FakeRunner(answering("Hello!")), settings=secured(KEYS)) as server:
        for secret in (ALICE_TOO, ROOT):
            path = f"{RESPONSES}/{(await made(server, ALICE))['id']}"
            error_of(await server.client.delete(path, headers=bearer(BOB)), 404)
            assert (await server.client.get(path, headers=bearer(ALICE))).status_code == 200
            assert (await server.client.delete(path, headers=bearer(secret))).status_code == 200
            error_of(await server.client.get(path, headers=bearer(ALICE)), 404)


async def test_items_of_others_cannot_be_referred_to() -> None:
    async with lift(FakeRunner(answering("Hello!")), settings=secured(KEYS)) as server:
        output = (await made(server, ALICE))["output"]
        assert isinstance(output, list)
        reference = [{"type": "item_reference", "id": output[0]["id"]}, {"role": "user", "content": "So?"}]
        assert error_of(await ask(server, BOB, input=reference), 400)["code"] == "item_not_found"
        await made(server, ALICE, input=reference)


@pytest.mark.parametrize("secret", [ALICE_TOO, ROOT])
async def test_one_in_the_making(secret: str) -> None:
    async with lift(settings=secured(KEYS)) as server:
        server.runner.close_gate()
        id = (await made(server, ALICE, background=True, stream=False, max_output_tokens=4000))["id"]
        path = f"{RESPONSES}/{id}"
        assert await statuses(server, BOB, id) == NOT_THERE
        error_of(await server.client.delete(path, headers=bearer(BOB)), 404)
        running = await server.client.get(path, headers=bearer(ALICE))
        assert running.json()["status"] == "in_progress"
        server.runner.open_gate()
        cancelled = await server.client.post(f"{path}/cancel", headers=bearer(secret))
        assert cancelled.json()["status"] == "cancelled"
        await server.until_idle()
        # So is what is kept at its end.
        assert await statuses(server, BOB, id) == NOT_THERE
        assert (await statuses(server, ALICE, id))[0] == 200


async def test_across_servers_and_with_other_keys(tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = ServerSettings(responses=ResponsesSettings(path=store))
    async with lift(FakeRunner(answering("Hello!")), settings=settings) as server:
        open_one = (await server.client.post(RESPONSES, json=body())).json()["id"]
    async with lift(FakeRunner(answering("Hello!")), settings=secured(KEYS, settings)) as server:
        hers, his = (await made(server, ALICE))["id"], (await made(server, BOB))["id"]
        # Made when there were no keys: whose it is, is not known.
        assert await statuses(server, BOB, open_one) == THERE
    later = secured(KeySources(api_keys=("alice:sk-another-of-hers", f"bob:{BOB}")), settings)
    async with lift(FakeRunner(answering("Hello!")), settings=later) as server:
        assert await statuses(server, "sk-another-of-hers", hers) == THERE
        assert await statuses(server, BOB, his) == NOT_THERE  # its key had no name then
        assert await statuses(server, BOB, hers) == NOT_THERE
    async with lift(FakeRunner(answering("Hello!")), settings=settings) as server:
        for id in (open_one, hers, his):
            assert await statuses(server, None, id) == THERE
    with closing(sqlite3.connect(store)) as connection:
        text = "\n".join(connection.iterdump())
    assert "name alice" in text and "digest " in text
    assert not any(secret in text for secret in (ALICE, BOB, ROOT))
