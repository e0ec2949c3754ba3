"""Anthropic's own client against the real model."""

from __future__ import annotations

import anthropic
import pytest
from anthropic.types import MessageParam

from tests.served.process import MODEL, PATIENCE, Served

pytestmark = pytest.mark.slow

MESSAGES: list[MessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
GREEDY = {"temperature": 0}


def test_an_exchange(served: Served) -> None:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        (model,) = client.models.list()
        assert model.id == MODEL

        answer = client.messages.create(model=MODEL, max_tokens=50, messages=MESSAGES, extra_body=GREEDY)
        assert answer.content[0].type == "text" and answer.content[0].text == PARIS
        assert answer.stop_reason == "end_turn"
        usage = answer.usage
        assert (usage.input_tokens or 0) + (usage.cache_read_input_tokens or 0) == 37
        assert usage.output_tokens == 8
        count = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
        assert count.input_tokens == 37

        with client.messages.stream(
            model=MODEL, max_tokens=50, messages=MESSAGES, stop_sequences=["Paris"], extra_body=GREEDY
        ) as stream:
            assert "".join(stream.text_stream) == PARIS.removesuffix("Paris.")
            assert stream.get_final_message().stop_sequence == "Paris"

        begun = client.messages.create(
            model=MODEL,
            max_tokens=50,
            messages=[*MESSAGES, {"role": "assistant", "content": "The capital of France"}],
            extra_body=GREEDY,
        )
        assert begun.content[0].type == "text"
        assert begun.content[0].text == PARIS.removeprefix("The capital of France")
