"""What Prometheus sees. Names and buckets are vLLM's, under the prefix `chairlift_`.

Sources: vLLM's documentation, Production Metrics; Prometheus' documentation, Metric and label naming.
"""

from chairlift.server.metrics.registry import ServerMetrics

__all__ = ["ServerMetrics"]
