"""How many chunks a second the server makes: `python bench/events.py`.

Everything between the runner and the socket (scheduler, text, parser, encoder, server-sent events) over a
runner that draws letters at once, for streams of one chunk a token. What is counted is this process's
processor time, so other work on the machine does not show."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from chairlift.engine.engine import Engine, EngineConfig
from chairlift.server.app import create_app
from chairlift.server.metrics import ServerMetrics
from chairlift.server.settings import ServerSettings
from tests.fakes import FakeRunner, fake_model


async def stream(app: object, body: bytes) -> int:
    """Chunks of one streamed answer."""
    assert callable(app)
    chunks = 0
    sent = asyncio.Event()

    async def receive() -> dict[str, object]:
        if not sent.is_set():
            sent.set()
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, object]) -> None:
        nonlocal chunks
        data = message.get("body", b"")
        assert isinstance(data, bytes)
        chunks += data.count(b"data: {")

    headers = [(b"content-type", b"application/json"), (b"host", b"bench")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await app(scope, receive, send)
    return chunks


async def run(streams: int, tokens: int) -> tuple[int, float]:
    metrics = ServerMetrics()
    engine = Engine(
        fake_model(FakeRunner()), EngineConfig(streams, 4096, streams), observer=metrics.model("fake")
    )
    metrics.model("fake").watch(engine)
    await engine.start()
    app = create_app(engine, ServerSettings(), metrics)
    messages = [{"role": "user", "content": "Go on."}]
    body = {"model": "fake", "messages": messages, "max_tokens": tokens, "stream": True, "temperature": 0}
    started = time.process_time()
    counts = await asyncio.gather(*(stream(app, json.dumps(body).encode()) for _ in range(streams)))
    spent = time.process_time() - started
    await engine.stop()
    return sum(counts), spent


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    return parser.parse_args(argv)


def main() -> int:
    arguments = parse()
    chunks, spent = asyncio.run(run(arguments.streams, arguments.tokens))
    print(f"{chunks} chunks in {spent:.2f} s of processor time: {chunks / spent:,.0f} a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
