"""What holds of every parser: the cut does not matter, nothing is lost, tokens count where they belong."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.events import Finished, FinishReason, TextDelta, TokenLogprob, Usage
from chairlift.engine.output.cursor import Marks
from chairlift.engine.output.events import (
    ContentDelta,
    EndReason,
    OutputEnd,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from chairlift.engine.output.formats import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    OutputFormat,
    call_id,
    choose_format,
    nine_characters,
)
from chairlift.engine.output.tool_formats import TOOL_FORMATS
from chairlift.engine.output.whole_calls import WholeCalls
from tests.engine.output.shapes_of import TOOLS, USAGE, Said, said
from tests.fake_tokenizer import FakeTokenizer

PAYLOAD = "Ω"
JSON_FORMATS = ("hermes", "mistral", "deepseek_v3", "kimi_k2", "llama3_json", "granite", "cohere")


def format_of(reasoning: str, tools: str) -> OutputFormat:
    return choose_format(FakeTokenizer(), reasoning=reasoning, tool_call=tools)


def read(format: OutputFormat, pieces: list[str], *, cut: bool = False) -> tuple[Said, EndReason, str]:
    """What is said, how it ends, and all text of it."""
    ids = iter(range(10**6))
    parser = format.parser(tools=TOOLS, make_id=lambda: f"id{next(ids)}")
    events: list[OutputEvent] = []
    for piece in pieces:
        events += parser.feed(TextDelta((1,), piece))
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    *rest, end = parser.finish(Finished(reason, USAGE))
    assert isinstance(end, OutputEnd)
    events += [event for event in rest if not isinstance(event, OutputEnd)]
    text = ""
    for event in events:
        if isinstance(event, ContentDelta | ReasoningDelta | ToolCallArguments):
            text += event.text
        elif isinstance(event, ToolCallStart):
            text += event.name
    return said(events), end.reason, text


def scraps(tools: str) -> list[str]:
    """Marks, parts of marks, parts of calls, text."""
    format = TOOL_FORMATS[tools]
    ends = [mark for mark in (getattr(format, "end", ""), *getattr(format, "section", ())) if mark]
    marks = [*format.starts, *ends, "<think>", "</think>"]
    if tools == "kimi_k2":
        marks.append("<|tool_call_argument_begin|>")
    if tools == "deepseek_v3":
        marks.append("<｜tool▁sep｜>")
    return [
        *marks,
        *(mark[: len(mark) // 2] for mark in marks),
        '{"name": "wait", "arguments": {',
        '{"name": "f", "arguments": {"s": "',
        "wait",
        *'{}[]":,;\\\n ',
        "```",
        PAYLOAD,
        PAYLOAD,
    ]


@st.composite
def garbage(draw: st.DrawFn) -> tuple[str, str]:
    tools = draw(st.sampled_from(JSON_FORMATS))
    return tools, "".join(draw(st.lists(st.sampled_from(scraps(tools)), max_size=14)))


@settings(max_examples=250, deadline=None)
@given(given_=garbage(), cut=st.booleans(), size=st.integers(1, 7))
def test_garbage_is_read_alike_however_it_is_cut_and_nothing_is_lost(
    given_: tuple[str, str], cut: bool, size: int
) -> None:
    tools, text = given_
    format = format_of("think", tools)
    whole = read(format, [text], cut=cut)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert read(format, pieces, cut=cut)[:2] == whole[:2]
    assert whole[2].count(PAYLOAD) == text.count(PAYLOAD)


PARTS = {
    "qwen3_coder": ["<function=look>", "<parameter=at>", "</parameter>", "</function>"],
    "glm": ["look", "<arg_key>at</arg_key>", "<arg_value>", "</arg_value>", "{"],
    "minimax_m2": ['<invoke name="look">', '<parameter name="at">', "</parameter>", "</invoke>"],
    "minicpm5": ['"look">', '<param name="at">', "</param>", "<![CDATA[", "]]>"],
    "kimi_k3": ['<|open|>call tool="look"<|sep|>', "<|open|>response<|sep|>", "<|close|>call<|sep|>"],
    "gemma4": ["call:look{", "at:", '<|"|>', "}"],
    "lfm2": ["[look(", 'at="x"', ")]", "["],
    "deepseek_v32": ['<｜DSML｜invoke name="look">', "</｜DSML｜invoke>", "<｜DSML｜"],
    "pythonic": ["[look(", "wait(", 'at="x"', ")", "]", ", "],
}


@st.composite
def garbage_of_whole_calls(draw: st.DrawFn) -> tuple[str, str]:
    tools = draw(st.sampled_from(sorted(PARTS)))
    format = TOOL_FORMATS[tools]
    assert isinstance(format, WholeCalls)
    marks = [mark for pair in format.marks for mark in pair]
    halves = [mark[: len(mark) // 2] for mark in marks]
    parts = [
        *marks,
        *marks,
        *halves,
        *PARTS[tools],
        *PARTS[tools],
        "<think>",
        "</think>",
        "<",
        " ",
        "\n",
        "a",
    ]
    return tools, "".join(draw(st.lists(st.sampled_from(parts), max_size=12)))


@settings(max_examples=200, deadline=None)
@given(given_=garbage_of_whole_calls(), cut=st.booleans(), size=st.integers(1, 5))
def test_garbage_around_whole_calls_is_read_alike(given_: tuple[str, str], cut: bool, size: int) -> None:
    tools, text = given_
    format = format_of("kimi_k3" if tools == "kimi_k3" else "think", tools)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert read(format, pieces, cut=cut) == read(format, [text], cut=cut)


@settings(max_examples=200, deadline=None)
@given(
    tools=st.sampled_from(sorted(TOOL_FORMATS)),
    text=st.text(alphabet="ab<>|[]{}/=\"'\n :_toolcalthink", max_size=60),
    cut=st.booleans(),
)
def test_text_without_marks_is_content(tools: str, text: str, cut: bool) -> None:
    assert read(format_of("none", tools), list(text), cut=cut)[2] == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet='a<|>\n "{}:=', max_size=20), at=st.integers(0, 3))
def test_harmony_reads_anything_alike_however_it_is_cut(text: str, at: int) -> None:
    parts = ["<|channel|>analysis<|message|>", "<|end|><|start|>assistant", " to=functions.f", "<|call|>"]
    answer = parts[at] + text + parts[(at + 1) % 4] + text
    assert read(format_of("openai", "openai"), list(answer)) == read(format_of("openai", "openai"), [answer])


class TestTokens:
    def feed(self, pieces: list[str], *, merged: bool) -> tuple[int, list[int]]:
        """(tokens of the thinking, those whose log probabilities came with the content), a token a piece."""
        parser = format_of("think", "hermes").parser(tools=TOOLS)
        logprobs = tuple(TokenLogprob(number, -1.0) for number in range(len(pieces)))
        if merged:
            ids, lengths = tuple(range(len(pieces))), tuple(map(len, pieces))
            events = parser.feed(TextDelta(ids, "".join(pieces), logprobs, lengths))
        else:
            events = []
            for number, piece in enumerate(pieces):
                events += parser.feed(TextDelta((number,), piece, (logprobs[number],), (len(piece),)))
        *rest, end = parser.finish(Finished(FinishReason.STOP, Usage(1, len(pieces)), 5))
        assert isinstance(end, OutputEnd)
        content = [event for event in (*events, *rest) if isinstance(event, ContentDelta)]
        return end.reasoning_tokens, [entry.token_id for event in content for entry in event.logprobs]

    def test_thinking_content_and_the_end(self) -> None:
        pieces = ["<think>", "\n", "h", "m", "</think>", "\n\n", "o", "k", ""]
        for merged in (False, True):
            assert self.feed(pieces, merged=merged) == (5, [6, 7, 8])

    def test_marks_merged_with_what_follows(self) -> None:
        pieces = ["<thi", "nk>h", "m</", "think>o", "k", ""]
        for merged in (False, True):
            assert self.feed(pieces, merged=merged) == (4, [4, 5])

    def test_thinking_that_does_not_end(self) -> None:
        for merged in (False, True):
            assert self.feed(["<think>", "h", "", "m", ""], merged=merged) == (5, [])

    def test_calls_have_no_log_probabilities(self) -> None:
        call = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
        for merged in (False, True):
            assert self.feed(["a", " ", *call, ""], merged=merged) == (0, [0])

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.sampled_from(["<think>", "</think>", "<", "a", "", " ", "<tool_call>"]), max_size=12))
    def test_merged_deltas_count_alike(self, pieces: list[str]) -> None:
        assert self.feed(pieces, merged=True) == self.feed(pieces, merged=False)


class TestOneCall:
    def test_the_answer_ends_with_its_first_call(self) -> None:
        parser = format_of("think", "hermes").parser(tools=TOOLS, parallel=False, make_id=lambda: "id0")
        call = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
        events = parser.feed(TextDelta((1,), f"a{call}b{call}"))
        assert parser.done
        assert said(events) == [("c", "a"), ("t", "wait", "{}")]
        assert parser.feed(TextDelta((1,), call)) == []
        end = OutputEnd(EndReason.TOOL_CALLS, USAGE)
        assert parser.finish(Finished(FinishReason.STOP, USAGE)) == [end]

    def test_not_before(self) -> None:
        parser = format_of("think", "hermes").parser(tools=TOOLS, parallel=False)
        parser.feed(TextDelta((1,), '<tool_call>{"name": "wait", "arguments": {'))
        assert not parser.done
        parser.feed(TextDelta((1,), "}"))
        assert parser.done


class TestPrefix:
    def test_what_the_prompt_holds_is_read_and_not_said(self) -> None:
        parser = format_of("think", "hermes").parser(prefix="<think>hm ", tools=TOOLS)
        events = [
            *parser.feed(TextDelta((1,), "so</think>ok")),
            *parser.finish(Finished(FinishReason.STOP, USAGE)),
        ]
        assert events == [
            ReasoningDelta("so"),
            ContentDelta("ok"),
            OutputEnd(EndReason.STOP, USAGE, reasoning_tokens=1),
        ]

    def test_content_that_goes_on(self) -> None:
        parser = format_of("think", "hermes").parser(prefix="The sea is ", tools=TOOLS)
        assert parser.feed(TextDelta((1,), "blue.")) == [ContentDelta("blue.")]


class TestChoice:
    def choose(self, template: str = "", specials: tuple[str, ...] = (), **named: str) -> OutputFormat:
        return choose_format(FakeTokenizer(template=template, specials=specials), **named)

    def test_every_name_is_one(self) -> None:
        for name in REASONING_PARSERS:
            self.choose(reasoning=name)
        for name in TOOL_CALL_PARSERS:
            self.choose(tool_call=name)

    def test_marks_of_a_format_exclude_each_other(self) -> None:
        for reasoning in REASONING_PARSERS:
            for tools in TOOL_CALL_PARSERS:
                format = self.choose(reasoning=reasoning, tool_call=tools)
                if not format.harmony and format.tools is not None:
                    Marks((*format.tools.starts, *format.drop))

    def test_by_the_template(self) -> None:
        qwen = self.choose("<think> </think> {{ tool_call.name }} <tool_call>")
        assert qwen.thinking is not None and qwen.thinking.start == "<think>"
        assert qwen.tools is TOOL_FORMATS["hermes"]
        coder = self.choose("<tool_call>\n<function=f>")
        assert coder.tools is TOOL_FORMATS["qwen3_coder"] and coder.thinking is None
        assert self.choose("<|channel|> <|message|> <|start|>").harmony
        gemma = self.choose("<|channel>thought <channel|> <|tool_call> <tool_call|>")
        assert gemma.thinking is not None and gemma.thinking.end == "<channel|>"
        assert gemma.tools is TOOL_FORMATS["gemma4"]
        assert (
            self.choose().tools is TOOL_FORMATS["hermes"]
        )  # what tools are described as without a template's help

    def test_by_the_tokens(self) -> None:
        assert self.choose(specials=("[THINK]", "[/THINK]")).thinking is not None
        assert self.choose(specials=("<|tool_call_start|>",)).tools is TOOL_FORMATS["lfm2"]

    def test_special_tokens_that_are_marks_or_parts_of_them(self) -> None:
        specials = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|other|>")
        format = self.choose(specials=specials)
        assert format.tools is TOOL_FORMATS["kimi_k3"]
        assert format.visible == {260, 261, 262}

    def test_a_prompt_that_opens_the_thinking(self) -> None:
        format = self.choose("<think></think>")
        assert format.prefix("<|im_start|>assistant\n<think>\n") == "<think>"
        assert format.prefix("<|im_start|>assistant\n<think>\n\n</think>\n\n") == ""
        assert format.prefix("what is <think>?<|im_start|>assistant\n") == ""

    def test_ids(self) -> None:
        assert self.choose("ids must have length 9").make_id is nine_characters
        assert self.choose().make_id is call_id
        assert len({call_id() for _ in range(100)}) == len({nine_characters() for _ in range(100)}) == 100
        assert all(len(nine_characters()) == 9 and nine_characters().isalnum() for _ in range(20))
