"""A histogram that is fed once a token, which is why it is not the library's: that one takes a lock each time
and walks the buckets."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Intervals:
    """Fed and read on one thread.

    Args:
        bounds: upper ends of the buckets, ascending; what is equal to one belongs to it.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Not cumulative; the last is of what is beyond all bounds."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add_to(self, family: HistogramMetricFamily, labels: tuple[str, ...]) -> None:
        names = (*map(floatToGoString, self.bounds), "+Inf")
        family.add_metric(
            labels, list(zip(names, map(float, accumulate(self.counts)), strict=True)), self.sum
        )
