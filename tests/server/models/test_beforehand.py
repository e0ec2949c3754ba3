"""What is wrong whatever the model is refused before the model is loaded, in the words of one that is loaded;
and what such a model would take is not refused."""

from __future__ import annotations

import pytest

from chairlift.server.models.model import Use
from tests.fakes import FakeRunner, answering
from tests.server.harness import JSON
from tests.server.models.fleet import Fake, fleet

SAID = [{"role": "user", "content": "Hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,***"}}
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": ENDLESS}}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages")
)
DEFAULTS = {"min_tokens": 8, "max_tokens": 32}


def chat(**more: object) -> tuple[str, JSON]:
    return CHAT, {"messages": SAID, **more}


def asked(path: str, more: JSON) -> tuple[str, JSON]:
    """The least that a request holds, and more."""
    least: dict[str, JSON] = {
        COMPLETIONS: {"prompt": "Hi"},
        RESPONSES: {"input": "Hi"},
        f"{RESPONSES}/input_tokens": {"input": "Hi"},
        MESSAGES: {"messages": SAID, "max_tokens": 9},
        f"{MESSAGES}/count_tokens": {"messages": SAID},
    }
    return path, {**least.get(path, {}), **more}


WRONG: list[tuple[tuple[str, JSON], str]] = [
    # numbers of tokens
    (chat(stop_token_ids=[3, -1]), "stop_token_ids[1]"),
    (chat(allowed_token_ids=[-7]), "allowed_token_ids[0]"),
    (chat(allowed_token_ids=[]), "allowed_token_ids"),
    (chat(logit_bias={"x": 1}), "logit_bias"),
    (chat(logit_bias={"5": 1, "05": 2}), "logit_bias"),
    (chat(logit_bias={"5": 1e9}), "logit_bias"),
    (asked(COMPLETIONS, {"prompt": [1, -2]}), "prompt[1]"),
    # prompts
    (asked(COMPLETIONS, {"prompt": ["Hi", ""]}), "prompt[1]"),
    (asked(COMPLETIONS, {"prompt": ["Hi"] * 5000}), "prompt"),
    (asked(COMPLETIONS, {"prompt": ["Hi", "Ho"], "n": 128}), "n"),
    # the model's defaults, which count
    (chat(max_tokens=4), "min_tokens"),
    (asked(COMPLETIONS, {"max_tokens": 4}), "min_tokens"),
    # what answers must follow
    (chat(response_format=NO_SCHEMA), "schema"),
    (chat(guided_regex="(a{1000}){1000}"), "guided_regex"),
    (asked(COMPLETIONS, {"guided_grammar": "start: start"}), "guided_grammar"),
    # conversations
    (chat(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs.tokenize"),
    (chat(enable_thinking=True, chat_template_kwargs={"enable_thinking": False}), "enable_thinking"),
    (chat(enable_thinking=True, reasoning_effort="none"), "reasoning_effort"),
    (chat(add_generation_prompt=True, continue_final_message=True), "continue_final_message"),
    ((CHAT, {"messages": [{"role": "user", "content": "Hi", "refusal": "No"}]}), "messages[0].refusal"),
    ((CHAT, {"messages": [{"role": "user"}]}), "messages[0].content"),
    # other surfaces' own checks, and a chat's in their words
    (asked(RESPONSES, {"background": True, "store": False}), "background"),
    (asked(RESPONSES, {"previous_response_id": "resp_1"}), "previous_response_id"),
    (asked(RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}), "input[0].id"),
    (asked(RESPONSES, {"max_output_tokens": -1}), "max_output_tokens"),
    (asked(RESPONSES, {"temperature": 9}), "temperature"),
    (asked(f"{RESPONSES}/input_tokens", {"input": []}), "input"),
    (asked(MESSAGES, {"max_tokens": 0}), "max_tokens"),
    (asked(MESSAGES, {"top_p": 7}), "top_p"),
    (asked(f"{MESSAGES}/count_tokens", {"messages": []}), "messages"),
    # tokens
    (("/tokenize", {}), "prompt"),
    (("/tokenize", {"messages": []}), "messages"),
    (("/tokenize", {"prompt": "Hi", "tools": []}), "tools"),
    (("/tokenize", {"messages": [{"role": "user"}]}), "messages[0].content"),
    (("/tokenize", {"messages": [{"role": "user", "content": [IMAGE]}]}), "messages[0].content[0]"),
    (("/detokenize", {"tokens": [1, -1]}), "tokens[1]"),
    (("/v1/cache/warm", {}), "prompt"),
    (("/v1/cache/warm", {"messages": SAID, "add_special_tokens": True}), "add_special_tokens"),
]

VECTORS: list[tuple[tuple[str, JSON], str]] = [
    (("/v1/embeddings", {"input": "Hi", "odd": 1}), "odd"),
    (("/v1/embeddings", {"input": []}), "input"),
    (("/v1/embeddings", {"input": ["Hi", ""]}), "input[1]"),
    (("/v1/embeddings", {"input": [[1], []]}), "input[1]"),
    (("/v1/embeddings", {"input": [[1, -1]]}), "input[0][1]"),
    (("/v1/embeddings", {"input": "Hi", "dimensions": 0}), "dimensions"),
    (("/v1/embeddings", {"input": "Hi", "truncate_prompt_tokens": -2}), "truncate_prompt_tokens"),
    (("/v1/rerank", {"query": "Hi", "documents": []}), "documents"),
    (("/v1/rerank", {"query": "Hi", "documents": ["a", ""]}), "documents[1]"),
    (("/v1/rerank", {"query": "Hi", "documents": ["a"], "top_n": -1}), "top_n"),
    (("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}), "text_1"),
    (("/v1/score", {"text_1": "a", "text_2": "c", "truncate_prompt_tokens": 0}), "truncate_prompt_tokens"),
]


@pytest.mark.parametrize("use", list(Use))
async def test_what_is_wrong_whatever_the_model_loads_none(use: Use) -> None:
    wrong = WRONG if use is Use.GENERATION else VECTORS
    a = Fake("a", use=use, at_start=True, defaults=DEFAULTS)
    b = Fake("b", use=use, defaults=DEFAULTS)
    async with fleet(a, b) as lift:
        for (path, body), param in wrong:
            refused = await lift.client.post(path, json={"model": "b", **body})
            assert refused.status_code == 400, (path, body, refused.text)
            assert b.finds == 0, (path, body)
            error = refused.json()["error"]
            assert param in (error.get("param") or error["message"]), (path, body, error)
            told = await lift.client.post(path, json={"model": "a", **body})
            assert told.json()["error"] == error, "as where the model is loaded"
        assert lift.states() == {"a": "loaded", "b": "unloaded"} and b.finds == 0


async def test_an_image_that_cannot_be_one_loads_no_model() -> None:
    b = Fake("b")
    async with fleet(Fake("a", at_start=True), b) as lift:
        for url in ("data:image/png;base64,***", "data:text", "file:///etc/passwd", "ftp://host/x"):
            content = [{"type": "image_url", "image_url": {"url": url}}]
            refused = await lift.chat("b", messages=[{"role": "user", "content": content}])
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "invalid_image", refused.text
        assert b.finds == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        # Without the model's default of max_tokens, 16 of a completion would be too few.
        asked(COMPLETIONS, {"min_tokens": 20}),
        # Nobody knows whether an effort counts until the template is there.
        asked(MESSAGES, {"output_config": {"effort": "max"}}),
        chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required"),
        asked(f"{RESPONSES}/input_tokens", {}),
        ("/tokenize", {"messages": SAID}),
        ("/detokenize", {"tokens": [72, 105]}),
        ("/v1/embeddings", {"input": [[1, 2], [3]]}),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ],
)
async def test_what_is_right_waits_for_its_model_and_is_answered(path: str, body: JSON) -> None:
    use = Use.EMBEDDING if path in ("/v1/embeddings", "/v1/score") else Use.GENERATION
    b = Fake("b", use=use, defaults={"max_tokens": 64}, make_runner=lambda: FakeRunner(answering("b" * 40)))
    async with fleet(b) as lift:
        for _ in range(2):  # first it loads the model
            answer = await lift.client.post(path, json={"model": "b", **body})
            assert answer.status_code == 200, answer.text
        assert b.finds == 1
