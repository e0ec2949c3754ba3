"""Codex without a terminal: an answer of a real model, and its shell."""

from __future__ import annotations

from pathlib import Path

from coding import plainly, read_by, run, tells, write_note
from plain import SCRIPTED, SENTENCE, same

CONFIG = """\
model_provider = "chairlift"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.chairlift]
name = "Chairlift"
base_url = "{base}/v1"
wire_api = "responses"
"""


def codex(base: str, model: str, request: str) -> str:
    settings = Path.home() / ".codex"
    settings.mkdir(exist_ok=True)
    (settings / "config.toml").write_text(CONFIG.format(base=base))
    no_sandbox = "--dangerously-bypass-approvals-and-sandbox"  # it cannot be nested in a container
    return run("codex", "exec", "--skip-git-repo-check", no_sandbox, "-m", model, request)


def main() -> None:
    write_note()
    same(codex(SENTENCE, "sentence", "Say something."), plainly(SENTENCE))
    tells(codex(SCRIPTED, "scripted", read_by("exec_command", cmd="cat note.txt")))


main()
