"""The `llm` command: its list of models, an answer, a stream, a conversation, a schema and a tool."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from plain import ADDED, CHAIRLIFT, MODEL, QUESTION, SCRIPTED, ask, chat, same

MODELS = f"""\
- model_id: lift
  model_name: {MODEL}
  api_base: {CHAIRLIFT}/v1
  supports_schema: true
- model_id: scripted
  model_name: scripted
  api_base: {SCRIPTED}/v1
  supports_tools: true
"""
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 20} for name in ("name", "country")},
    "required": ["name", "country"],
    "additionalProperties": False,
}


def llm(*arguments: str) -> str:
    done = subprocess.run(["llm", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout.rstrip("\n")


def main() -> None:
    settings = Path.home() / ".llm"
    settings.mkdir()
    os.environ |= {"LLM_USER_PATH": str(settings), "OPENAI_API_KEY": "none"}
    (settings / "extra-openai-models.yaml").write_text(MODELS)
    assert "lift" in llm("models")
    plain = ask()
    same(llm("-m", "lift", "-o", "temperature", "0", QUESTION), plain)
    same(llm("-m", "lift", "-o", "temperature", "0", "--no-stream", QUESTION), plain)
    said = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": plain}]
    more = "And of Italy?"
    expected = chat(*said, {"role": "user", "content": more}, max_tokens=20)
    same(llm("-c", "-o", "temperature", "0", "-o", "max_tokens", "20", more), expected)
    city = json.loads(llm("-m", "lift", "--schema", json.dumps(SCHEMA), "A city."))
    same(sorted(city), ["country", "name"])
    function = "def add(a: int, b: int) -> int:\n    'Add two numbers.'\n    return a + b\n"
    for option in ((), ("--no-stream",)):
        same(llm("-m", "scripted", "--functions", function, *option, ADDED), "It is 42.")


main()
