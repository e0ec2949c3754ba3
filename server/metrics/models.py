"""What Prometheus sees of models coming and going."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chairlift.server.metrics.names import MODEL, PREFIX
from chairlift.server.models.model import Model
from chairlift.server.models.roster import SHOWN, State


class ModelsCollector(Collector):
    """Read at the moment of the scrape."""

    def __init__(self, models: Iterable[Model]) -> None:
        self._models = models

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            f"{PREFIX}model_state",
            "1 for the state that the model is in, 0 for others.",
            labels=(MODEL, "state"),
        )
        loads = CounterMetricFamily(
            f"{PREFIX}model_loads", "Loads of the model, by outcome.", labels=(MODEL, "outcome")
        )
        seconds = CounterMetricFamily(
            f"{PREFIX}model_load_seconds", "That its loads took, all together.", labels=(MODEL,)
        )
        for model in self._models:
            for each in State:
                if each not in SHOWN:
                    state.add_metric((model.name, each.value), model.state is each)
            loads.add_metric((model.name, "loaded"), model.loads)
            loads.add_metric((model.name, "failed"), model.failures)
            seconds.add_metric((model.name,), model.load_seconds)
        yield from (state, loads, seconds)
