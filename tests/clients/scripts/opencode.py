"""opencode without a terminal: an answer of a real model, and its read tool."""

from __future__ import annotations

import json
from pathlib import Path

from coding import NOTE, plainly, read_by, run, tells, write_note
from plain import SCRIPTED, SENTENCE, same


def opencode(base: str, model: str, request: str) -> str:
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "autoupdate": False,
        "share": "disabled",
        "model": f"chairlift/{model}",
        "small_model": f"chairlift/{model}",
        "provider": {
            "chairlift": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Chairlift",
                "options": {"baseURL": f"{base}/v1", "apiKey": "none"},
                "models": {model: {"name": model, "limit": {"context": 200_000, "output": 8192}}},
            }
        },
    }
    Path("opencode.json").write_text(json.dumps(settings))
    return run(
        "opencode",
        "run",
        said=request,
        OPENCODE_DISABLE_AUTOUPDATE="1",
        OPENCODE_DISABLE_MODELS_FETCH="1",
        OPENCODE_DISABLE_LSP_DOWNLOAD="1",
        OPENCODE_DISABLE_DEFAULT_PLUGINS="1",
    )


def main() -> None:
    write_note()
    same(opencode(SENTENCE, "sentence", "Say something."), plainly(SENTENCE))
    tells(opencode(SCRIPTED, "scripted", read_by("read", filePath=str(NOTE.absolute()))))


main()
