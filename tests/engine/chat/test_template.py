"""Conversations in templates of many shapes: whole, in the right words, or refused in the template's own."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from chairlift.engine.chat import template as module
from chairlift.engine.chat.conversation import Conversation, Message
from chairlift.engine.chat.template import ChatTemplate, Source
from chairlift.engine.errors import InvalidParameter
from tests.engine.chat.templates import CHATML, FAMILIES, GEMMA, QWEN3, SPECIAL_TOKENS

TOOL: dict[str, object] = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": {"type": "object"}},
}


def user(text: object, **more: object) -> Message:
    return {"role": "user", "content": text, **more}


def system(text: str, role: str = "system") -> Message:
    return {"role": role, "content": text}


def assistant(text: object, *calls: dict[str, object], **more: object) -> Message:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


def call(id: str, name: str, arguments: object) -> dict[str, object]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, id: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": id}


def rendered(family: Source, *messages: Message, **more: object) -> str:
    source = FAMILIES.get(family, family) if isinstance(family, str) else family
    conversation = replace(Conversation(messages), **more)  # type: ignore[arg-type]
    return ChatTemplate(source, SPECIAL_TOKENS).render(conversation)


CALLS = (
    user("a"),
    assistant("", call("call_1", "f", {"x": "1"}), call("call_2", "g", {"y": 2})),
    result("two", "call_2"),
    result("one", "call_1"),
)
F, G = '{"name": "f", "arguments": {"x": "1"}}', '{"name": "g", "arguments": {"y": 2}}'


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("mistral", "<s>[INST]one[/INST]two</s>[INST]sys\n\nlater\n\nthree[/INST]"),
        (
            "gemma",
            "<s><start_of_turn>user\nsys\n\none<end_of_turn>\n<start_of_turn>model\ntwo<end_of_turn>\n"
            "<start_of_turn>user\nlater\n\nthree<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "qwen3",
            "<|im_start|>system\nsys<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
            "two<|im_end|>\n<|im_start|>user\nlater\n\nthree<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "gpt-oss",
            "<|start|>system<|message|>You are a model.<|end|><|start|>developer<|message|>sys<|end|>"
            "<|start|>user<|message|>one<|end|><|start|>assistant<|channel|>final<|message|>two<|end|>"
            "<|start|>user<|message|>later\n\nthree<|end|><|start|>assistant",
        ),
        ("phi", "<|system|>sys<|end|><|user|>one<|end|><|assistant|>two<|end|><|system|>later<|end|>"
                "<|user|>three<|end|><|assistant|>"),
        ("deepseek", "<s>syslater<|User|>one<|Assistant|>two<|end|><|User|>three<|Assistant|><think>\n"),
        ("parts", "<system>sys<user>one<assistant>two<system>later<user>three<assistant>"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_in_mid_conversation(family: str, expected: str, role: str) -> None:
    told = [system("sys", role), user("one"), assistant("two"), system("later", role), user("three")]
    assert rendered(family, *told) == expected


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("mistral", "<s>[INST]a\n\nb[/INST]c\n\nd</s>[INST]e[/INST]"),
        ("gemma", "<s><start_of_turn>user\na\n\nb<end_of_turn>\n<start_of_turn>model\nc\n\nd<end_of_turn>\n"
                  "<start_of_turn>user\ne<end_of_turn>\n<start_of_turn>model\n"),
        ("phi", "<|user|>a<|end|><|user|>b<|end|><|assistant|>c<|end|><|assistant|>d<|end|><|user|>e<|end|>"
                "<|assistant|>"),
    ],
)  # fmt: skip
def test_neighbours_of_one_role(family: str, expected: str) -> None:
    said = [user("a"), user("b"), assistant("c"), assistant("d"), user("e")]
    assert rendered(family, *said) == expected


def test_parts_are_joined_with_room_between_them() -> None:
    part = {"type": "text", "text": "a"}
    template = GEMMA.replace("message['content'] | trim", "message['content'] | map(attribute='text') | join")
    expected = "<s><start_of_turn>user\na\n\nb<end_of_turn>\n<start_of_turn>model\n"
    assert rendered(template, user([part]), user("b")) == expected


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3", f"assistant\n\n<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call><|im_end|>\n"
                  "<|im_start|>user\n<tool_response>\none\n</tool_response><|im_end|>\n"
                  "<|im_start|>user\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"),
        ("chatml", f"assistant\n<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call><|im_end|>\n"
                   "<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
                   "<tool_response>\ntwo\n</tool_response><|im_end|>\n"),
        ("gemma", f"model\n<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call><end_of_turn>\n"
                  "<start_of_turn>user\n<tool_response>\none\n</tool_response>\n"
                  "<tool_response>\ntwo\n</tool_response><end_of_turn>\n"),
        ("llama3", '\n\n{"name": "f", "parameters": {"x": "1"}}<|eot_id|><|start_header_id|>ipython'
                   '<|end_header_id|>\n\n"one"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
                   '{"name": "g", "parameters": {"y": 2}}<|eot_id|><|start_header_id|>ipython'
                   '<|end_header_id|>\n\n"two"<|eot_id|>'),
        ("gpt-oss", '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": "1"}<|call|>'
                    '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"one"<|end|>'
                    '<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{"y": 2}<|call|>'
                    '<|start|>functions.g to=assistant<|channel|>commentary<|message|>"two"<|end|>'),
        ("deepseek", '<|User|>a<|call|>f\n```json\n{"x": "1"}\n```<|call|>g\n```json\n{"y": 2}\n```<|end|>'
                     "<|output|>one<|/output|><|output|>two<|/output|>"),
    ],
)  # fmt: skip
def test_calls_and_their_results_by_id(family: str, expected: str) -> None:
    assert expected in rendered(family, *CALLS)


def test_ids_of_calls_as_mistral_wants_them() -> None:
    text = rendered("mistral", *CALLS)
    calls, results = text.split("[TOOL_RESULTS]", 1)
    for name, content in (("f", "one"), ("g", "two")):
        id = calls.split(f'"name": "{name}"')[1].split('"id": "')[1][:9]
        assert id.isalnum() and f'{{"content": {content}, "call_id": "{id}"}}' in results
    given = rendered(
        "mistral", user("a"), assistant("", call("abcDEF123", "f", {})), result("b", "abcDEF123")
    )
    assert given.count('"abcDEF123"') == 2


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_text_and_calls_in_one_message(family: str) -> None:
    text = rendered(
        family, user("a"), assistant("Let me look.", call("c", "f", {"x": "1"})), result("b", "c")
    )
    assert text.index("Let me look.") < text.index('"x": "1"') < text.rindex("b")


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_older_form_of_a_call(family: str) -> None:
    said = assistant("", function_call={"name": "f", "arguments": {"x": "1"}})
    text = rendered(family, user("a"), said, {"role": "function", "name": "f", "content": "found"})
    assert text.index('"x": "1"') < text.index("found")


@pytest.mark.parametrize("family", list(FAMILIES))
def test_tools_are_told_to_every_model(family: str) -> None:
    for said in ([user("a")], [system("sys"), user("a")], [user("a"), assistant("b"), user("c")]):
        text = rendered(family, *said, tools=(TOOL,))
        assert "weather" in text and all(str(message["content"]) in text for message in said)
    if family == "chatml":
        assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text and text.startswith(
            "<|im_start|>system\n# Tools"
        )


@pytest.mark.parametrize("family", list(FAMILIES))
def test_names(family: str) -> None:
    assert "ann: hi" in rendered(family, user("hi", name="ann"))
    writes = CHATML.replace(
        "{{ message.role }}", "{{ message.role }}{{ ' ' + message.name if message.name }}"
    )
    assert rendered(writes, user("hi", name="ann")).startswith("<|im_start|>user ann\nhi<|im_end|>")


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("start", ["The answer is ", "", "a\n", "```python\n"])
def test_the_last_message_is_gone_on_with(family: str, start: str) -> None:
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    text = rendered(family, user("a"), assistant(start), **going_on)
    assert text.endswith(start) and text.count("a") >= 1
    if start:
        whole = rendered(family, user("a"), assistant("END"), add_generation_prompt=False)
        assert text == whole[: whole.rindex("END")] + start
    with pytest.raises(InvalidParameter, match="no message"):
        rendered(family, **going_on)


def test_what_is_to_be_gone_on_with_where_the_template_ends_the_message_itself() -> None:
    strict = GEMMA.replace(
        "{%- if add_generation",
        "{%- if messages[-1].role == 'assistant' %}{{ raise_exception('No.') }}{% endif %}"
        "{%- if add_generation",
    )  # fmt: skip
    text = rendered(
        strict, user("a"), assistant("It is "), add_generation_prompt=False, continue_final_message=True
    )
    assert text == "<s><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nIt is "


def test_an_assistant_that_begins_and_no_user_at_all() -> None:
    assert rendered("mistral", assistant("hello"), user("b")) == "<s>[INST][/INST]hello</s>[INST]b[/INST]"
    assert rendered("gemma", system("sys")).endswith("user\nsys<end_of_turn>\n<start_of_turn>model\n")
    assert rendered("qwen3", system("sys")) == "<|im_start|>user\nsys<|im_end|>\n<|im_start|>assistant\n"


def test_documents_where_the_template_has_a_place_for_them() -> None:
    documents = ({"title": "T", "text": "words"},)
    assert rendered("parts", user("a"), documents=documents) == "<user>a[T: words]<assistant>"
    with pytest.raises(InvalidParameter, match="no place for documents") as refusal:
        rendered("qwen3", user("a"), documents=documents)
    assert refusal.value.param == "documents"


def test_variables_are_the_templates() -> None:
    assert rendered("qwen3", user("a"), variables={"enable_thinking": False}).endswith("</think>\n\n")
    template = ChatTemplate(QWEN3)
    assert template.mentions("enable_thinking") and not template.mentions("thinking")
    assert template.mentions("tools") and not template.mentions("tool.")


def test_a_refusal_in_the_templates_words() -> None:
    picky = "{{ raise_exception('Not on a Monday.') }}"
    with pytest.raises(InvalidParameter, match=r"refused: Not on a Monday\.$") as refusal:
        rendered(picky, system("a"), user("b"), assistant("c"))
    assert refusal.value.param == "messages"
    by_content = "{% if 'Monday' in messages[-1].content %}{{ raise_exception('No.') }}{% endif %}" + CHATML
    with pytest.raises(InvalidParameter, match=r"refused: No\.$"):
        rendered(by_content, user("It is Monday."))
    assert "Tuesday" in rendered(by_content, user("It is Tuesday."))
    with pytest.raises(InvalidParameter, match="cannot render"):
        rendered("{{ messages[0].content + 5 }}", user("b"))


def test_what_a_template_leaves_out_is_named() -> None:
    last_only = "{{ messages[-1].content }}"
    assert rendered(last_only, user("a"), user("b")) == "a\n\nb"
    with pytest.raises(InvalidParameter, match=r"no place for messages\[0\]\.content") as refusal:
        rendered(last_only, user("a"), assistant("b"), user("c"))
    assert refusal.value.param == "messages[0].content"


def test_templates_by_name_and_functions() -> None:
    named = {
        "default": "{{ messages[0].content }}",
        "tool_use": "{{ tools[0].function.name }}:{{ messages[0].content }}",
    }
    assert rendered(named, user("a")) == "a"
    assert rendered(named, user("a"), tools=(TOOL,)) == "weather:a"
    assert ChatTemplate(named).text == named["default"] and ChatTemplate(named).mentions("tools")

    def function(messages: list[Message], **settings: object) -> str:
        return f"{messages.pop()['content']} {settings['tokenize']} {settings.get('mood')}"

    assert rendered(function, user("a"), variables={"mood": "good"}) == "a False good"
    assert ChatTemplate(function).text is None and ChatTemplate(function).texts == ()


def test_a_way_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(GEMMA, SPECIAL_TOKENS)
    count = 0
    write = template.written

    def counted(conversation: Conversation) -> str:
        nonlocal count
        count += 1
        return write(conversation)

    monkeypatch.setattr(template, "written", counted)
    template.render(Conversation((system("a"), user("b"))))
    found, count = count, 0
    assert found > 1
    assert "c\n\nd" in template.render(Conversation((system("c"), user("d"))))
    assert count == 1
    monkeypatch.setattr(module, "KEPT_WAYS", 0)
    template.render(Conversation((user("c"),)))
    assert not template._ways


def test_long_conversations_take_no_time_that_grows_faster_than_they_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = ChatTemplate("{{ raise_exception('No.') }}")
    tries = 0

    def counted(conversation: Conversation) -> str:
        nonlocal tries
        tries += 1
        raise InvalidParameter("messages", "No.")

    monkeypatch.setattr(template, "written", counted)
    turns = [system("s"), *[user("a", name="ann"), user("b"), assistant("c"), system("d")] * 1000]
    with pytest.raises(InvalidParameter):
        template.render(Conversation(tuple(turns)))
    assert tries < 10


def test_a_strict_template_that_needs_most_rewrites_is_found_a_way() -> None:
    """More sets of rewrites suit this conversation than are tried one by one."""
    text = rendered(
        "gemma",
        assistant("xq", call("a", "f", {"g": "yq"}), call("b", "g", {})),
        result("zq", "b"),
        result("wq", "a"),
        user([{"type": "text", "text": "vq"}], name="ann"),
        user("uq"),
        result("tq", "c"),
        system("sq", "developer"),
        tools=(TOOL,),
    )
    assert all(word in text for word in ("xq", "yq", "zq", "wq", "vq", "uq", "tq", "sq", "ann", "weather"))


words = st.text("xyz ", min_size=1, max_size=3)
names = st.sampled_from(["f", "g"])
calls = st.builds(call, st.sampled_from(["a", "b", "c"]), names, st.dictionaries(names, words, max_size=2))
parts = st.lists(st.builds(lambda text: {"type": "text", "text": text}, words), max_size=2)
messages = st.one_of(
    st.builds(system, words, st.sampled_from(["system", "developer"])),
    st.builds(user, st.one_of(words, st.just(""), parts)),
    st.builds(assistant, st.one_of(words, st.just(""))),
    st.builds(lambda text, made: assistant(text, *made), words, st.lists(calls, min_size=1, max_size=3)),
    st.builds(result, words, st.sampled_from(["a", "b", "c", "d"])),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(messages, min_size=1, max_size=7), st.sampled_from(list(FAMILIES)), st.booleans())
def test_any_conversation(said: list[Message], family: str, tools: bool) -> None:
    """Nothing said is lost, nothing is refused in these families (some want a user), and the caller's
    conversation stays."""
    assume(any(message["role"] == "user" and message["content"] for message in said))
    numbered = [_numbered(message, at) for at, message in enumerate(said)]
    before = copy.deepcopy(numbered)
    text = rendered(family, *numbered, tools=(TOOL,) if tools else ())
    assert numbered == before
    for message in numbered:
        content = message["content"]
        for part in content if isinstance(content, list) else [{"text": content}]:
            assert str(part["text"]).strip() in text
        for made in message.get("tool_calls", []):  # type: ignore[attr-defined]
            assert made["function"]["name"] in text
            assert all(value.strip() in text for value in made["function"]["arguments"].values())
    assert not tools or "weather" in text
    assert "zq0" not in text and "None" not in text


def _numbered(message: Message, at: int) -> Message:
    """Its texts made unlike all others."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{content}#{at}#" if content.strip() else content}
    assert isinstance(content, list)
    return {
        **message,
        "content": [{**part, "text": f"{part['text']}#{at}.{n}#"} for n, part in enumerate(content)],
    }
