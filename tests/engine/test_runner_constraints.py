"""Constrained rows over small random models: they follow, alone and in any company, and harm nobody."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from chairlift.engine.batching import Batching
from chairlift.engine.constraints import Compiler, Constraint, Json, Literal, Piece, Regex, Sequence, Until
from chairlift.engine.constraints.matcher import Matcher
from chairlift.engine.draws import Draws
from chairlift.engine.models.build import make_runner
from chairlift.engine.request import SamplingParams
from chairlift.engine.runner import MlxRunner
from tests.engine.stepping import GREEDY, Rider, Stepper, answers
from tests.engine.test_runner_faults import FAMILY, Faulty, once
from tests.mlx.configs import VOCABULARY
from tests.mlx.parity import solo
from tests.mlx.solo import prompt
from tests.vocabularies import END, STOP, TOY, toy_compiler

COMPILER = toy_compiler()
TOKENS = 22
BROKEN = "It broke."
WARM = SamplingParams(temperature=1.5, top_p=0.99)
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "yy", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 2}


def constraint(piece: Piece) -> Constraint:
    return COMPILER.compile(piece, "field")


def schema(content: object, *, compact: bool = True) -> Constraint:
    """Compact, so that random models come to the end soon."""
    return constraint(Json(json.dumps(content), compact=compact))


def runner_of(batching: Batching) -> MlxRunner:
    return make_runner(solo(FAMILY[batching]).model, VOCABULARY, batching)[1]


def answer(tokens: list[int]) -> str:
    """The text before the first token that ends it; nothing but such tokens may follow."""
    end = next(at for at, token in enumerate(tokens) if token in (END, STOP))
    assert set(tokens[end:]) <= {END, STOP}
    return b"".join(TOY[token] for token in tokens[:end]).decode()


def company() -> list[Rider]:
    """Greedy and sampled rows, with a constraint and without, of unlike lengths."""
    thinking = Sequence((Until("</"), Regex("[a-f]{4}")))
    return [
        Rider(prompt(5, 1), TOKENS, WARM, 1, constraint=schema(OBJECT)),
        Rider(prompt(9, 1), TOKENS, GREEDY),
        Rider(prompt(40, 1), TOKENS, WARM, 2, chunk=9, constraint=schema(LIST)),
        Rider(prompt(1, 1), TOKENS, WARM, 3),
        Rider(prompt(1, 1), TOKENS, GREEDY, constraint=constraint(Regex("a{3}b|c{3}d"))),
        Rider(
            prompt(6, 1),
            TOKENS,
            replace(WARM, logit_bias={TOY.index(b"</"): 6}),
            4,
            constraint=constraint(thinking),
        ),
    ]


def assert_valid(riders: list[Rider]) -> None:
    jsonschema.validate(json.loads(answer(riders[0].drawn)), OBJECT)
    jsonschema.validate(json.loads(answer(riders[2].drawn)), LIST)
    assert answer(riders[4].drawn) in ("aaab", "cccd")
    assert re.fullmatch(r"(?s).*</[a-f]{4}", answer(riders[5].drawn))


@cache
def alone(batching: Batching) -> list[list[int]]:
    return [answers(runner_of(batching), [rider])[0] for rider in company()]


@pytest.mark.parametrize("batching", Batching)
def test_constrained_rows_answer_as_they_do_alone(batching: Batching) -> None:
    riders = company()
    stepper = Stepper(runner_of(batching), *riders[:3])
    stepper.run(5)
    stepper.riders += riders[3:]
    stepper.run()
    assert [rider.drawn for rider in riders] == alone(batching)
    assert_valid(riders)


@pytest.mark.parametrize("batching", [Batching.FLAT, Batching.HYBRID])
def test_after_preemption_a_constraint_goes_on_where_it_was(batching: Batching) -> None:
    riders = company()
    stepper = Stepper(runner_of(batching), *riders)
    for steps, rider in ((6, riders[0]), (1, riders[2]), (2, riders[5]), (3, riders[0]), (1, riders[4])):
        stepper.run(steps)
        stepper.preempt(rider)
    stepper.run()
    assert [rider.drawn for rider in riders] == alone(batching)
    assert_valid(riders)


@pytest.mark.parametrize("where", ["in the model", "before the draw", "in the draw"])
@pytest.mark.parametrize("batching", [Batching.FLAT, Batching.SOLO])
def test_after_a_lost_step_constrained_rows_start_again(
    batching: Batching, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    riders = company()
    faulty = Faulty(batching)
    stepper = Stepper(faulty.runner, *riders)
    stepper.run(12)
    if where == "in the model" and batching is Batching.FLAT:
        faulty.trigger = lambda tokens: True
    elif where == "in the draw":

        def broken(*_: object) -> None:
            monkeypatch.undo()
            raise RuntimeError

        monkeypatch.setattr(Draws, "_draw", broken)
    else:
        once(monkeypatch, "async_eval")
    stepper.run()
    assert [len(rider.losses) for rider in riders] == [1] * len(riders)
    assert [rider.drawn for rider in riders] == alone(batching)


@dataclass(frozen=True)
class Brittle:
    """Compiled to something that breaks after so many tokens."""

    start: Constraint
    tokens: int

    def matcher(self) -> Matcher:
        matcher = self.start.compiled.matcher()
        advance = matcher.advance
        left = [self.tokens]

        def counted(token: int) -> None:
            advance(token)
            left[0] -= 1
            if not left[0]:
                matcher.fault = BROKEN

        matcher.advance = counted  # type: ignore[method-assign]
        return matcher


@pytest.mark.parametrize("batching", [Batching.FLAT, Batching.SOLO])
def test_a_constraint_that_breaks_fails_its_row_alone(batching: Batching) -> None:
    riders = company()
    whole = schema(LIST)
    broken = Rider(prompt(7, 1), TOKENS, WARM, 5, constraint=Constraint(whole.grammar, Brittle(whole, 3)))
    stepper = Stepper(runner_of(batching), *riders[:2], broken, *riders[2:])
    stepper.run()
    assert broken.failed == BROKEN and len(broken.drawn) == 3
    assert [rider.drawn for rider in riders] == alone(batching)
    assert not any(rider.losses for rider in riders)


def test_a_constraint_against_the_other_settings_fails_its_row_alone() -> None:
    """allowed_token_ids that leave nothing of what the grammar allows."""
    riders = company()
    against = Rider(
        prompt(7, 1), 9, SamplingParams(allowed_token_ids=(65, 66)), constraint=constraint(Literal("AC"))
    )
    stepper = Stepper(runner_of(Batching.FLAT), *riders, against)
    stepper.run()
    assert against.drawn == [65]
    assert against.failed is not None and "together allow no token" in against.failed
    assert [rider.drawn for rider in riders] == alone(Batching.FLAT)


def test_rows_without_constraints_know_nothing_of_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their step is launched whole before the step before is read."""
    runner = runner_of(Batching.FLAT)
    stepper = Stepper(runner, *company())
    finished: list[int] = []
    original = Draws.finish
    monkeypatch.setattr(
        Draws, "finish", lambda self, flight: finished.append(flight.number) or original(self, flight)
    )
    stepper.run(4)
    assert len(finished) == 4
    stepper.riders = [rider for rider in stepper.riders if rider.constraint is None]
    stepper.run()
    assert len(finished) == 4


def test_the_forward_is_launched_before_the_step_before_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    faulty = Faulty(Batching.FLAT)
    faulty.trigger = lambda tokens: bool(events.append("forward"))  # type: ignore[func-returns-value]
    land, finish = MlxRunner._land, Draws.finish

    def landing(self: MlxRunner, flight: Any) -> Any:
        events.append("land")
        return land(self, flight)

    def drawing(self: Draws, flight: Any) -> None:
        events.append("draw")
        finish(self, flight)

    monkeypatch.setattr(MlxRunner, "_land", landing)
    monkeypatch.setattr(Draws, "finish", drawing)
    stepper = Stepper(faulty.runner, Rider(prompt(5, 1), 9, constraint=schema(LIST)))
    stepper.run(3)
    assert events == ["forward", "draw", *["forward", "land", "draw"] * 2]


def test_logits_beyond_the_vocabulary_are_never_drawn() -> None:
    """Models pad their vocabularies; here the tokenizer has 64 tokens fewer than the logits."""
    from tests.vocabularies import trial, vocabulary

    small = Compiler(lambda: vocabulary([*TOY[:127], b"</s>"], (127,), {127}), trial())
    free = small.compile(Regex(r"(.|\n){40}"), "field")
    rider = Rider(prompt(5, 1), 41, SamplingParams(temperature=2), constraint=free)
    (drawn,) = answers(runner_of(Batching.FLAT), [rider])
    assert max(drawn[:40]) < 127 and drawn[40] == 127


SCALAR = st.sampled_from(
    (
        {"type": "integer", "minimum": -5, "maximum": 300},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]$"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", 'a "b"', 7, None, {"x": []}]},
        {"const": "\u00e9\n"},
        {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9},
    )
)
Content = dict[str, object]


def grown(inner: st.SearchStrategy[Content]) -> st.SearchStrategy[Content]:
    names = st.sampled_from(("a", "b", "na me", "\u00e9"))
    return st.one_of(
        st.builds(
            lambda item, least, more: {
                "type": "array",
                "items": item,
                "minItems": least,
                "maxItems": least + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(
            lambda parts, all: {
                "type": "object",
                "properties": parts,
                "required": list(parts)[: None if all else 1],
                "additionalProperties": False,
            },
            st.dictionaries(names, inner, min_size=1, max_size=3),
            st.booleans(),
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}),
    )


SCHEMA: st.SearchStrategy[Content] = st.recursive(SCALAR, grown, max_leaves=5)


@settings(max_examples=6, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(st.lists(st.tuples(SCHEMA, st.integers(0, 2**32)), min_size=6, max_size=6))
def test_every_finished_answer_validates(rows: list[tuple[Content, int]]) -> None:
    warm = SamplingParams(temperature=1)
    riders = [
        Rider(prompt(1 + at % 5, 1), 60, warm, seed, constraint=schema(content, compact=seed % 4 > 0))
        for at, (content, seed) in enumerate(rows)
    ]
    stepper = Stepper(runner_of(Batching.FLAT), *riders)
    while riders and not all(END in rider.drawn or STOP in rider.drawn or rider.over for rider in riders):
        stepper.run(1)
    for rider, (content, _) in zip(riders, rows, strict=True):
        assert rider.failed is None and not rider.losses
        if END in rider.drawn or STOP in rider.drawn:
            jsonschema.validate(json.loads(answer(rider.drawn)), content)
    finished = sum(END in rider.drawn or STOP in rider.drawn for rider in riders)
    assert finished >= 3, "the test must see answers to their end"
