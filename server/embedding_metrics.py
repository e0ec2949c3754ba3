"""What Prometheus sees of the embedding engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chairlift.engine.embedding.engine import EmbeddingEngine, EmbeddingStats
from chairlift.server.metrics import PREFIX


class EmbeddingCollector(Collector):
    """Made of `EmbeddingEngine.stats()` at the moment of the scrape; nothing while none is served."""

    def __init__(self, embedder: EmbeddingEngine) -> None:
        self._embedder = embedder

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        if not self._embedder.ready:
            return
        model = self._embedder.info.name
        stats = self._embedder.stats()
        for kind, rows in ((GaugeMetricFamily, _gauges(stats)), (CounterMetricFamily, _counts(stats))):
            for name, text, value in rows:
                metric = kind(f"{PREFIX}embedding_{name}", text, labels=("model_name",))
                metric.add_metric((model,), value)
                yield metric


def _gauges(stats: EmbeddingStats) -> Iterator[tuple[str, str, float]]:
    yield "requests_waiting", "Requests of which some text still waits.", stats.waiting
    yield "texts_running", "Texts in the batch that is computed.", stats.running


def _counts(stats: EmbeddingStats) -> Iterator[tuple[str, str, float]]:
    yield "requests", "Requests answered.", stats.requests
    yield "texts", "Texts, or pairs, of the requests answered.", stats.texts
    yield "tokens", "Tokens of the requests answered.", stats.tokens
    yield "batches", "Batches computed.", stats.batches
