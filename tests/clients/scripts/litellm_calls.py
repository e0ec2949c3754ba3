"""LiteLLM: chat, streams, tools, responses, embeddings, and Anthropic's messages."""

from __future__ import annotations

import asyncio
import json
import os

from plain import ADDED, CHAIRLIFT, EMBEDDINGS, MODEL, QUESTION, SCRIPTED, ask, post, same

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else prices are fetched, at import
import litellm

ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def main() -> None:
    plain = ask()
    lift = {"model": f"openai/{MODEL}", "api_base": f"{CHAIRLIFT}/v1", "api_key": "none"}
    chat = {**lift, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    answer = litellm.completion(**chat)
    same((answer.choices[0].message.content, answer.choices[0].finish_reason), (plain, "stop"))
    stream = litellm.completion(**chat, stream=True)
    same("".join(chunk.choices[0].delta.content or "" for chunk in stream), plain)

    answer = litellm.responses(**lift, input=QUESTION, temperature=0)
    same(answer.output_text, plain)

    vectors = {"model": f"openai/{EMBEDDINGS}", "api_base": lift["api_base"], "api_key": "none"}
    found = litellm.embedding(**vectors, input=["A lift."]).data[0]["embedding"]
    plainly = post("/v1/embeddings", {"model": EMBEDDINGS, "input": "A lift."})["data"][0]["embedding"]
    assert max(abs(a - b) for a, b in zip(found, plainly, strict=True)) < 1e-6

    messages = {
        "model": f"anthropic/{MODEL}",
        "api_base": CHAIRLIFT,
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 100,
    }
    same(litellm.completion(**messages).choices[0].message.content, plain)
    native = asyncio.run(litellm.anthropic.messages.acreate(**messages))
    same(native["content"][0]["text"], plain)

    for model, base in (("openai/scripted", f"{SCRIPTED}/v1"), ("anthropic/scripted", SCRIPTED)):
        turn = {
            "model": model,
            "api_base": base,
            "api_key": "none",
            "tools": [{"type": "function", "function": ADD}],
        }
        said = [{"role": "user", "content": ADDED}]
        called = litellm.completion(**turn, messages=said).choices[0].message
        (call,) = called.tool_calls
        same((call.function.name, json.loads(call.function.arguments)), ("add", {"a": 19, "b": 23}))
        said += [called.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "42"}]
        same(litellm.completion(**turn, messages=said).choices[0].message.content, "It is 42.")


main()
