"""What the scripts share: the servers' addresses, and the same requests without a client library."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.request import Request, urlopen

CHAIRLIFT, SCRIPTED, SENTENCE = (
    os.environ.get(name, "") for name in ("CHAIRLIFT_URL", "SCRIPTED_URL", "SENTENCE_URL")
)
MODEL, EMBEDDINGS = "SmolLM2-135M-Instruct", "all-MiniLM-L6-v2"
QUESTION = "What is the capital of France?"


def script(name: str, arguments: dict[str, Any], said: str) -> str:
    """A message to the scripted server: it calls the tool, and tells the result as `said` has it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"Go on. @@<tool_call>\n{call}\n</tool_call>@@{said}@@"


ADDED = script("add", {"a": 19, "b": 23}, "It is {result}.")


def post(path: str, body: dict[str, Any], base: str = CHAIRLIFT) -> dict[str, Any]:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urlopen(Request(base + path, data, headers), timeout=600) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def chat(*messages: dict[str, Any], **more: Any) -> str:
    """The embedded model's most probable answer."""
    body = {"model": MODEL, "messages": messages, "temperature": 0, **more}
    content: str = post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    return content


def ask(question: str = QUESTION, **more: Any) -> str:
    return chat({"role": "user", "content": question}, **more)


def same(found: object, expected: object) -> None:
    assert found == expected, f"{found!r} instead of {expected!r}"
