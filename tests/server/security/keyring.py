"""Keys that tests use, and settings with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chairlift.server.security.keys import KeySources
from chairlift.server.security.settings import SecuritySettings
from chairlift.server.settings import ServerSettings

ALICE = "sk-alice-0123456789abcdef"
BOB = "sk-bob-0123456789abcdef"
ROOT = "sk-root-0123456789abcdef"
SOURCES = KeySources(api_keys=(f"alice:{ALICE}", BOB), admin_keys=(f"root:{ROOT}",))
WITHOUT_ADMIN = KeySources(api_keys=SOURCES.api_keys)


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def secured(
    keys: KeySources = SOURCES, settings: ServerSettings | None = None, **more: Any
) -> ServerSettings:
    return replace(settings or ServerSettings(), security=SecuritySettings(keys=keys, **more))
