"""Quantized keys and values: a row's tokens are those of a solo run, whatever happens around it.

The reference is upstream's own `generate_step`, on caches of the layer's own class that round what they are
given to 8 or 4 bits and back, or on mlx-lm's own `QuantizedKVCache`; nothing of ours takes part in either.

A number that lies on the edge of two codes falls to either side with float32's noise of other matrix shapes,
and moves by a whole step. So most log probabilities must be exact, and a few may be off by a little.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.utils import save_config, save_model

from chairlift.cache.quantized import BITS, UnsupportedQuantization
from chairlift.cache.step import CohortStep
from chairlift.engine.batching import Batching
from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.llm import LLM
from chairlift.engine.models.build import make_runner
from chairlift.engine.models.loader import load_model
from chairlift.engine.plan import Sample
from chairlift.engine.request import SamplingParams
from chairlift.engine.runner import MlxRunner
from tests.engine.models.vision_folders import write_tokenizer
from tests.mlx.configs import VOCABULARY, Config
from tests.mlx.families import FAMILIES, Family, build
from tests.mlx.lift import LOGPROB_ERROR, Lift, Ride, differences
from tests.mlx.solo import Solo, prompt

EDGE = {"int8": 0.05, "int4": 0.2}
"""Most that a log probability may be off where a number fell to the other side of an edge; two candidates
closer than this are a tie."""
EXACT_SHARE = 0.7
"""Share of log probabilities that no edge touches, at least."""

RIDES = (
    Ride(prompt(5), tokens=12),
    Ride(prompt(40), tokens=12, chunks=(7,)),
    Ride(prompt(100), join=2, tokens=12, chunks=(64,)),
    Ride(prompt(1), join=3, tokens=12),
    Ride(prompt(2), join=4, tokens=14, preempt=(8, 13)),
    Ride(prompt(64), join=5, tokens=12, chunks=(10,), preempt=(8,)),
    Ride(prompt(30), join=4, tokens=20, chunks=(16,), cancel=12),
    Ride(prompt(290), join=2, tokens=8, chunks=(90,)),
    Ride(prompt(17), join=7, tokens=10, chunks=(1, 3)),
)
"""Joins together and later, chunks, a cancel, preemption in mid-prefill and (twice) in mid-decode, and a row
in a cohort of its own."""


def wide(config: Config, **fields: Any) -> Config:
    """A family's small configuration with heads of 32 numbers, the smallest that can be quantized."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        return {**config, "text_config": wide(inner, **fields)}
    return {**config, "head_dim": 32, **fields}


@cache
def model(name: str) -> Any:
    fields: dict[str, Any] = {"mixtral": {"hidden_size": 128}, "deepseek_v3": LATENT}.get(name, {})
    return build(Family(name, wide(FAMILIES[name].config, **fields)))


LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}


@cache
def batching(name: str) -> Batching:
    return make_runner(model(name), VOCABULARY)[0].batching


@cache
def runner(name: str, kind: str) -> MlxRunner:
    return make_runner(model(name), VOCABULARY, batching(name), kv_cache_dtype=kind)[1]


def rounding(cache: Any, bits: int) -> Any:
    """The cache, made to round the keys and values that it is given."""
    if isinstance(cache, CacheList):
        for part in cache.caches:
            rounding(part, bits)
    elif isinstance(cache, KVCache | RotatingKVCache):
        update = cache.update_and_fetch

        def rounded(array: mx.array) -> mx.array:
            size = 64 if array.shape[-1] % 64 == 0 else 32
            codes, scales, biases = mx.quantize(array, group_size=size, bits=bits)
            return mx.dequantize(codes, scales, biases, group_size=size, bits=bits)

        cache.update_and_fetch = lambda keys, values: update(rounded(keys), rounded(values))
    return cache


@cache
def rounded_solo(name: str, kind: str) -> Solo:
    """Solo runs that round keys and values as soon as they are made."""
    made = model(name)
    return Solo(made, caches=lambda: [rounding(cache, BITS[kind]) for cache in make_prompt_cache(made)])


def ride(name: str, kind: str, rides: tuple[Ride, ...]) -> list[list[Sample]]:
    """All rides' samples; every ride that is not cancelled gets all its tokens, and nothing stays behind."""
    used = runner(name, kind)
    lift = Lift(used)
    answers = lift.run(rides)
    assert lift.failures == {}
    assert all(len(got) == ride.tokens or ride.cancel for ride, got in zip(rides, answers, strict=True))
    assert (used.stats().rows, used.stats().kv_bytes) == (0, 0)
    return answers


def assert_rounding_alone(
    solo: Solo, kind: str, rides: tuple[Ride, ...], answers: list[list[Sample]]
) -> None:
    """Answers are the solo run's but for edges."""
    assert differences(solo, rides, answers, error=EDGE[kind], tie=EDGE[kind]) == []
    exact = total = 0
    for ride, samples in zip(rides, answers, strict=True):
        want = solo.answer(ride.prompt, ride.tokens)
        total += len(samples)
        for sample, token, logprob in zip(samples, want.tokens, want.logprobs, strict=False):
            assert sample.logprob is not None
            exact += sample.token == token and abs(sample.logprob - logprob) < LOGPROB_ERROR
    assert exact >= EXACT_SHARE * total


@pytest.mark.parametrize(
    ("name", "kind", "way"),
    [
        ("llama", "int8", Batching.FLAT),
        ("llama", "int4", Batching.FLAT),
        ("gemma3_text", "int8", Batching.FLAT),
        ("mixtral", "int8", Batching.FLAT),
        ("gemma4_text", "int4", Batching.FLAT),
        ("qwen3_5", "int8", Batching.HYBRID),
    ],
)
def test_rows_in_company_are_rows_alone(name: str, kind: str, way: Batching) -> None:
    """Full and sliding attention, experts, shared keys, and attention beside recurrent layers."""
    assert batching(name) is way
    assert_rounding_alone(rounded_solo(name, kind), kind, RIDES, ride(name, kind, RIDES))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rows_equal_mlx_lms_own_quantized_caches(kind: str) -> None:
    """Quantized from the first token on. Its `kv_bits` with `quantized_kv_start=0` quantizes a prompt only
    behind each chunk of `prefill_step_size` tokens, which attends to itself unquantized."""
    made, bits = model("llama"), BITS[kind]
    solo = Solo(made, caches=lambda: [QuantizedKVCache(32, bits) for _ in make_prompt_cache(made)])
    assert_rounding_alone(solo, kind, RIDES[:4], ride("llama", kind, RIDES[:4]))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantization_is_seen(kind: str) -> None:
    """A solo run without it differs by far more than an edge here and there."""
    answers = ride("llama", kind, RIDES[:4])
    with pytest.raises(AssertionError):
        assert_rounding_alone(Solo(model("llama")), kind, RIDES[:4], answers)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_wrong_mask_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner(name, "int8")  # made, and kept, with the right masks
    monkeypatch.setattr(CohortStep, "mask", lambda *_: None)
    answers = ride(name, "int8", RIDES)
    with pytest.raises(AssertionError):
        assert_rounding_alone(rounded_solo(name, "int8"), "int8", RIDES, answers)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt_oss", "its attention has sinks"),
        ("deepseek_v3", "its attention does arithmetic on the keys themselves"),
        ("gemma2", "its attention does arithmetic on the keys themselves"),
        ("minimax_m3_vl", "its attention takes one row at a time"),
        ("deepseek_v41", "its caches of type LayerCache are of a kind of their own"),
        ("mamba2", "it keeps no keys and values"),
        ("starcoder2", "its heads of 16 numbers are not a multiple of 32"),
    ],
)
def test_families_that_cannot_say_why(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedQuantization, match=reason):
        make_runner(model(name), VOCABULARY, batching(name), kv_cache_dtype="int8")


# Model folders


def folder(path: Path, name: str, **fields: Any) -> Path:
    """The family's small model as a folder, `fields` in its configuration beside."""
    config = wide(FAMILIES[name].config, **fields)
    path.mkdir()
    save_model(path, model(name), donate_model=False)
    save_config({"model_type": name, **config}, path / "config.json")
    write_tokenizer(path, ["<|end|>"], eos_token="<|end|>")
    return path


@pytest.mark.parametrize(("kind", "word"), [("int8", 32 + 2 * 4), ("int4", 16 + 2 * 4), ("auto", 32 * 4)])
def test_bytes_of_a_token(kind: str, word: int, tmp_path: Path) -> None:
    """Two layers of two heads' keys and values: codes, a scale and a bias, or float32."""
    loaded = load_model(folder(tmp_path / "llama", "llama"), "up", kv_cache_dtype=kind)
    assert loaded.info.kv_bytes_per_token == 2 * 2 * 2 * word
    assert loaded.info.kv_dtype == ("float32" if kind == "auto" else kind)
    loaded.runner.close()


def test_llm_answers_from_quantized_caches(tmp_path: Path) -> None:
    path = folder(tmp_path / "llama", "llama")
    tokens = prompt(20)
    with LLM(path, kv_cache_dtype="int4") as llm:
        assert llm.info.kv_dtype == "int4"
        (output,) = llm.generate(
            [tokens], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), progress=False
        )
    assert output.token_ids == rounded_solo("llama", "int4").answer(tokens, 8).tokens[:8]


def test_unknown_types_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="int2 is unknown; choose from auto, int8, int4."):
        load_model(tmp_path, "up", kv_cache_dtype="int2")


def test_serve_refuses_to_start_in_one_line(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    path = folder(tmp_path / "small", "gpt_oss", rope_scaling=scaling)
    chairlift = str(Path(sys.executable).with_name("chairlift"))
    command = [chairlift, "serve", "--port", "0", "--model", str(path)]
    ended = subprocess.run(
        [*command, "--kv-cache-dtype", "int4"], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.strip() == (
        "chairlift: small (gpt_oss) cannot be served with --kv-cache-dtype int4: "
        "its attention has sinks, which quantized attention lacks."
    )
