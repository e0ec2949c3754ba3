"""The metrics of one app, in a registry of their own: two apps in a process do not mix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chairlift.engine.embedding.engine import EmbeddingEngine
from chairlift.server.metrics.embedding import EmbeddingCollector
from chairlift.server.metrics.engines import EngineCollector
from chairlift.server.metrics.http import HTTPMetrics
from chairlift.server.metrics.model import ModelFamilies, ModelMetrics
from chairlift.server.metrics.names import PREFIX


class ServerMetrics:
    """On the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.http = HTTPMetrics(self.registry)
        self._families = ModelFamilies(self.registry)
        self._models: dict[str, ModelMetrics] = {}
        self._embedders = EmbeddingCollector()
        self.registry.register(EngineCollector(self._models))
        self.registry.register(self._embedders)
        self.registry.register(_Build())
        self.registry.register(ProcessCollector(registry=None))

    def model(self, name: str) -> ModelMetrics:
        """Those of the model served under this name: the observer of its engine, the same at every call. Its
        gauges are shown once it `watch`es the engine."""
        if name not in self._models:
            self._models[name] = ModelMetrics(self._families, name)
        return self._models[name]

    def watch_embedder(self, embedder: EmbeddingEngine) -> None:
        self._embedders.watch(embedder)


class _Build(Collector):
    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(f"{PREFIX}build_info", "What runs; always 1.", labels=("version",))
        family.add_metric((version("chairlift"),), 1)
        yield family
