"""Rows that give their states up draw what they would have drawn: small real models, float32."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chairlift.engine.batching import Batching
from chairlift.engine.constraints import Regex, Sequence, Until
from chairlift.engine.memory.budget import Kind, Reservation
from chairlift.engine.plan import Sample
from chairlift.engine.request import Request, SamplingParams
from chairlift.engine.thinking import ThinkingBudget
from tests.engine.memory.test_states import Served
from tests.engine.test_runner_constraints import LIST, OBJECT, constraint, schema
from tests.mlx.solo import prompt
from tests.mlx.test_settings_rows import SETTINGS
from tests.vocabularies import TOY

ERROR = 1e-4
"""Of a log probability."""
TOKENS = 24
LONG = SamplingParams(temperature=1.2, top_p=0.98, max_tokens=TOKENS)


def requests() -> list[Request]:
    """Settings of every kind, constraints, bounded thinking, and choices of one prompt."""
    asked = [replace(params, max_tokens=TOKENS, min_tokens=0) for params in SETTINGS]
    listed = [Request("r", prompt(40 + 9 * at, at), params) for at, params in list(enumerate(asked))[::2]]
    end = TOY.index(b"</")
    behind = constraint(Sequence((Until("</"), Regex("[a-f]{4}"))))
    kinds = (
        {"constraint": schema(OBJECT, compact=False)},
        {"constraint": schema(LIST, compact=False)},
        {"constraint": constraint(Regex("[ab]{200}"))},
        {"thinking": ThinkingBudget(9, end)},
        {"constraint": behind, "thinking": ThinkingBudget(11, end)},
    )
    listed += [Request("r", prompt(70, at), LONG, **kind) for at, kind in enumerate(kinds)]  # type: ignore[arg-type]
    return listed + [Request("r", prompt(100, 7), LONG)] * 3


def alone(family: str, batching: Batching) -> list[list[Sample]]:
    samples = []
    for seed, request in enumerate(requests()):
        served = Served(family, batching)
        row = served.ask(request, seed)
        served.run()
        samples.append(served.samples[row])
    return samples


@pytest.mark.parametrize(
    ("family", "batching"),
    [("llama", Batching.FLAT), ("qwen3_5", Batching.HYBRID)],
)
def test_rows_that_were_set_back_answer_as_alone(family: str, batching: Batching) -> None:
    """Now and then most of the memory is needed for something else."""
    served = Served(family, batching)
    need = served.sizes.alone(200, 200 + TOKENS)
    served.budget.total = 6 * need
    other = served.budget.reserve(0, Kind.HEADROOM)
    assert isinstance(other, Reservation)
    rows = [served.ask(request, seed) for seed, request in enumerate(requests())]
    steps = 0
    while served.scheduler.busy:
        steps += 1
        other.claim(int(4.5 * need) if steps % 16 >= 12 else 0)
        served.step()
        assert served.memory.used <= served.budget.for_requests or served.scheduler.running == 1
        assert served.runner.stats().kv_bytes <= served.memory.used
    assert sum(row.preempted > 0 for row in rows) > len(rows) / 2
    for row, want in zip(rows, alone(family, batching), strict=True):
        got = served.samples[row]
        assert [sample.token for sample in got] == [sample.token for sample in want], row.request.sampling
        for mine, solo in zip(got, want, strict=True):
            assert mine.logprob == pytest.approx(solo.logprob, abs=ERROR)
            assert [token for token, _ in mine.top] == [token for token, _ in solo.top]
    assert served.runner.stats().kv_bytes == served.memory.used == 0
