"""OpenAI's Agents SDK: an answer, and an agent with a tool, whole and streamed, over both APIs."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from plain import ADDED, CHAIRLIFT, MODEL, QUESTION, SCRIPTED, ask, same


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    set_tracing_disabled(True)
    real = AsyncOpenAI(base_url=f"{CHAIRLIFT}/v1", api_key="none")
    scripted = AsyncOpenAI(base_url=f"{SCRIPTED}/v1", api_key="none")
    plain = await asyncio.to_thread(ask)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent("Guide", model=kind(MODEL, real), model_settings=ModelSettings(temperature=0))
        same((await Runner.run(agent, QUESTION)).final_output, plain)
        adder = Agent("Adder", instructions="You add.", model=kind("scripted", scripted), tools=[add])
        same((await Runner.run(adder, ADDED)).final_output, "It is 42.")
        running = Runner.run_streamed(adder, ADDED)
        kinds = [event.type async for event in running.stream_events()]
        assert "raw_response_event" in kinds
        same(running.final_output, "It is 42.")


asyncio.run(main())
