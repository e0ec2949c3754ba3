"""A chunk of one row's prompt over a view of its cache says what it says over the cache itself."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama, qwen3_5
from mlx_lm.models.cache import make_prompt_cache

from chairlift.cache import views
from chairlift.cache.prompt_view import prompt_views
from chairlift.cache.span_kernel import reference
from chairlift.engine.models import batching
from chairlift.patches import apply_patches

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
HYBRID = LLAMA | {
    "model_type": "qwen3_5",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
}


def model_of(module: Any, config: dict[str, object]) -> Any:
    mx.random.seed(5)
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize(("module", "config"), [(llama, LLAMA), (qwen3_5, HYBRID)])
@pytest.mark.parametrize("kernel", [False, True])
def test_it_says_the_same(
    module: Any, config: dict[str, object], kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_patches()
    launches = []
    if kernel:  # the reference stands in for it

        def attend_chunks(queries: mx.array, chunks: Any, arrays: Any, **options: Any) -> mx.array:
            launches.append(chunks)
            return reference(queries, chunks[0], *arrays[0], options["scale"], options["sinks"])

        monkeypatch.setattr(views, "attend_chunks", attend_chunks)
        monkeypatch.setattr(views, "span_kernel_available", lambda *_: True)
    model = model_of(module, config)
    tokens = mx.array([[(7 * n) % 97 for n in range(300)]])
    own, seen = make_prompt_cache(model), make_prompt_cache(model)
    for start, stop in ((0, 20), (20, 290), (290, 291), (291, 300)):
        want = model(tokens[:, start:stop], cache=own)
        got = model(tokens[:, start:stop], cache=prompt_views(seen))
        assert mx.allclose(got, want, atol=1e-4), (start, stop)
    assert mx.allclose(model(tokens[:, :1], cache=seen), model(tokens[:, :1], cache=own), atol=1e-4)
    assert bool(launches) is kernel


def test_a_model_that_makes_its_own_masks_keeps_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    apply_patches()
    model = model_of(llama, LLAMA)
    assert batching._views_agree(model, 97)

    def masked(hidden: mx.array, cache: Any) -> mx.array:
        return mx.zeros((hidden.shape[1], hidden.shape[1]))

    monkeypatch.setattr(llama, "create_attention_mask", masked)
    assert not batching._views_agree(model, 97)
