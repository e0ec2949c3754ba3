"""What the scripts of coding agents share: running one, and the exchange that each repeats."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from urllib.request import urlopen

from plain import post, script

NOTE = Path("note.txt")
SECRET = "The secret word is walrus."


def write_note() -> None:
    NOTE.write_text(f"{SECRET}\n")


def read_by(tool: str, **arguments: object) -> str:
    """A message to the scripted server: it reads the note by the agent's own tool, and tells the result."""
    return script(tool, arguments, "The file says: {result}")


def run(*command: str, said: str = "", **variables: str) -> str:
    """What the agent printed. Ours are the only variables beside PATH and HOME."""
    done = subprocess.run(
        command, env={**os.environ, **variables}, input=said, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout.strip()


def tells(printed: str) -> None:
    """The agent ran its tool, and the model got the result."""
    told = printed.rpartition("The file says: ")
    assert told[1] and SECRET in told[2], printed


def plainly(base: str) -> str:
    """What the model of a server says without an agent."""
    with urlopen(f"{base}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    content: str = post("/v1/chat/completions", body, base)["choices"][0]["message"]["content"]
    return content
