"""What Prometheus sees of embedding engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chairlift.engine.embedding.engine import EmbeddingEngine, EmbeddingStats
from chairlift.server.metrics.names import MODEL, PREFIX


class EmbeddingCollector(Collector):
    """Made of `EmbeddingEngine.stats()` at the moment of the scrape; nothing of one that is not ready."""

    def __init__(self) -> None:
        self._embedders: list[EmbeddingEngine] = []

    def watch(self, embedder: EmbeddingEngine) -> None:
        self._embedders = [each for each in self._embedders if not each.draining]
        if embedder not in self._embedders:
            self._embedders.append(embedder)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for embedder in self._embedders:
            if not embedder.ready:
                continue
            stats = embedder.stats()
            for kind, rows in ((GaugeMetricFamily, _gauges(stats)), (CounterMetricFamily, _counts(stats))):
                for name, text, value in rows:
                    family = families.get(name)
                    if family is None:
                        family = families[name] = kind(f"{PREFIX}embedding_{name}", text, labels=(MODEL,))
                    family.add_metric((embedder.info.name,), value)
        yield from families.values()


def _gauges(stats: EmbeddingStats) -> Iterator[tuple[str, str, float]]:
    yield "requests_waiting", "Requests of which some text still waits.", stats.waiting
    yield "texts_running", "Texts in the batch that is computed.", stats.running


def _counts(stats: EmbeddingStats) -> Iterator[tuple[str, str, float]]:
    yield "requests", "Requests answered.", stats.requests
    yield "texts", "Texts, or pairs, of the requests answered.", stats.texts
    yield "tokens", "Tokens of the requests answered.", stats.tokens
    yield "batches", "Batches computed.", stats.batches
