"""`echo` with `logprobs`: how probable a prompt is, as evaluations ask for it.

The fake scores the prompt's token at position n with -1 - n, and draws each of the answer at -0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from openai import AsyncOpenAI

from chairlift.engine.engine import EngineConfig
from chairlift.engine.events import TokenLogprob
from chairlift.engine.plan import StepPlan
from chairlift.server.logprobs import TextOffsets, TokenTexts, echoed_logprobs
from tests.fake_tokenizer import BOS, FakeTokenizer
from tests.fakes import FakeRunner, Fault, all_rows, answering
from tests.server.harness import JSON, MODEL, error_of, lift, on_socket, stream_of
from tests.server.test_prefix import SPEC

ABC: JSON = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1}
SCORES = [None, -2.0, -3.0]


def joined(chunks: list[JSON], index: int) -> JSON:
    """The choice that a stream's chunks make."""
    whole: JSON = {}
    for chunk in chunks:
        for choice in chunk["choices"]:  # type: ignore[attr-defined]
            if choice["index"] != index:
                continue
            whole["text"] = str(whole.get("text", "")) + choice["text"]
            whole["finish_reason"] = choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                whole.setdefault(name, []).extend(values)  # type: ignore[attr-defined]
    return whole


async def test_a_prompt_and_its_answer() -> None:
    async with lift(FakeRunner(answering("xyz"))) as server:
        body = (await server.complete(**ABC)).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abcx", "length")
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "x"],
        "token_logprobs": [*SCORES, -0.5],
        "top_logprobs": [None, {"b": -1.5}, {"c": -2.5}, {"x": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 1)


async def test_a_prompt_alone() -> None:
    """Without logprobs, too: then it is nothing but an echo."""
    async with lift(FakeRunner(answering("xyz"))) as server:
        scored = (await server.complete(**{**ABC, "max_tokens": 0})).json()
        plain = (await server.complete(prompt="abc", echo=True, max_tokens=0)).json()
        streams = [
            stream_of(await server.complete(**{**ABC, **more, "max_tokens": 0, "stream": True}))
            for more in ({}, {"logprobs": None})
        ]
        error = error_of(await server.complete(prompt="abc", max_tokens=0), 400)
    assert error["param"] == "max_tokens"
    choice = scored["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == SCORES
    assert scored["usage"]["completion_tokens"] == 0
    assert plain["choices"][0]["text"] == "abc" and plain["choices"][0]["logprobs"] is None
    assert [joined(chunks, 0)["text"] for chunks in streams] == ["abc", "abc"]
    assert joined(streams[0], 0)["token_logprobs"] == SCORES


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": ["abc", "d", "äb"], "max_tokens": 3},
        {"prompt": [[97, 98], [99]], "n": 2},
        {"prompt": [97, 98, 99], "logprobs": 0, "max_tokens": 9},
    ],
)
async def test_a_stream_says_the_same(more: JSON) -> None:
    async with lift(FakeRunner(answering("xy"))) as server:
        body = {**ABC, **more}
        whole = (await server.complete(**body)).json()["choices"]
        chunks = stream_of(await server.complete(**body, stream=True))
    for choice in whole:
        told = {"text": choice["text"], "finish_reason": choice["finish_reason"], **choice["logprobs"]}
        assert joined(chunks, choice["index"]) == told
        assert told["token_logprobs"][0] is None and -0.5 in told["token_logprobs"]


async def test_the_best_of_several() -> None:
    async with lift(FakeRunner(answering("x"))) as server:
        body = {**ABC, "prompt": ["abc", "de"], "best_of": 3, "n": 2}
        choices = (await server.complete(**body)).json()["choices"]
    assert [choice["text"] for choice in choices] == ["abcx", "abcx", "dex", "dex"]
    assert [choice["logprobs"]["tokens"][0] for choice in choices] == ["a", "a", "d", "d"]


async def test_what_evaluations_read() -> None:
    """As lm-eval-harness does it: tokens in; out come the log probabilities of the continuation's tokens, and
    whether each was the most probable."""
    context, continuation = b"The capital is", b" Paris"
    async with (
        lift(FakeRunner(answering("."))) as server,
        on_socket(server.app) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        made = await client.completions.create(
            model=MODEL,
            prompt=list(context + continuation),
            max_tokens=1,
            temperature=0,
            logprobs=1,
            echo=True,
            seed=1234,
        )
    logprobs = made.choices[0].logprobs
    assert logprobs and logprobs.token_logprobs and logprobs.tokens and logprobs.top_logprobs
    scores = logprobs.token_logprobs[len(context) : -1]
    assert "".join(logprobs.tokens[len(context) : -1]) == " Paris"
    assert scores == [-1.0 - at for at in range(len(context), len(context + continuation))]
    tops = logprobs.top_logprobs[len(context) : -1]
    assert all(score < max(top.values()) for score, top in zip(scores, tops, strict=True))


async def test_chunks_kept_prefixes_and_a_row_that_starts_again() -> None:
    prompt = "abcdefgh" * 20
    runner = FakeRunner(answering("x"))
    config = EngineConfig(max_num_batched_tokens=16, prefix_cache_bytes=10**6)
    async with lift(runner, config=config, prefix=SPEC) as server:
        first = (await server.complete(prompt=prompt)).json()
        again = (await server.complete(prompt=prompt)).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        runner.fault, before = lose_once(at=48), len(runner.plans)
        body = (await server.complete(**{**ABC, "prompt": prompt})).json()
        assert await server.metric("num_rows_lost_total") == 1
        starts = [span.start for plan in runner.plans[before:] for span in plan.prefill]
        assert starts.count(48) == 2 and starts.count(144) == 1
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    scores = body["choices"][0]["logprobs"]["token_logprobs"]
    assert scores == [None, *(-1.0 - at for at in range(1, len(prompt))), -0.5]


def lose_once(at: int) -> Callable[[StepPlan], Fault | None]:
    """In the step that begins there."""
    waiting = [Fault(lose=all_rows)]

    def fault(plan: StepPlan) -> Fault | None:
        due = any(span.start == at for span in plan.prefill)
        return waiting.pop() if due and waiting else None

    return fault


@pytest.mark.parametrize(
    ("text", "prompt", "offsets"),
    [
        ("ab", (BOS, 97, 98), [0, 0, 1]),
        ("<s>b", (BOS, 98), [0, 3]),
        ("ab", (97, 98), [0, 1]),
        ("a", (BOS, 32, 97), [0, 0, 0]),
        ("ä", (0xC3, 0xA4), [0, 0]),
    ],
)
def test_offsets_are_those_of_the_text_as_it_is_shown(
    text: str, prompt: tuple[int, ...], offsets: list[int]
) -> None:
    """A mark of the beginning and a space before the first word may be tokens alone."""
    texts = TokenTexts(FakeTokenizer())
    scored = [TokenLogprob(token, -1.0) for token in prompt[1:]]
    told = echoed_logprobs(text, prompt, scored, [TokenLogprob(120, -0.5)], texts, TextOffsets(texts))
    assert told["text_offset"] == [*offsets, len(text)]


async def test_a_model_that_takes_its_prompts_whole() -> None:
    async with lift() as server:
        server.engine.info = replace(server.engine.info, scores_prompts=False)
        error = error_of(await server.complete(**ABC), 400)
        assert (await server.complete(prompt="abc", echo=True)).status_code == 200
    assert (error["param"], error["code"]) == ("echo", "unsupported_parameter")
