"""`chairlift generate`"""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from typing import Annotated

import typer

from chairlift.engine.engine import Engine, EngineConfig
from chairlift.engine.events import Failed, Finished, TextDelta
from chairlift.engine.request import Request, SamplingParams
from chairlift.server.configuration.types import FloatType, LogFormat, LogLevel
from chairlift.server.observe.logs import set_up_logging


def generate(
    prompt: Annotated[
        str, typer.Argument(help="The prompt; - reads it from standard input.", metavar="PROMPT")
    ],
    model: Annotated[
        str | None, typer.Option(help="As for serve; left out, the small embedded model.", show_default=False)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens to generate.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Draw the same answer again.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="Through the model's chat template, or as it is.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        FloatType | None, typer.Option(help="Type of the weights; by default what suits the device.")
    ] = None,
) -> None:
    """Answer one prompt, streamed, without a server. Uses the chat template if the model has one."""
    set_up_logging(LogLevel.ERROR, LogFormat.PRETTY)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    asyncio.run(_answer(text, model, dtype, chat, sampling))


async def _answer(
    prompt: str, model: str | None, dtype: str | None, chat: bool | None, sampling: SamplingParams
) -> None:
    from chairlift.engine.models.loader import load_model
    from chairlift.engine.models.resolve import resolve_model

    source = resolve_model(model, dtype=dtype)
    factory = functools.partial(load_model, source.folder, source.served_name, dtype=dtype)
    engine = Engine(factory, EngineConfig(max_num_seqs=1))
    await engine.start()
    try:
        tokenizer = engine.tokenizer
        if tokenizer.has_chat_template if chat is None else chat:
            tokens = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        else:
            tokens = tokenizer.encode(prompt)
        await _stream(engine, Request("generate", tuple(tokens), sampling))
    finally:
        await engine.stop()


async def _stream(engine: Engine, request: Request) -> None:
    """Write the answer to stdout as it comes; at a terminal, its speed after it."""
    started = time.perf_counter()
    async with engine.submit(request) as handle:
        async for event in handle:
            match event:
                case TextDelta():
                    typer.echo(event.text, nl=False)
                    sys.stdout.flush()
                case Failed():
                    raise event.error
                case Finished():
                    typer.echo()
                    spent = time.perf_counter() - started
                    made = event.usage.completion_tokens
                    if sys.stderr.isatty():
                        typer.echo(f"[{made} tokens, {made / spent:.1f} tok/s, {event.reason}]", err=True)
