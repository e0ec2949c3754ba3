"""Grammars that would take this process down, or for ever, cost another one."""

from __future__ import annotations

import gc
import json
import threading

from chairlift.engine.constraints.pieces import Json, Lark, Literal, Piece, Token
from chairlift.engine.constraints.render import render
from chairlift.engine.constraints.trial import TOO_LARGE, Trial, attempt

GOOD = 'start: "a"'


def grammar(piece: Piece) -> str:
    return render(piece, {})


def references(count: int) -> str:
    """A schema in which each definition is another's: they overflow llguidance's stack."""
    chain: dict[str, object] = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(count)}
    return grammar(
        Json(json.dumps({"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "null"}}}))
    )


def intersections(count: int) -> str:
    """Patterns that have to hold together: their automaton is exponential."""
    patterns = [{"type": "string", "pattern": f".*{chr(97 + at)}.*{chr(98 + at)}.*"} for at in range(count)]
    return grammar(Json(json.dumps({"allOf": patterns})))


def test_what_takes_the_process_down_or_too_long_is_told_and_the_next_one_passes() -> None:
    trial = Trial(patience=2.0)
    assert trial.complaint(GOOD, 300) is None
    first = trial._processes[0]
    assert trial.complaint(references(5000), 300) == TOO_LARGE
    assert first.poll() is not None
    assert trial.complaint(references(50), 300) is None
    second = trial._processes[0]
    assert trial.complaint(intersections(20), 300) == TOO_LARGE
    assert second.poll() is not None
    assert trial.complaint(intersections(2), 300) is None
    second = trial._processes[0]
    assert trial.complaint(GOOD, 300) is None
    assert trial._processes == [second]
    del trial
    gc.collect()
    assert second.poll() is not None


def test_a_process_that_ended_by_itself_is_replaced() -> None:
    trial = Trial()
    assert trial.complaint(GOOD, 300) is None
    trial._processes[0].kill()
    trial._processes[0].wait()
    assert trial.complaint(GOOD, 300) is None


def test_threads_take_turns() -> None:
    trial = Trial()
    found: list[str | None] = []
    threads = [
        threading.Thread(target=lambda text=text: found.append(trial.complaint(text, 300)))
        for text in (GOOD, "start: x") * 3
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count(None) == 3
    assert len([each for each in found if each is not None and "unknown name" in each]) == 3


def test_attempts() -> None:
    """In this process: what is tried there, for grammars that do no harm."""
    assert attempt(GOOD, 1) is None
    assert attempt(grammar(Json('{"type": "object"}')), 300) is None
    assert attempt(grammar(Token(280)), 300) is None
    assert "unknown name" in str(attempt("start: x", 300))
    assert attempt(grammar(Literal("")), 300) is None
    assert "Unsatisfiable" in str(attempt(grammar(Json('{"enum": []}')), 300))
    followed = attempt(grammar(Lark('start: (("a" "b"){1000} "c"){1000}')), 300)
    assert followed is not None and "Too many items" in followed
