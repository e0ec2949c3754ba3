"""What the engine's tests share: an engine over a fake runner, and ways to wait for it without sleeping."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from chairlift.engine.engine import Engine, EngineConfig, EngineObserver, RequestHandle
from chairlift.engine.events import Event, Failed, Finished, TextDelta
from chairlift.engine.plan import NewRow
from chairlift.engine.prefix.vocabulary import PrefixSpec
from chairlift.engine.request import Request, SamplingParams
from tests.fake_tokenizer import FakeTokenizer
from tests.fakes import Draw, FakeRow, FakeRunner, fake_model, letters


@asynccontextmanager
async def started(
    runner: FakeRunner,
    config: EngineConfig | None = None,
    *,
    tokenizer: FakeTokenizer | None = None,
    observer: EngineObserver | None = None,
    context_length: int = 4096,
    prefix: PrefixSpec | None = None,
) -> AsyncIterator[Engine]:
    """A running engine. Afterwards it is stopped; the runner must hold nothing and complain of nothing."""
    factory = fake_model(runner, tokenizer, context_length=context_length, prefix=prefix)
    engine = Engine(factory, config, observer=observer)
    await engine.start()
    await settled(engine)
    try:
        yield engine
    finally:
        runner.open_gate()
        await engine.stop()
    assert runner.violations == []
    assert runner.closed and not engine.wedged
    assert len(runner.released) == len(set(runner.released))


def request(
    prompt: str | Sequence[int] = "prompt", sampling: SamplingParams | None = None, **fields: object
) -> Request:
    """Greedy and of 8 tokens unless told otherwise."""
    tokens = tuple(prompt.encode() if isinstance(prompt, str) else prompt)
    values: dict[str, object] = {"temperature": 0, "max_tokens": 8, **fields}
    return Request("test", tokens, sampling or SamplingParams(**values))  # type: ignore[arg-type]


async def events(handle: RequestHandle) -> list[Event]:
    """All events; there is exactly one terminal one, and it is the last."""
    found = [event async for event in handle]
    assert [isinstance(event, Finished | Failed) for event in found] == [False] * (len(found) - 1) + [True]
    return found


async def end(handle: RequestHandle) -> Finished | Failed:
    event = (await events(handle))[-1]
    assert not isinstance(event, TextDelta)
    return event


def tokens(found: list[Event]) -> list[int]:
    return [token for event in found if isinstance(event, TextDelta) for token in event.token_ids]


def text(found: list[Event]) -> str:
    return "".join(event.text for event in found if isinstance(event, TextDelta))


def solo(asked: Request, count: int, draw: Draw = letters, seed: int = 0) -> list[int]:
    """The tokens that the fake draws for the request alone."""
    row = FakeRow(NewRow(0, asked.sampling, seed), [*asked.prompt_token_ids])
    for _ in range(count):
        row.tokens.append(draw(row))
        row.drawn += 1
    return row.tokens[len(asked.prompt_token_ids) :]


async def settled(engine: Engine) -> None:
    """Until the engine has nothing to do. Each turn waits for what the MLX thread has been given."""
    while engine.stats().busy:
        assert engine._thread is not None
        await engine._thread.run(lambda: None)
