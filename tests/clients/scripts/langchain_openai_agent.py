"""LangChain: chat, streams, structured answers, embeddings, and an agent with a tool, over both APIs."""

from __future__ import annotations

import json

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from plain import ADDED, CHAIRLIFT, EMBEDDINGS, MODEL, QUESTION, SCRIPTED, ask, post, same
from pydantic import BaseModel, SecretStr

KEY = SecretStr("none")


class City(BaseModel):
    """A city."""

    name: str
    country: str


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def main() -> None:
    model = ChatOpenAI(base_url=f"{CHAIRLIFT}/v1", api_key=KEY, model=MODEL, temperature=0)
    plain = ask()
    answer = model.invoke(QUESTION)
    same(answer.content, plain)
    same(answer.response_metadata["finish_reason"], "stop")
    assert answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0
    same("".join(str(chunk.content) for chunk in model.stream(QUESTION)), plain)
    same([answer.content for answer in model.batch([QUESTION] * 3)], [plain] * 3)

    responses = ChatOpenAI(
        base_url=f"{CHAIRLIFT}/v1", api_key=KEY, model=MODEL, temperature=0, use_responses_api=True
    )
    same(responses.invoke(QUESTION).text, plain)
    same("".join(chunk.text for chunk in responses.stream(QUESTION)), plain)

    city = model.with_structured_output(City, method="json_schema").invoke("Name a city.", max_tokens=200)
    assert isinstance(city, City), city

    vectors = OpenAIEmbeddings(
        base_url=f"{CHAIRLIFT}/v1", api_key=KEY, model=EMBEDDINGS, check_embedding_ctx_length=False
    )
    plainly = post("/v1/embeddings", {"model": EMBEDDINGS, "input": "A lift."})["data"][0]["embedding"]
    found = vectors.embed_query("A lift.")
    assert max(abs(a - b) for a, b in zip(found, plainly, strict=True)) < 1e-6

    for api in (False, True):
        scripted = ChatOpenAI(base_url=f"{SCRIPTED}/v1", api_key=KEY, model="scripted", use_responses_api=api)
        agent = create_agent(scripted, [add], system_prompt="You add.")
        messages = agent.invoke({"messages": [{"role": "user", "content": ADDED}]})["messages"]
        called, result, told = messages[-3:]
        assert isinstance(called, AIMessage) and isinstance(result, ToolMessage)
        same([(call["name"], call["args"]) for call in called.tool_calls], [("add", {"a": 19, "b": 23})])
        same((json.loads(str(result.content)), told.text), (42, "It is 42."))
        steps = list(agent.stream({"messages": [{"role": "user", "content": ADDED}]}, stream_mode="messages"))
        assert "".join(part.text for part, _ in steps).endswith("It is 42.")


main()
