"""Many streams at once for minutes: is anything lost, is anything a 500, does memory stay flat?

    python -m tests.faults.load --model fake --streams 200 --minutes 10
    python -m tests.faults.load --model real --streams 16 --minutes 10

Every client asks again and again, as long as it likes and over a connection of its own: streams and whole
answers of any length, of which some are left in the middle, some before they begin, and some cancelled by
name. What is answered must be right: the fake model's letters are known, and the real model must say the same
to the same prompt each time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tests.faults.exchange import Body, Reply, ask, exchange, letters_after, request_bytes
from tests.faults.fake_server import Options, fake_serving
from tests.served.process import MODEL, PATIENCE, Served, serving

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
WARM_UP = 0.2
"""Of the time, in which buffers and kept prefixes fill their bounds."""
MIB = 2**20
SLACK, SHARE = 24 * MIB, 0.03
"""Memory is flat if the median of its last third is above that of its first by no more than both."""


@dataclass(frozen=True)
class Size:
    """Of what is asked: prompts to choose from, and bounds of tokens."""

    model: str
    prompts: int
    tokens: tuple[int, int]
    letters: bool
    """Answers are the fake model's."""


SIZES = {"fake": Size("fake", 10**6, (1, 400), True), "real": Size(MODEL, 24, (1, 48), False)}


@dataclass
class Load:
    served: Served
    size: Size
    asked: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    """How those ended that nobody left: `answered` alone is right."""
    wrong: list[str] = field(default_factory=list)
    resident: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since the beginning, and bytes."""
    tokens: int = 0
    """Of whole answers."""
    _said: dict[str, str] = field(default_factory=dict)

    async def run(self, seconds: float, streams: int, every: float) -> None:
        begun = time.monotonic()
        watching = asyncio.create_task(self._watch(begun, every))
        await asyncio.gather(*(self._client(random.Random(seed), begun + seconds) for seed in range(streams)))
        watching.cancel()

    async def _watch(self, begun: float, every: float) -> None:
        while True:
            resident = await asyncio.to_thread(self.served.resident_bytes)
            self.resident.append((time.monotonic() - begun, resident))
            await asyncio.sleep(every)

    async def _client(self, draw: random.Random, until: float) -> None:
        kinds: Sequence[Callable[[random.Random], Coroutine[None, None, None]]] = (
            *[self._streamed] * 8,
            *[self._whole] * 2,
            *[self._chat] * 2,
            *[self._left] * 3,
            self._early,
            self._cancelled,
        )
        while time.monotonic() < until:
            kind = draw.choice(kinds)
            await kind(draw)
            self.asked[kind.__name__.lstrip("_")] += 1

    def _completion(self, draw: random.Random, **more: object) -> tuple[str, int, Body]:
        prompt, count = f"Letter {draw.randrange(self.size.prompts)}:", draw.randint(*self.size.tokens)
        body = {"model": self.size.model, "prompt": prompt, "max_tokens": count}
        return prompt, count, {**body, "temperature": 0, "ignore_eos": True, **more}

    async def _streamed(self, draw: random.Random) -> None:
        prompt, count, body = self._completion(draw, stream=True)
        self._take(prompt, count, await ask(self.served.port, COMPLETIONS, body))

    async def _whole(self, draw: random.Random) -> None:
        prompt, count, body = self._completion(draw)
        self._take(prompt, count, await ask(self.served.port, COMPLETIONS, body))

    async def _chat(self, draw: random.Random) -> None:
        prompt, count, body = self._completion(draw, stream=True, messages=[], n=2)
        said = {"role": "user", "content": prompt}
        body = {name: value for name, value in body.items() if name != "prompt"} | {"messages": [said]}
        reply = await ask(self.served.port, CHAT, body)
        self._end(reply)
        if reply.end == "answered":
            self._hold_against(f"chat: {prompt}", reply.text, count)
            self.tokens += 2 * count

    async def _left(self, draw: random.Random) -> None:
        """In the middle."""
        _, _, body = self._completion(draw, stream=True, max_tokens=4000)
        reply = await ask(self.served.port, COMPLETIONS, body, events=draw.randint(1, 40))
        if reply.status != 200:
            self._end(reply)

    async def _early(self, draw: random.Random) -> None:
        """Before it can begin."""
        _, _, body = self._completion(draw, stream=True, max_tokens=4000)
        await ask(self.served.port, COMPLETIONS, body, events=0)

    async def _cancelled(self, draw: random.Random) -> None:
        """By name, from another connection."""
        body = {"model": self.size.model, "input": "On and on", "background": True, "ignore_eos": True}
        begun = await ask(self.served.port, RESPONSES, {**body, "max_output_tokens": 4000})
        if begun.end != "answered":
            self._end(begun)
            return
        path = f"{RESPONSES}/{begun.json['id']}"
        for request in (request_bytes(f"{path}/cancel", {}), request_bytes(path, method="DELETE")):
            reply = await exchange(self.served.port, request)
            self._end(reply)
            if reply.end == "answered" and reply.json.get("status", "cancelled") != "cancelled":
                self.wrong.append(f"cancelled: {reply.json['status']}")

    def _end(self, reply: Reply) -> None:
        self.ends[reply.end] += 1
        if reply.end != "answered":
            self.wrong.append(f"{reply.end}: {reply.status}, {len(reply.body)} bytes, {reply.body[-200:]!r}")

    def _take(self, prompt: str, count: int, reply: Reply) -> None:
        self._end(reply)
        if reply.end != "answered":
            return
        self.tokens += count
        if not self.size.letters:
            self._hold_against(prompt, reply.text, count)
        elif (right := letters_after(prompt, count)) != reply.text:
            self.wrong.append(f"{prompt} {reply.text!r} is not {right!r}")

    def _hold_against(self, prompt: str, text: str, count: int) -> None:
        """The same prompt was answered before, shorter or longer (and perhaps cut within a character)."""
        text = text.rstrip("\ufffd")
        before = self._said.setdefault(prompt, text)
        if not (before.startswith(text) or text.startswith(before)):
            self.wrong.append(f"{prompt} {text!r} is not {before!r}")
        self._said[prompt] = max(before, text, key=len)


@dataclass(frozen=True)
class Memory:
    """Of the process, in bytes: at the beginning and at the end, medians of the first and last third after
    the warm-up, and what it grows by in a minute by the least squares."""

    start: int
    end: int
    first: float
    last: float
    per_minute: float

    @property
    def flat(self) -> bool:
        return self.last - self.first <= SLACK + SHARE * self.first


def memory_of(resident: Sequence[tuple[float, int]]) -> Memory:
    counted = [each for each in resident if each[0] >= WARM_UP * resident[-1][0]]
    values = [size for _, size in counted]
    third = max(1, len(values) // 3)
    slope = 60 * statistics.linear_regression(*zip(*counted, strict=True)).slope if len(counted) > 1 else 0.0
    first, last = statistics.median(values[:third]), statistics.median(values[-third:])
    return Memory(resident[0][1], resident[-1][1], first, last, slope)


async def at_rest(port: int) -> bool:
    """Nothing of all the requests is left: it must come."""
    async with asyncio.timeout(PATIENCE):
        while True:
            reply = await exchange(port, request_bytes("/health", method="GET"))
            if not (reply.json["busy"] or reply.json["running"] or reply.json["waiting"]):
                return True
            await asyncio.sleep(0.05)


def server_of(model: str, streams: int) -> AbstractContextManager[Served]:
    if model == "fake":
        return fake_serving(Options(seqs=streams, step_ms=5))
    # Kept prefixes fill their bound before the warm-up ends.
    return serving("--max-num-seqs", str(streams), "--prefix-cache-ram", "32MB")


async def load(served: Served, model: str, seconds: float, streams: int, every: float = 2.0) -> Load:
    work = Load(served, SIZES[model])
    await work.run(seconds, streams, every)
    await at_rest(served.port)
    return work


def main() -> int:
    options = argparse.ArgumentParser(description="Many streams at once; nothing lost, memory flat?")
    options.add_argument("--model", choices=list(SIZES), default="fake")
    options.add_argument("--streams", type=int, default=200)
    options.add_argument("--minutes", type=float, default=10)
    given = options.parse_args()
    with server_of(given.model, given.streams) as served:
        work = asyncio.run(load(served, given.model, 60 * given.minutes, given.streams))
        served.process.terminate()
        code, said = served.exit_code(), served.complaints
    memory = memory_of(work.resident)
    print("asked:", dict(work.asked), work.asked.total())
    print("ends:", dict(work.ends), "tokens of whole answers:", work.tokens)
    print("wrong:", len(work.wrong), *work.wrong[:3])
    print(f"memory, MiB: {memory.start / MIB:.1f} at the beginning, {memory.end / MIB:.1f} at the end;")
    print(f"  first third {memory.first / MIB:.1f}, last third {memory.last / MIB:.1f},", end=" ")
    print(f"{memory.per_minute / MIB:+.3f} a minute: {'flat' if memory.flat else 'GROWS'}")
    print("exit code:", code, "said:", repr(said[:500]))
    good = set(work.ends) == {"answered"} and not work.wrong and memory.flat
    return not (good and code == 0 and not said)


if __name__ == "__main__":
    raise SystemExit(main())
