"""docs/monitoring.md tells every metric, with its type and its labels, and every field of the log."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from chairlift.server.metrics import ServerMetrics
from chairlift.server.observe.settings import ObserveSettings
from chairlift.server.settings import ServerSettings
from tests.fakes import FakeRunner, answering
from tests.server.embedding_harness import embedding_lift
from tests.server.harness import COMPLETIONS, completion_body, lift
from tests.server.observe.reading import FIELDS, request_lines

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"
ROW = re.compile(r"\| (`\w+`(?:, `\w+`)*) \| (gauge|counter|histogram) \| ((?:`\w+`(?:, )?)*) ?\| .*\|$")

Told = dict[str, tuple[str, frozenset[str]]]
"""By name: type and labels."""


def told() -> Told:
    found: Told = {}
    model = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            model = line == "### Per model"
        if (row := ROW.fullmatch(line)) is None:
            continue
        names, kind, labels = row.groups()
        for name in re.findall(r"\w+", names):
            assert name not in found, name
            found[name] = kind, frozenset([*re.findall(r"\w+", labels), *(["model_name"] if model else [])])
    return found


async def test_every_metric_is_told_and_no_other() -> None:
    shown: Told = {}
    async with embedding_lift(runner=FakeRunner(answering("abc"))) as server:
        await server.embed("Hi")
        await server.client.post(COMPLETIONS, json=completion_body())
        await server.client.post(COMPLETIONS, json={})
        metrics: ServerMetrics = server.app.state.context.metrics
        metrics.http.ended(COMPLETIONS, "POST", 499, 0.0, left=True)
        text = (await server.client.get("/metrics")).text
    for family in text_string_to_metric_families(text):
        if family.name.startswith("chairlift_"):
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            shown[family.name.removeprefix("chairlift_")] = family.type, frozenset(labels)
    assert shown == told()


def test_every_field_of_the_log_is_told() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("| field | |\n")[2].partition("\n\n")[0]
    told = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert told == set(FIELDS)


async def test_a_line_has_no_field_that_is_not_told() -> None:
    """`FIELDS` is what tests look for; this is what there is."""
    usual = set(vars(logging.makeLogRecord({}))) | {"message", "taskName"}
    found: set[str] = set()

    class Names(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.update(vars(record))

    names, access = Names(), logging.getLogger("chairlift.access")
    observe = ObserveSettings(access_log=True, log_prompts=True)
    async with lift(settings=ServerSettings(observe=observe)) as server:
        with request_lines():
            access.addHandler(names)
            try:
                await server.complete(prompt=["a", "b"], stream=True, max_tokens=3)
                await server.complete(prompt="a", stop=5)
            finally:
                access.removeHandler(names)
    assert {"answers", "itl_s", "body", "error"} <= found
    assert found - usual <= set(FIELDS)
