"""The attention seam: arrays go to upstream untouched, views of a batch attend by themselves."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from chairlift.cache.batch import RowBatch
from chairlift.patches.attention import apply_attention_seam, undo_attention_seam
from tests.mlx.parity import solo

NAME = "scaled_dot_product_attention"


@pytest.fixture(autouse=True)
def seam() -> Iterator[None]:
    apply_attention_seam()
    yield
    undo_attention_seam()
    apply_attention_seam()


class View:
    """Keys that note what they are asked."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def attend(self, queries: Any, **asked: Any) -> str:
        self.asked = {"queries": queries, **asked}
        return "attended"


def test_without_the_seam_a_batch_cannot_attend() -> None:
    model = solo("llama").model
    batch = RowBatch([KVCache() for _ in model.layers])
    prompts = [mx.array([[3, 4, 5]]), mx.array([[9]])]
    caches = [[KVCache() for _ in model.layers] for _ in prompts]
    for prompt, own in zip(prompts, caches, strict=True):
        model(prompt, cache=own)
    batch.change(join={row: (own, own[0].offset) for row, own in enumerate(caches)})
    step = batch.begin()
    tokens = mx.array([[7], [8]])

    def forward() -> mx.array:
        views = batch.caches(step, mx.array(list(step.lengths), dtype=mx.int32))
        logits: mx.array = model(tokens, cache=views)
        return logits

    undo_attention_seam()
    with pytest.raises((TypeError, ValueError, AttributeError)):
        mx.eval(forward())
    apply_attention_seam()
    got = forward()
    for at, row in enumerate(batch.order):
        want = model(tokens[at : at + 1], cache=caches[row])
        assert mx.allclose(got[at : at + 1], want, rtol=0, atol=1e-4)


def test_a_view_gets_mask_scale_and_sinks() -> None:
    for sinks in ("given", None):
        view = View()
        arguments = () if sinks is None else (sinks,)
        out = llama.scaled_dot_product_attention("q", view, view, "cache", 0.5, "mask", *arguments)  # type: ignore[attr-defined]
        assert out == "attended"
        assert view.asked == {"queries": "q", "scale": 0.5, "mask": "mask", "sinks": sinks}
    view = View()
    base.scaled_dot_product_attention("q", view, view, cache=None, scale=2.0, mask=None, sinks="named")
    assert view.asked == {"queries": "q", "scale": 2.0, "mask": None, "sinks": "named"}


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("sinks", [False, True])
def test_arrays_give_what_upstream_gives(mask: str | None, sinks: bool) -> None:
    queries, keys, values = (
        mx.random.normal((2, heads, 5, 8), key=mx.random.key(heads)) for heads in (4, 2, 2)
    )
    extra = {"sinks": mx.array([0.5, -1.0, 2.0, 0.0])} if sinks else {}
    arguments = (queries, keys, values, KVCache(), 0.3, mask)
    got = base.scaled_dot_product_attention(*arguments, **extra)
    undo_attention_seam()
    assert mx.array_equal(got, base.scaled_dot_product_attention(*arguments, **extra))


def test_quantized_caches_go_upstream() -> None:
    cache = QuantizedKVCache(group_size=32, bits=8)
    keys, values = cache.update_and_fetch(mx.ones((1, 2, 4, 32)), mx.ones((1, 2, 4, 32)))
    out = base.scaled_dot_product_attention(mx.ones((1, 2, 4, 32)), keys, values, cache, 0.2, None)
    assert mx.allclose(out, mx.ones((1, 2, 4, 32)), atol=0.05)


def test_it_is_applied_once() -> None:
    first = base.scaled_dot_product_attention
    assert apply_attention_seam() and apply_attention_seam()
    assert base.scaled_dot_product_attention is first
    undo_attention_seam()
    original = base.scaled_dot_product_attention
    assert original is not first and llama.scaled_dot_product_attention is original  # type: ignore[attr-defined]
    undo_attention_seam()
    assert base.scaled_dot_product_attention is original


@pytest.mark.parametrize("before", [True, False], ids=["imported before", "imported after"])
def test_every_model_module_has_it(before: bool) -> None:
    name = "mlx_lm.models.starcoder2"
    undo_attention_seam()
    loaded = sys.modules.pop(name, None)
    if not before:
        apply_attention_seam()
    module = importlib.import_module(name)
    apply_attention_seam()
    assert vars(module)[NAME] is base.scaled_dot_product_attention
    undo_attention_seam()
    assert vars(module)[NAME] is base.scaled_dot_product_attention
    if loaded is not None:
        sys.modules[name] = loaded


def test_a_module_that_took_the_original_meanwhile_is_caught_up_with() -> None:
    seam = llama.scaled_dot_product_attention  # type: ignore[attr-defined]
    undo_attention_seam()
    original = base.scaled_dot_product_attention
    apply_attention_seam()
    llama.scaled_dot_product_attention = original  # type: ignore[attr-defined]
    apply_attention_seam()
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention is not original  # type: ignore[attr-defined]
    assert seam is not original


def test_a_base_that_is_absent_is_no_error() -> None:
    assert apply_attention_seam(("no_such_package.models.base",)) is False
    undo_attention_seam(("no_such_package.models.base",))
