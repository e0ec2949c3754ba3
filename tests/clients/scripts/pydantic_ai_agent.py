"""pydantic-ai: an agent that answers, calls a tool, and fills a model, over both APIs."""

from __future__ import annotations

import asyncio

from plain import ADDED, CHAIRLIFT, MODEL, QUESTION, SCRIPTED, ask, same
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    name: str = Field(max_length=20)
    country: str = Field(max_length=20)


async def main() -> None:
    real = OpenAIProvider(base_url=f"{CHAIRLIFT}/v1", api_key="none")
    scripted = OpenAIProvider(base_url=f"{SCRIPTED}/v1", api_key="none")
    plain = await asyncio.to_thread(ask)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=real)
        agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 200})
        same((await agent.run(QUESTION)).output, plain)
        async with agent.run_stream(QUESTION) as stream:
            same([text async for text in stream.stream_text(debounce_by=None)][-1], plain)
        for output in (NativeOutput(City), ToolOutput(City)):
            filled = await agent.run("Name a city.", output_type=output)
            assert isinstance(filled.output, City)
            print(kind.__name__, type(output).__name__, filled.output)

        adder = Agent(kind("scripted", provider=scripted), instructions="You add.")
        calls = []

        @adder.tool_plain
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            calls.append((a, b))  # noqa: B023
            return a + b

        same((await adder.run(ADDED)).output, "It is 42.")
        async with adder.run_stream(ADDED) as stream:
            same(await stream.get_output(), "It is 42.")
        same(calls, [(19, 23)] * 2)


asyncio.run(main())
