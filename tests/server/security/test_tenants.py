"""Kept prefixes that serve only the client that brought them."""

from __future__ import annotations

import pytest

from chairlift.engine.config import EngineConfig
from chairlift.engine.prefix.vocabulary import PrefixSpec
from chairlift.server.security.keys import KeySources
from tests.fakes import FakeRunner, answering
from tests.server.harness import JSON, MODEL, Lift, chat_body, completion_body, lift
from tests.server.security.keyring import ALICE, BOB, ROOT, bearer, secured

SPEC = PrefixSpec(block_tokens=8, bytes_per_token=4)
CONFIG = EngineConfig(prefix_cache_bytes=10**6)
ALICE_TOO = "sk-alice-second-key"
KEYS = KeySources(api_keys=(f"alice:{ALICE}", f"alice:{ALICE_TOO}", BOB), admin_keys=(ROOT,))
LONG = "a" * 60
MESSAGES = [{"role": "user", "content": LONG}]
SURFACES: dict[str, tuple[JSON, str]] = {
    "/v1/chat/completions": (chat_body(messages=MESSAGES), "prompt_tokens_details"),
    "/v1/completions": (completion_body(prompt=LONG), "prompt_tokens_details"),
    "/v1/responses": ({"model": MODEL, "input": LONG}, "input_tokens_details"),
    "/v1/messages": ({"model": MODEL, "max_tokens": 9, "messages": MESSAGES}, ""),
}


async def cached(server: Lift, path: str, secret: str, **more: object) -> int:
    body, details = SURFACES[path]
    response = await server.client.post(path, json={**body, **more}, headers=bearer(secret))
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    count = usage[details]["cached_tokens"] if details else usage["cache_read_input_tokens"]
    assert isinstance(count, int)
    return count


@pytest.mark.parametrize("path", SURFACES)
async def test_nobody_hits_what_others_brought(path: str) -> None:
    settings = secured(KEYS, prefix_cache_per_key=True)
    async with lift(FakeRunner(answering("b")), config=CONFIG, prefix=SPEC, settings=settings) as server:
        assert await cached(server, path, ALICE) == 0
        assert await cached(server, path, BOB) == 0
        assert await cached(server, path, ROOT) == 0
        assert await cached(server, path, ALICE) > 50
        assert await cached(server, path, ALICE_TOO) > 50  # keys of one name are one client
        if path != "/v1/messages":
            assert await cached(server, path, ALICE, cache_salt="x") == 0


@pytest.mark.parametrize("path", SURFACES)
async def test_by_default_all_share_them(path: str) -> None:
    async with lift(FakeRunner(answering("b")), config=CONFIG, prefix=SPEC, settings=secured(KEYS)) as server:
        assert await cached(server, path, ALICE) == 0
        assert await cached(server, path, BOB) > 50


async def test_what_is_warmed_is_the_admins() -> None:
    settings = secured(KEYS, prefix_cache_per_key=True)
    async with lift(FakeRunner(answering("b")), config=CONFIG, prefix=SPEC, settings=settings) as server:
        warmed = await server.client.post("/v1/cache/warm", json={"prompt": LONG}, headers=bearer(ROOT))
        assert warmed.status_code == 200
        assert await cached(server, "/v1/completions", ALICE) == 0
        assert await cached(server, "/v1/completions", ROOT) > 50
