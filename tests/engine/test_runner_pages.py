"""Kept pages that turn out to be bad: whoever begins with them gets its answer all the same."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from chairlift.engine.models.build import make_runner
from chairlift.engine.pages import PageStore
from chairlift.engine.runner import MlxRunner
from tests.mlx.configs import VOCABULARY
from tests.mlx.parity import finding, solo
from tests.mlx.prefix_server import Server, words

FAMILIES = ["llama", "qwen3_5"]
PROMPT = words(3, 150)


def filled(name: str) -> tuple[Server, PageStore]:
    """A server that keeps a prompt's pages."""
    runner: MlxRunner = make_runner(solo(name).model, VOCABULARY, finding(name).batching)[1]
    server = Server.of(runner)
    server.add(PROMPT)
    server.finish()
    assert runner._pages is not None and runner._pages.nbytes
    return server, runner._pages


def test_the_most_that_was_kept_is_told_once() -> None:
    server, store = filled("llama")
    kept = store.nbytes
    first = server.runner.stats()
    assert first.prefix_bytes == first.recent_prefix_bytes == kept
    server.scheduler.clear_prefixes()
    server.finish()
    after = [server.runner.stats() for _ in range(2)]
    assert [stats.prefix_bytes for stats in after] == [0, 0]
    assert [stats.recent_prefix_bytes for stats in after] == [kept, 0]


def answered(server: Server, name: str, losses: int, tokens: int = 6) -> None:
    """Two at once from what is kept: both as alone, at the price of so many new starts."""
    first, _ = [server.add([*PROMPT, *words(place, 20)], tokens=tokens) for place in (7, 9)]
    server.finish()
    assert first.cached == 0, "all of it was computed after all"
    assert server.wrong(name) == []
    assert server.scheduler.losses == losses
    again = server.add([*PROMPT, *words(11, 20)])
    server.finish()
    assert server.wrong(name) == [] and server.scheduler.losses == losses and again.cached >= 128


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_pages_that_are_not_numbers_go_and_their_rows_start_again(name: str, tokens: int) -> None:
    """Also where the state has gone by the time that the last token is read."""
    server, store = filled(name)
    store._pages = {id: mx.full(page.shape, 255, dtype=mx.uint8) for id, page in store._pages.items()}
    answered(server, name, losses=2, tokens=tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_pages_that_make_no_caches_go_and_their_rows_start_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, store = filled(name)
    original, faults = store._format.restore, iter([ValueError("no caches")])

    def restore(*arguments: Any, **more: Any) -> list[Any]:
        for fault in faults:
            raise fault
        return original(*arguments, **more)

    monkeypatch.setattr(store._format, "restore", restore)
    answered(server, name, losses=2)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_array_is_counted_while_it_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx's bound on buffers is one of their number, not of bytes (vllm-mlx #641)."""
    monkeypatch.setattr(mx, "device_info", lambda: {"resource_limit": 499_000})
    server, pages = filled(name)
    found = server.runner.stats()
    assert found.buffers_limit == 499_000
    weights = len(tree_flatten(solo(name).model.parameters()))
    assert (found.rows, found.buffers) == (0, weights + len(pages._pages) + len(pages._states))
    server.add(words(90, 20), tokens=20)
    server.add(words(91, 30), tokens=20)
    for _ in range(6):
        server.step()
    live, layers = server.runner.stats(), len(solo(name).model.layers)
    assert (live.rows, live.buffers - weights - pages.buffers) == (2, 2 * layers), (
        "one cohort, two arrays a layer"
    )
    server.finish()
    assert server.scheduler.prefixes.index is not None
    assert server.runner.stats().buffers == weights + len(server.scheduler.prefixes.index)
