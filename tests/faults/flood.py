"""Bad input without end, while good requests are on their way: none of it is a 500, and those stay right.

    python -m tests.faults.flood --minutes 5 --seed 1

Bad are requests that were changed in their bytes (also in their heads), bodies one of whose values is
another, and what schemathesis makes up from the description of the API, good and bad.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.faults.exchange import Reply, ask, exchange, letters_after, request_bytes
from tests.faults.fake_server import Options, fake_serving
from tests.faults.load import at_rest
from tests.served.process import Served
from tests.server.harness import MODEL

COMPLETIONS = "/v1/completions"
OPTIONS = Options(model=MODEL, context=512, seqs=64)
"""Whatever is asked ends soon."""
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}, "strict": True}}
GOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": "Hi", "max_tokens": 3, "stop": ["x"], "logprobs": 1, "logit_bias": {"97": 1}}),
    (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 3, "stream": True, "n": 2, "seed": 1}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "tools": [TOOL], "stream": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "response_format": FORM}),
    ("/v1/messages", {"messages": MESSAGES[1:], "max_tokens": 3, "system": "Be brief.", "top_k": 3}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES[1:]}),
    ("/v1/responses", {"input": MESSAGES, "max_output_tokens": 3, "metadata": {"a": "b"}, "stream": True}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 3, "background": True, "tools": []}),
    ("/v1/embeddings", {"input": "Hi", "encoding_format": "base64"}),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/detokenize", {"tokens": [97, 98]}),
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, "", "\0", "x" * 5000),
    *("\ud800", [], {}, [None], [[]], {"": None}, [{}] * 50, {"type": "text"}, [1.5, "a"], "NaN", "user"),
)
NOISE = (
    b"\0",
    b"\r\n",
    b"\n",
    b"\xff",
    b"\r\n\r\n",
    b":",
    b" ",
    b"{",
    b'"',
    b"HTTP/1.1",
    b"\xf0\x9f",
    b"9" * 30,
)
NO_HTTP = "Invalid HTTP request received."
"""All that the server may say of it."""
GOOD_AT_ONCE, TOKENS = 6, 60


def changed_bytes(draw: random.Random, request: bytes) -> bytes:
    """With one to four faults."""
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(request) + 1)
        till = min(len(request), at + draw.choice((0, 1, 1, 8, 400)))
        part = draw.choice(
            (b"", draw.choice(NOISE), draw.randbytes(draw.randint(1, 9)), request[at:till] * 2)
        )
        request = request[:at] + part + request[till:] if draw.random() < 0.8 else request[:at]
    return request


def changed_value(draw: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """Of a value somewhere in it, or of the name of one."""
    body = copy.deepcopy(body)
    place, key = draw.choice(list(_places(body)))
    match draw.randrange(5):
        case 0:
            del place[key]
        case 1 if isinstance(place, dict):
            place[draw.choice(("unknown", "", "type", "role", str(key) + "s"))] = place.pop(key)
        case 2:
            place[key] = [place[key]] * draw.choice((1, 2, 200))
        case _:
            place[key] = draw.choice(ODD)
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


@dataclass
class Flood:
    served: Served
    statuses: Counter[int | None] = field(default_factory=Counter)
    """Of bad requests."""
    faults: list[str] = field(default_factory=list)
    right: int = 0
    """Good answers."""

    async def bad(self, draw: random.Random) -> None:
        """One request."""
        path, body = draw.choice(GOOD)
        body = {"model": MODEL, **body}
        if draw.random() < 0.5:
            request = changed_bytes(draw, request_bytes(path, body))
            self.take(await exchange(self.served.port, request, hang_up=True), request)
            return
        request = request_bytes(path, changed_value(draw, body))
        reply = await exchange(self.served.port, request)
        self.take(reply, request)
        if reply.end in ("cut", "unanswered"):
            self.faults.append(f"{reply.end}: {request!r}")
        elif reply.status != 200 and not _is_error(reply):
            self.faults.append(f"no error in {reply!r}: {request!r}")

    async def good(self, number: int) -> None:
        """One request."""
        prompt, streamed = f"Letter {number}:", number % 2 == 0
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": streamed}
        reply = await ask(self.served.port, COMPLETIONS, body)
        if reply.end == "answered" and reply.text == letters_after(prompt, TOKENS):
            self.right += 1
        else:
            self.faults.append(f"not right: {reply!r}")

    def take(self, reply: Reply, request: bytes) -> None:
        self.statuses[reply.status] += 1
        if reply.status is not None and reply.status >= 500 or b'"server_error"' in reply.body:
            self.faults.append(f"{reply.status}: {request!r} {reply.body[:300]!r}")

    async def run(self, seed: int, goes_on: Callable[[], bool], clients: int) -> None:
        """Ask as long as it goes on."""

        async def bad(draw: random.Random) -> None:
            while goes_on():
                await self.bad(draw)

        async def good(first: int) -> None:
            number = first
            while goes_on():
                await self.good(number)
                number += GOOD_AT_ONCE

        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(bad(random.Random(seed * 1000 + number)))
            for number in range(GOOD_AT_ONCE):
                group.create_task(good(number))
        await at_rest(self.served.port)

    def made_up(self, goes_on: Callable[[], bool]) -> None:
        """By schemathesis, from the description. Blocks."""
        import schemathesis
        from hypothesis import HealthCheck, Phase, given, settings

        from chairlift.server.wire.messages import CountTokensRequest
        from tests.server.openapi.test_schemathesis import DISTINCT, SCHEMA

        def call(case: schemathesis.Case) -> None:
            if not goes_on():
                return
            response = case.call(base_url=self.served.url, timeout=60)
            self.take(Reply(response.status_code, response.content, True), repr(case).encode())

        run = settings(
            max_examples=20,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        while goes_on():
            for operation in DISTINCT:
                if not goes_on():
                    return
                if operation.path in ("/v1/models/load", "/v1/models/unload"):
                    continue  # the model is to stay
                described = SCHEMA[operation.path][operation.method.upper()]
                for mode in schemathesis.GenerationMode:
                    negative = mode is schemathesis.GenerationMode.NEGATIVE
                    if negative and operation.body in (None, CountTokensRequest):
                        continue  # of the latter, making up takes minutes
                    run(given(described.as_strategy(generation_mode=mode))(call))()


def _is_error(reply: Reply) -> bool:
    try:
        return isinstance(reply.json["error"], dict)
    except (json.JSONDecodeError, KeyError, TypeError):
        return False


async def _both(flood: Flood, seed: int, minutes: float, clients: int) -> None:
    end = time.monotonic() + 60 * minutes

    def goes_on() -> bool:
        return time.monotonic() < end

    making_up = asyncio.create_task(asyncio.to_thread(flood.made_up, goes_on))
    await flood.run(seed, goes_on, clients)
    await making_up


def main() -> int:
    options = argparse.ArgumentParser(description="Bad input without end; do good requests stay right?")
    options.add_argument("--minutes", type=float, default=5)
    options.add_argument("--clients", type=int, default=16)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    with fake_serving(OPTIONS) as served:
        flood = Flood(served)
        before = served.resident_bytes()
        asyncio.run(_both(flood, given.seed, given.minutes, given.clients))
        after = served.resident_bytes()
        served.process.terminate()
        code, said = served.exit_code(), set(served.complaints.splitlines()) - {NO_HTTP}
    statuses = sorted(flood.statuses.items(), key=lambda each: each[0] or 0)
    print("bad:", flood.statuses.total(), dict(statuses), "good and right:", flood.right)
    print("faults:", len(flood.faults), *flood.faults[:10], sep="\n")
    print(
        f"resident MiB: {before / 2**20:.1f}, {after / 2**20:.1f}; exit code {code}; said {sorted(said)[:20]}"
    )
    return bool(flood.faults or code or said)


if __name__ == "__main__":
    raise SystemExit(main())
