"""What a constraint allows, and what is refused before it is ever followed."""

from __future__ import annotations

import json
import threading

import pytest
from llguidance import LLTokenizer

from chairlift.engine.constraints import (
    Compiler,
    Constraint,
    Either,
    Json,
    Lark,
    Literal,
    Piece,
    Regex,
    Repeat,
    Sequence,
    Token,
    Until,
)
from chairlift.engine.constraints.pieces import optional
from chairlift.engine.errors import InvalidParameter
from tests.vocabularies import END, MARK, STOP, TOY, allowed, toy_compiler, toy_tokens, trial, vocabulary

COMPILER = toy_compiler()


def schema(content: object, **options: bool) -> Json:
    return Json(json.dumps(content), **options)


def object_of(**properties: object) -> dict[str, object]:
    """A closed object all of whose properties are required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def compiled(piece: Piece) -> Constraint:
    return COMPILER.compile(piece, "field")


def verdict(constraint: Constraint, text: str) -> str:
    """whole: the answer must end here; may end; open: it goes on; refused: not every token was allowed."""
    matcher = constraint.compiled.matcher()
    for token in toy_tokens(text):
        if token not in allowed(matcher):
            return "refused"
        matcher.advance(token)
        assert matcher.fault is None
    if matcher.complete:
        assert allowed(matcher) == {END, STOP}
        return "whole"
    assert ({END, STOP} <= allowed(matcher)) == matcher.accepting
    return "may end" if matcher.accepting else "open"


NUMBER = object_of(a={"type": "integer"})
LIST = {
    "$ref": "#/$defs/n",
    "$defs": {"n": object_of(n={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})},
}


@pytest.mark.parametrize(
    ("piece", "text", "want"),
    [
        (schema(NUMBER), '{"a":12}', "whole"),
        (schema(NUMBER), '{"a": 12}', "whole"),
        (schema(NUMBER), '{\n    "a": 1\n}', "whole"),
        (schema(NUMBER), '{"a": 12', "open"),
        (schema(NUMBER), '{"a": 1.', "refused"),
        (schema(NUMBER), '{"b"', "refused"),
        (schema(NUMBER), ' {"a"', "refused"),
        (schema(NUMBER), '{"a": 1, ', "refused"),
        (schema(NUMBER, compact=True), '{"a":12}', "whole"),
        (schema(NUMBER, compact=True), '{"a": ', "refused"),
        (schema({"type": "object"}), '{"x": [1, {"y": null}]}', "whole"),
        (schema({"type": "object"}), "[", "refused"),
        (schema(True), "12", "may end"),
        (schema({"type": "string", "maxLength": 2}), '"é"', "whole"),
        (schema({"type": "string", "maxLength": 2}), '"abc', "refused"),
        (schema({"enum": ["x", None, 3]}), "null", "whole"),
        (schema({"enum": ["x", None, 3]}), "4", "refused"),
        (schema(LIST), '{"n": {"n": null}}', "whole"),
        (schema({"type": "array", "items": {"$ref": "#"}}), "[[], [[]]]", "whole"),
        (schema({"type": "string", "pattern": "^(?=a)a$"}), '"b"', "whole"),  # not enforceable, so no effect
        (schema({"type": "string", "pattern": r"^(a)\1$"}), '"b"', "whole"),
        (schema({"type": "string", "pattern": r"^(?<x>a)\k<x>$"}), '"b"', "whole"),
        (schema({"type": "string", "pattern": r"^a\b"}), '"b"', "whole"),
        (Regex("[a-c]+/\nx"), "abc/\nx", "whole"),
        (Regex("[a-c]+"), "ab", "may end"),
        (Regex("[a-c]+"), "d", "refused"),
        (Regex("a"), "a", "whole"),
        (Regex(""), "", "may end"),
        (Either((Literal("yes"), Literal('no "x"'), Literal("nothing"))), 'no "x"', "whole"),
        (Either((Literal("yes"), Literal("no"), Literal("nothing"))), "no", "may end"),
        (Either((Literal("yes"), Literal("no"))), "maybe", "refused"),
        (Literal("a\nb"), "a\nb", "whole"),
        (Literal("a<|mark|>b"), "a<|mark|>b", "whole"),
        (Sequence((Token(MARK), Literal("b"))), "<|mark|>b", "whole"),
        (Lark('start: "a" digits\ndigits: /[0-9]+/'), "a12", "may end"),
        (Lark('root ::= "a" [0-9] "b"'), "a1b", "whole"),
        (Lark('root ::= "a" [0-9] "b"'), "ab", "refused"),
        (Sequence((Until("</think>"), Literal("yes"))), "so </thin</think>yes", "whole"),
        (Sequence((Until("</think>"), Literal("yes"))), "so </think>no", "refused"),
        (Sequence((Until("</think>"), Literal("yes"))), "<|end|>", "refused"),
        (Sequence((Until("<|mark|>"), Literal("yes"))), "so\n<|mark|>yes", "whole"),
        (Sequence((Until("<|mark|>"), Literal("yes"))), "<|mark|>yes", "whole"),
        (Sequence((optional(Literal("a")), Literal("b"))), "b", "whole"),
        (Repeat(Literal("a"), 2, 3), "a", "open"),
        (Repeat(Literal("a"), 2, 3), "aa", "may end"),
        (Repeat(Literal("a"), 2, 3), "aaa", "whole"),
        (Repeat(Literal("a"), 1, None, Literal(", ")), "a, a", "may end"),
        (Repeat(Literal("a"), 1, 2, Literal(", ")), "a, a", "whole"),
        (Repeat(Literal("a"), 0, None, Literal(", ")), "", "may end"),
        (Repeat(Literal("a"), 0, 0, Literal(", ")), "", "may end"),
    ],
)
def test_what_is_allowed(piece: Piece, text: str, want: str) -> None:
    assert verdict(compiled(piece), text) == want


def test_white_space_ends() -> None:
    """At most one space, or a line break and its indentation, between two tokens of JSON."""
    constraint = compiled(schema({"type": "object"}))
    assert verdict(constraint, '{ "a" : 1 , "b":2 }') == "whole"
    assert verdict(constraint, "{\n" + " " * 64) == "open"
    for text in ("{  ", "{\n\n", "{ \n", "{\n" + " " * 65, "{\t", "{\r"):
        assert verdict(constraint, text) == "refused", text


def test_tokens_that_hold_more_than_one_character() -> None:
    constraint = compiled(schema(object_of(a={"type": "string", "maxLength": 3})))
    matcher = constraint.compiled.matcher()
    for token in (b'{"', b'a"', b":", b'"', b"\xc3", b"\xa9\xc3"):
        assert TOY.index(token) in allowed(matcher)
        matcher.advance(TOY.index(token))
    assert TOY.index(b"\xa9") in allowed(matcher)
    assert TOY.index(b"a") not in allowed(matcher)  # the second byte of a character is due
    matcher.advance(TOY.index(b"\xa9"))
    assert TOY.index(b'"}') in allowed(matcher)
    assert TOY.index(b"ab") not in allowed(matcher)  # four characters


REFUSED: list[tuple[Piece, str]] = [
    (schema(object_of(a={"$ref": "#"})), "without an end"),
    (schema({"$ref": "#"}), "without an end"),
    (schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "without an end"),
    (schema({"anyOf": [object_of(a={"$ref": "#"}), object_of(b={"$ref": "#"})]}), "without an end"),
    (schema(False), "allows no value"),
    (schema([1]), "must be a JSON Schema"),
    (schema({"enum": []}), "Unsatisfiable"),
    (schema({"type": "string", "minLength": 3, "maxLength": 2}), "Unsatisfiable"),
    (schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "Unsatisfiable"),
    (schema({"type": "colour"}), "Invalid type"),
    (schema({"$ref": "http://example.com/x"}), "example.com"),
    (schema({"not": {}}, strict=True), "Unimplemented keys"),
    (schema({"type": "string", "pattern": "(?=a)"}, strict=True), "look-around"),
    (schema({"type": "string", "pattern": "("}), "unclosed group"),
    (schema({"type": "string", "pattern": "[z-a]"}), "invalid character class range"),
    (schema({"type": "string", "pattern": "*"}), "repetition operator"),
    (schema({"type": "object", "patternProperties": {"(": {}}}), "unclosed group"),
    (schema({"allOf": [{"pattern": "(?=a)"}, {"pattern": "("}]}), "unclosed group"),
    (schema({"type": "integer", "multipleOf": 1000003}), "multipleOf"),
    (schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}), "multipleOf"),
    (schema({"type": "string", "pattern": "(a{1000}){1000}"}), "nested repeats"),
    (schema({"enum": ["x" * 300_000]}), "bytes"),
    (Regex("(a{1000}){1000}"), "nested repeats"),
    (Regex("a" * 20_000), "characters"),
    (Regex("(a"), "unclosed"),
    (Regex(r"(a)\1"), "backreferences"),
    (Regex(r"[^\s\S]"), "no answer"),
    (Lark('start: "a" start'), "has no end"),
    (Lark('start: x | y\nx: "a" y\ny: "b" (x | y)+'), "has no end"),
    (Lark('root ::= "a" root'), "has no end"),
    (Lark("start: (("), "Expected"),
    (Lark("start: missing"), "unknown name"),
    (Lark("nonsense"), "neither Lark nor GBNF"),
    (Lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
    (Lark("start: " + '"a" ' * 20_000), "at most"),
]


@pytest.mark.parametrize(("piece", "words"), REFUSED)
def test_what_is_refused(piece: Piece, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words) as caught:
        compiled(piece)
    assert caught.value.param == "field"
    assert caught.value.message.startswith("field ")
    assert "\n" not in caught.value.message and len(caught.value.message) < 400


def test_deep_schemas() -> None:
    def nested(depth: int) -> dict[str, object]:
        content: dict[str, object] = {"type": "null"}
        for _ in range(depth):
            content = {"anyOf": [content]}
        return content

    assert verdict(compiled(schema(nested(31))), "null") == "whole"
    with pytest.raises(InvalidParameter, match="more than 64 deep"):
        compiled(schema(nested(32)))


def test_the_same_grammar_is_compiled_once() -> None:
    first, again = compiled(schema(NUMBER)), compiled(schema(NUMBER))
    assert first == again and first.compiled is again.compiled
    assert compiled(schema(object_of(b={"type": "integer"}))) != first


def test_what_is_kept_is_bounded() -> None:
    first = compiled(Literal("kept"))
    for number in range(64):
        compiled(Literal(f"other {number}"))
    again = compiled(Literal("kept"))
    assert first == again and first.compiled is not again.compiled
    assert verdict(first, "kept") == "whole"


def test_threads_share_a_compilation() -> None:
    """Those who come while it is compiled wait for it, and a refusal reaches all of them."""
    compiler = toy_compiler()
    found: list[object] = []

    def compile() -> None:
        found.append(compiler.compile(schema(NUMBER), "a").compiled)
        with pytest.raises(InvalidParameter):
            compiler.compile(schema({"enum": []}), "a")

    threads = [threading.Thread(target=compile) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1


def test_matchers_of_one_constraint_are_independent() -> None:
    constraint = compiled(schema(NUMBER))
    first, second = constraint.compiled.matcher(), constraint.compiled.matcher()
    for token in toy_tokens('{"a": 1}'):
        first.advance(token)
    assert first.complete and not second.complete
    assert allowed(second) == allowed(constraint.compiled.matcher())


def test_a_vocabulary_that_cannot_be_read() -> None:
    def unknown() -> LLTokenizer:
        raise RuntimeError("no such tokenizer")

    with pytest.raises(InvalidParameter, match="tokenizer is of an unknown form"):
        Compiler(unknown).compile(Literal("a"), "field")


def test_one_end_token() -> None:
    compiler = Compiler(lambda: vocabulary([b"a", b"</s>"], (1,), {1}), trial())
    matcher = compiler.compile(Literal("a"), "field").compiled.matcher()
    assert allowed(matcher) == {0}
    matcher.advance(0)
    assert allowed(matcher) == {1}


def call(name: str, arguments: object) -> Piece:
    return Sequence(
        (Literal(f'<|mark|>{{"name": "{name}", "arguments": '), schema(arguments), Literal("}</call>"))
    )


ADD = '<|mark|>{"name": "add", "arguments": {"a": 1}}</call>'


def test_calls_as_a_model_writes_them() -> None:
    """Pieces together: text, a special token, arguments under their schema, several of them."""
    calls = Either((call("add", NUMBER), call("stop", {})))
    several = compiled(Repeat(calls, 1, None, Literal("\n")))
    assert verdict(several, ADD) == "may end"
    assert verdict(several, f"{ADD}\n{ADD}") == "may end"
    assert verdict(several, ADD + ADD) == "refused"
    assert verdict(several, "Sure") == "refused"
    assert verdict(several, '<|mark|>{"name": "add", "arguments": {"b"') == "refused"
    assert verdict(several, '<|mark|>{"name": "stop", "arguments": {"any": []}}</call>') == "may end"
    assert verdict(several, '<|mark|>{"name": "other') == "refused"
    one = compiled(Sequence((Literal("["), call("add", NUMBER), Literal("]"))))
    assert verdict(one, f"[{ADD}]") == "whole"
    thinking = compiled(Sequence((Until("</think>"), Repeat(calls, 1))))
    assert verdict(thinking, f"why not</think>{ADD}{ADD}") == "may end"
