"""What is counted of one model's requests, as they go."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

from chairlift.engine.engine import Engine, RequestTiming
from chairlift.engine.events import FinishReason, Usage
from chairlift.engine.request import Request
from chairlift.server.metrics.intervals import Intervals
from chairlift.server.metrics.names import (
    CHOICE_BUCKETS,
    FIRST_TOKEN_BUCKETS,
    INTERVAL_BUCKETS,
    MODEL,
    PREFIX,
    REQUEST_BUCKETS,
    STEP_BUCKETS,
    STEP_TOKEN_BUCKETS,
    TOKEN_BUCKETS,
)

COMPUTED, CACHED = "local_compute", "local_cache_hit"
"""Where a prompt's tokens came from, in vLLM's words."""


class ModelFamilies:
    """The metrics of all models of a registry; a model's own are children of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(PREFIX + name, text, (MODEL,), buckets=tuple(buckets), registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, (MODEL, *labels), registry=registry)

        self.first_token = histogram(
            "time_to_first_token_seconds", "From submission to the first token.", FIRST_TOKEN_BUCKETS
        )
        self.whole = histogram("e2e_request_latency_seconds", "From submission to the end.", REQUEST_BUCKETS)
        self.queue = histogram("request_queue_time_seconds", "From submission to admission.", REQUEST_BUCKETS)
        self.prefill = histogram(
            "request_prefill_time_seconds", "From admission to the first token.", REQUEST_BUCKETS
        )
        self.decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", REQUEST_BUCKETS
        )
        self.inference = histogram(
            "request_inference_time_seconds", "From admission to the last token.", REQUEST_BUCKETS
        )
        self.each_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of a request, for each that drew two or more.",
            INTERVAL_BUCKETS,
        )
        self.prompt_size = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self.answer_size = histogram(
            "request_generation_tokens", "Tokens generated for a request.", TOKEN_BUCKETS
        )
        self.computed = histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were computed rather than taken over.",
            TOKEN_BUCKETS,
        )
        self.longest_answer = histogram(
            "request_max_num_generation_tokens",
            "Tokens of the longest answer to a prompt; with n above 1 there are several.",
            TOKEN_BUCKETS,
        )
        self.choices = histogram("request_params_n", "Answers drawn for a prompt.", CHOICE_BUCKETS)
        self.limit = histogram(
            "request_params_max_tokens", "max_tokens of the requests that gave it.", TOKEN_BUCKETS
        )
        self.step_tokens = histogram(
            "iteration_tokens", "Tokens computed in a step, of prompts and of answers.", STEP_TOKEN_BUCKETS
        )
        self.step = histogram("step_duration_seconds", "How long a step took.", STEP_BUCKETS)
        self.prompt = counter("prompt_tokens", "Prompt tokens prefilled, those taken over included.")
        self.cached = counter("prompt_tokens_cached", "Of the prompt tokens, those taken over.")
        self.sources = counter("prompt_tokens_by_source", "Prompt tokens by where they came from.", "source")
        self.ended = counter("request_success", "Requests ended, by reason.", "finished_reason")


class ModelMetrics:
    """One model's, as the observer of its engine."""

    def __init__(self, families: ModelFamilies, name: str) -> None:
        self.name = name
        self.engine: Engine | None = None
        self.generated = 0
        """Tokens."""
        self.intervals = Intervals(INTERVAL_BUCKETS)
        self._first_token = families.first_token.labels(name)
        self._whole = families.whole.labels(name)
        self._queue = families.queue.labels(name)
        self._prefill = families.prefill.labels(name)
        self._decode = families.decode.labels(name)
        self._inference = families.inference.labels(name)
        self._each_token = families.each_token.labels(name)
        self._prompt_size = families.prompt_size.labels(name)
        self._answer_size = families.answer_size.labels(name)
        self._computed = families.computed.labels(name)
        self._longest_answer = families.longest_answer.labels(name)
        self._choices = families.choices.labels(name)
        self._limit = families.limit.labels(name)
        self._step_tokens = families.step_tokens.labels(name)
        self._step = families.step.labels(name)
        self._prompt = families.prompt.labels(name)
        self._cached = families.cached.labels(name)
        self._by_source = {source: families.sources.labels(name, source) for source in (COMPUTED, CACHED)}
        self._ended = {reason: families.ended.labels(name, reason.value) for reason in FinishReason}

    def watch(self, engine: Engine | None) -> None:
        """Read this engine's gauges at every scrape from now on; None: there is none any more."""
        self.engine = engine

    # -- EngineObserver

    def on_first_token(self, request: Request, timing: RequestTiming, cached_tokens: int) -> None:
        tokens = len(request.prompt_token_ids)
        self.generated += 1
        self._prompt.inc(tokens)
        self._cached.inc(cached_tokens)
        self._by_source[CACHED].inc(cached_tokens)
        self._by_source[COMPUTED].inc(tokens - cached_tokens)
        _between(self._first_token, timing.queued, timing.first_token)
        _between(self._queue, timing.queued, timing.admitted)
        _between(self._prefill, timing.admitted, timing.first_token)

    def on_token_interval(self, seconds: float) -> None:
        self.generated += 1
        self.intervals.observe(seconds)

    def on_finished(
        self, request: Request, timing: RequestTiming, usage: Usage, reason: FinishReason
    ) -> None:
        self._ended[reason].inc()
        self._prompt_size.observe(usage.prompt_tokens)
        self._answer_size.observe(usage.completion_tokens)
        if request.sampling.max_tokens is not None:
            self._limit.observe(request.sampling.max_tokens)
        _between(self._whole, timing.queued, timing.finished)
        if timing.first_token is None or timing.last_token is None:
            return
        self._computed.observe(usage.prompt_tokens - usage.cached_tokens)
        _between(self._decode, timing.first_token, timing.last_token)
        _between(self._inference, timing.admitted, timing.last_token)
        if usage.completion_tokens > 1:
            spent = max(0.0, timing.last_token - timing.first_token)
            self._each_token.observe(spent / (usage.completion_tokens - 1))

    def on_step(self, prompt_tokens: int, decoding: int, seconds: float) -> None:
        self._step_tokens.observe(prompt_tokens + decoding)
        self._step.observe(seconds)

    # -- of HTTP requests

    def on_answered(self, choices: int, longest: int) -> None:
        """A prompt got so many answers, the longest of them of so many tokens."""
        self._choices.observe(choices)
        self._longest_answer.observe(longest)


def _between(histogram: Histogram, start: float | None, end: float | None) -> None:
    if start is not None and end is not None:
        histogram.observe(max(0.0, end - start))
