"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import httpx
import pytest

from tests.fake_tokenizer import END, SPECIALS, START, FakeTokenizer
from tests.server.harness import JSON, MODEL, Lift, error_of, lift


async def tokenize(running: Lift, **body: object) -> httpx.Response:
    return await running.client.post("/tokenize", json=body)


async def test_a_prompt() -> None:
    async with lift(context_length=100) as running:
        answer = await tokenize(running, model=MODEL, prompt="Hi é")
        assert answer.json() == {
            "count": 5,
            "max_model_len": 100,
            "tokens": [72, 105, 32, 195, 169],
            "token_strs": None,
        }
        assert (await tokenize(running, prompt="")).json()["tokens"] == []


async def test_special_tokens_are_added_to_a_prompt_unless_not_wanted() -> None:
    class Marking(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [256] * add_special_tokens + super().encode(text)

    async with lift(tokenizer=Marking()) as running:
        for given, tokens in ({}, [256, 72]), ({"add_special_tokens": True}, [256, 72]):
            assert (await tokenize(running, prompt="H", **given)).json()["tokens"] == tokens
        assert (await tokenize(running, prompt="H", add_special_tokens=False)).json()["tokens"] == [72]


async def test_strings_of_tokens() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    async with lift() as running:
        answer = (await tokenize(running, messages=messages, return_token_strs=True)).json()
        assert answer["token_strs"][:2] == [SPECIALS[START], "u"]
        assert len(answer["token_strs"]) == answer["count"] == len(answer["tokens"])


async def test_messages_give_the_tokens_that_a_chat_prefills() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    async with lift() as running:
        tokens = (await tokenize(running, messages=messages)).json()["tokens"]
        chat = await running.chat(messages=messages, max_tokens=1)
        assert chat.json()["usage"]["prompt_tokens"] == len(tokens)
        asked = [span.tokens for plan in running.runner.plans for span in plan.prefill][-1]
        assert list(asked) == tokens
        shorter = (await tokenize(running, messages=messages, add_generation_prompt=False)).json()["tokens"]
        assert shorter == tokens[: len(shorter)] and shorter[-2:] == [END, ord("\n")]
        await tokenize(running, messages=messages, chat_template_kwargs={"enable_thinking": False})
        assert running.tokenizer.template_arguments[-1]["enable_thinking"] is False


async def test_tools_reach_the_template_as_in_a_chat() -> None:
    tool = {"type": "function", "function": {"name": "lift", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": "Hi"}]
    async with lift() as running:
        await tokenize(running, messages=messages, tools=[tool])
        await running.chat(messages=messages, tools=[tool], max_tokens=1)
        tokenized, chatted = running.tokenizer.template_arguments[-2:]
        assert tokenized == chatted
        assert "lift" in str(tokenized["tools"])
        refused = await tokenize(running, messages=messages, tools=[tool, tool])
        assert error_of(refused, 400)["param"] == "tools[1].function.name"
        assert error_of(await tokenize(running, prompt="a", tools=[tool]), 400)["param"] == "tools"


async def test_detokenize_is_the_way_back() -> None:
    async with lift() as running:
        text = "Grüße, 世界 \U0001f600"
        tokens = (await tokenize(running, prompt=text)).json()["tokens"]
        answer = await running.client.post("/detokenize", json={"model": MODEL, "tokens": tokens})
        assert answer.json() == {"prompt": text}
        answer = await running.client.post("/detokenize", json={"tokens": [START, 72, END]})
        assert answer.json() == {"prompt": "<|im_start|>H<|im_end|>"}


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("tokenize", {"messages": []}, 400, "messages"),
        ("tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("tokenize", {"prompt": "a" * (10 * 256 + 1)}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("tokenize", {"messages": [IMAGE]}, 400, "messages[0].content[0]"),
        (
            "tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            400,
            "add_special_tokens",
        ),
        ("tokenize", {"prompt": "a", "chat_template": "{{ x }}"}, 400, "chat_template"),
        ("tokenize", {"prompt": "a", "tempo": 1}, 400, "tempo"),
        ("detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
        ("detokenize", {}, 400, "tokens"),
        ("detokenize", {"tokens": [1, 999]}, 400, "tokens[1]"),
        ("detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("detokenize", {"tokens": [1.5]}, 400, "tokens[0]"),
        ("detokenize", {"tokens": [1] * 11}, 400, "tokens"),
    ],
)
async def test_refusals(path: str, body: JSON, status: int, param: str) -> None:
    async with lift(context_length=10) as running:
        answer = await running.client.post(f"/{path}", json=body)
        assert error_of(answer, status)["param"] == param


async def test_a_template_that_refuses_is_a_400() -> None:
    async with lift(tokenizer=FakeTokenizer(refuse="No systems here.")) as running:
        answer = await tokenize(running, messages=[{"role": "user", "content": "a"}])
        assert error_of(answer, 400)["message"] == "No systems here."
