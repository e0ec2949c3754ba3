"""Claude Code without a terminal: an answer of a real model, and its Read tool."""

from __future__ import annotations

import json

from coding import NOTE, plainly, read_by, run, tells, write_note
from plain import SCRIPTED, SENTENCE, same


def claude(base: str, model: str, *arguments: str) -> str:
    return run(
        "claude",
        "-p",
        *arguments,
        ANTHROPIC_BASE_URL=base,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL=model,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=model,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
    )


def main() -> None:
    write_note()
    same(claude(SENTENCE, "sentence", "Say something."), plainly(SENTENCE))
    request = read_by("Read", file_path=str(NOTE.absolute()))
    said = json.loads(claude(SCRIPTED, "scripted", "--allowedTools=Read", "--output-format=json", request))
    same((said["is_error"], said["num_turns"]), (False, 2))
    tells(said["result"])


main()
