"""A client that only counts: many streams of completions at once, in a process of its own.

Says `ready`, reads one line of JSON (port, model, queues of jobs, seconds), and writes what came of
each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from dataclasses import asdict, dataclass, field

ALPHABET = "abcdefghijklmnopqrstuvwxyz "


@dataclass
class Answer:
    """One request as a client saw it. Seconds on the clock that all processes share."""

    started: float
    tokens: list[float] = field(default_factory=list)
    """When each chunk with content arrived."""
    cached: int = 0
    completion: int = 0
    failed: str = ""


def text(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices(ALPHABET, k=length))


async def ask(port: int, prompt: str, max_tokens: int, model: str) -> Answer:
    """One streamed completion; a connection that the server drops is a failed answer."""
    answer = Answer(time.monotonic())
    try:
        await _read(answer, port, prompt, max_tokens, model)
    except OSError as error:
        answer.failed = type(error).__name__
    return answer


async def _read(answer: Answer, port: int, prompt: str, max_tokens: int, model: str) -> None:
    """Reads bytes and counts, without a JSON parser for each chunk."""
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    rest = b""
    with contextlib.closing(writer):
        status = await reader.readline()
        if b" 200 " not in status:
            answer.failed = (status + await reader.read(2000)).decode("utf-8", "replace")[:300]
            return
        while data := await reader.read(2**16):
            now = time.monotonic()
            lines = (rest + data).split(b"\n")
            rest = lines.pop()
            for line in lines:
                if b'"text"' in line and b'"text": ""' not in line and b'"text":""' not in line:
                    answer.tokens.append(now)
                if b'"completion_tokens"' in line:
                    usage = json.loads(line[line.index(b"{") : line.rindex(b"}") + 1]).get("usage") or {}
                    answer.completion = usage.get("completion_tokens", 0)
                    answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if b"[DONE]" in data:
                break
    return answer


Job = tuple[int, int, int]
"""Prompt tokens, answer tokens, seed."""


async def streams(port: int, model: str, queues: list[list[Job]], seconds: float) -> list[Answer]:
    """Each queue is one stream, one request after another; none begins after `seconds`."""
    until = time.monotonic() + seconds

    async def stream(queue: list[Job]) -> list[Answer]:
        answers = []
        for length, tokens, seed in queue:
            if time.monotonic() > until:
                break
            answers.append(await ask(port, text(length, seed), tokens, model))
        return answers

    return [answer for answers in await asyncio.gather(*map(stream, queues)) for answer in answers]


if __name__ == "__main__":
    print("ready", flush=True)
    print(json.dumps([asdict(answer) for answer in asyncio.run(streams(**json.loads(input())))]))
