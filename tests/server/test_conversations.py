"""Conversations of every form over HTTP, into templates that refuse some of them."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.engine.chat.templates import FAMILIES, GEMMA, QWEN3
from tests.fake_tokenizer import FakeTokenizer
from tests.fakes import FakeRunner, answering
from tests.server.harness import JSON, MODEL, Lift, error_of, lift

TEXT = {"type": "text", "text": "one"}


def user(content: object, **more: object) -> JSON:
    return {"role": "user", "content": content, **more}


def assistant(content: object, **more: object) -> JSON:
    return {"role": "assistant", "content": content, **more}


def prompt_of(server: Lift) -> str:
    """The prompt that was prefilled last."""
    row = max(new.row for plan in server.runner.plans for new in plan.admit)
    spans = [span for plan in server.runner.plans for span in plan.prefill if span.row == row]
    return bytes(token for span in spans for token in span.tokens if token < 256).decode()


async def prompt(family: str, *messages: JSON, **more: object) -> str:
    tokenizer = FakeTokenizer(jinja=FAMILIES.get(family, family))
    async with lift(FakeRunner(answering("ok")), tokenizer=tokenizer) as server:
        response = await server.chat(messages=list(messages), **more)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] == "ok"
        return prompt_of(server)


async def test_what_coding_agents_send() -> None:
    """A system message in mid-conversation, calls with null content, results out of order, an empty list."""
    calls = [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": '{"x": 1}'}}
        for name in "fg"
    ]
    text = await prompt(
        "mistral",
        {"role": "system", "content": "sys"},
        user([TEXT, {"type": "input_text", "text": "two", "cache_control": {"type": "ephemeral"}}]),
        assistant(None, tool_calls=calls),
        {"role": "tool", "tool_call_id": "call_g", "content": "of g"},
        {"role": "tool", "tool_call_id": "call_f", "content": []},
        assistant([{"type": "output_text", "text": "done", "annotations": [], "logprobs": []}]),
        {"role": "developer", "content": "later"},
        user("three"),
    )
    assert text.startswith("[INST]one\ntwo[/INST][TOOL_CALLS][")
    assert text.index('{"content": , ') < text.index('{"content": of g, ')
    assert text.endswith("done[INST]sys\n\nlater\n\nthree[/INST]")


async def test_an_answer_is_gone_on_with_unless_the_client_says_otherwise() -> None:
    said = [user("a"), assistant("It is ")]
    gemma = "<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nIt is"
    assert await prompt("gemma", *said) == gemma + " "
    assert await prompt("gemma", *said, continue_final_message=True) == gemma + " "
    assert (
        await prompt("gemma", *said, add_generation_prompt=False, continue_final_message=True) == gemma + " "
    )
    new_turn = gemma + "<end_of_turn>\n<start_of_turn>model\n"
    assert await prompt("gemma", *said, add_generation_prompt=True) == new_turn
    assert await prompt("gemma", *said, continue_final_message=False) == new_turn
    neither = await prompt("gemma", *said, add_generation_prompt=False, continue_final_message=False)
    assert neither == gemma + "<end_of_turn>\n"
    assert (await prompt("qwen3", user("a"), assistant("b"))).endswith("<think>\n\n</think>\n\nb")
    assert await prompt("phi", user("Once upon"), continue_final_message=True) == "<|user|>Once upon"
    called = assistant("", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])
    assert (await prompt("qwen3", user("a"), called)).endswith("<|im_start|>assistant\n")
    async with lift(tokenizer=FakeTokenizer(jinja=GEMMA)) as server:
        both = await server.chat(messages=said, continue_final_message=True, add_generation_prompt=True)
        assert error_of(both, 400)["param"] == "continue_final_message"
        error = error_of(await server.chat(messages=[user("a"), called], continue_final_message=True), 400)
        assert error["param"] == "continue_final_message"


async def test_the_end_of_the_prompt_on_the_other_surfaces() -> None:
    said = [user("a"), assistant("It is")]
    async with lift(FakeRunner(answering("ok")), tokenizer=FakeTokenizer(jinja=GEMMA)) as server:
        body = {"model": MODEL, "max_tokens": 5, "system": "sys", "messages": said}
        assert (await server.client.post("/v1/messages", json=body)).status_code == 200
        assert prompt_of(server) == (
            "<start_of_turn>user\nsys\n\na<end_of_turn>\n<start_of_turn>model\nIt is"
        )
        response = await server.client.post("/v1/responses", json={"model": MODEL, "input": said})
        assert response.status_code == 200, response.text
        assert prompt_of(server).endswith("It is<end_of_turn>\n<start_of_turn>model\n")


async def test_thoughts_of_earlier_turns() -> None:
    thoughts: list[JSON] = [
        assistant("b", reasoning_content="hm"),
        assistant("b", reasoning="hm"),
        assistant([{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "b"}]),
    ]
    for thought in thoughts:
        assert (await prompt("qwen3", user("a"), thought)).endswith("<think>\nhm\n</think>\n\nb")
    async with lift() as server:
        error = error_of(await server.chat(messages=[user([{"type": "thinking", "thinking": "hm"}])]), 400)
        assert error["param"] == "messages[0].content[0]"


async def test_names_and_documents() -> None:
    assert await prompt("phi", user("hi", name="ann")) == "<|user|>ann: hi<|end|><|assistant|>"
    documents = [{"title": "T", "text": "words"}]
    assert await prompt("parts", user("a"), documents=documents) == "<user>a[T: words]<assistant>"
    assert await prompt("phi", user("a"), documents=[]) == "<|user|>a<|end|><|assistant|>"
    async with lift(tokenizer=FakeTokenizer(jinja=QWEN3)) as server:
        error = error_of(await server.chat(documents=documents), 400)
        assert error["param"] == "documents" and "no place for documents" in str(error["message"])
        assert error_of(await server.chat(documents=[{"title": 1}]), 400)["param"] == "documents[0].title"


async def test_variables_that_the_template_does_not_read_are_refused() -> None:
    thinking: JSON = {"enable_thinking": False}
    assert (await prompt("qwen3", user("a"), chat_template_kwargs=thinking)).endswith("</think>\n\n")
    assert (await prompt("phi", user("a"), chat_template_kwargs=thinking)).endswith("<|assistant|>")
    async with lift(tokenizer=FakeTokenizer(jinja=GEMMA)) as server:
        error = error_of(await server.chat(chat_template_kwargs={"enable_thinking": True}), 400)
    assert error["param"] == "chat_template_kwargs.enable_thinking"
    assert error["code"] == "unsupported_parameter"


async def test_a_refusal_that_nothing_mends_is_in_the_templates_words() -> None:
    async with lift(tokenizer=FakeTokenizer(jinja="{{ raise_exception('Not on a Monday.') }}")) as server:
        error = error_of(await server.chat(messages=[{"role": "system", "content": "a"}, user("b")]), 400)
    assert str(error["message"]).endswith("refused: Not on a Monday.")
    assert (error["param"], error["code"]) == ("messages", "invalid_value")
    async with lift(tokenizer=FakeTokenizer(jinja="{{ messages[-1].content }}")) as server:
        error = error_of(await server.chat(messages=[user("a"), assistant("b"), user("c")]), 400)
    assert error["param"] == "messages[0].content"


async def test_tokenize_shows_the_prompt_of_a_chat() -> None:
    async with lift(tokenizer=FakeTokenizer(jinja=GEMMA)) as server:
        for more in ({}, {"add_generation_prompt": True}, {"continue_final_message": False}):
            body = {"messages": [{"role": "system", "content": "s"}, user("a"), assistant("b")], **more}
            shown = await server.client.post("/tokenize", json=body)
            assert shown.status_code == 200, shown.text
            assert (await server.chat(**body, max_tokens=1)).status_code == 200
            assert bytes(shown.json()["tokens"]).decode() == prompt_of(server)


async def test_more_messages_than_tokens_are_refused_at_once() -> None:
    async with lift(context_length=64) as server:
        error = error_of(await server.chat(messages=[user("")] * 65), 400)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


async def test_thinking_that_the_client_begins_is_gone_on_with() -> None:
    """What follows is thinking until the model closes it, though the prompt does not end in the mark."""
    runner = FakeRunner(answering("more</think>\n\nsaid"))
    tokenizer = FakeTokenizer(template="<think></think>")
    async with lift(runner, tokenizer=tokenizer) as server:
        begun = await server.chat(messages=[user("a"), assistant("<think>\nI have")])
        (choice,) = begun.json()["choices"]
        assert choice["message"]["reasoning_content"] == "more" and choice["message"]["content"] == "said"
        closed = await server.chat(messages=[user("<think>"), assistant("<think>\nI have</think>\n\nSo ")])
        assert "reasoning_content" not in closed.json()["choices"][0]["message"]
