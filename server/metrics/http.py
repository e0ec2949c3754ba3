"""What is counted of HTTP requests. No label holds anything that a client chose."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from chairlift.server.metrics.names import HTTP_BUCKETS, PREFIX

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
OTHER = "other"
"""Of methods, and of routes where none matches: there is no end of them."""


class HTTPMetrics:
    """Routes are templates (`/v1/models/{model_id}`), reasons the codes of our own errors."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.open = Gauge(
            f"{PREFIX}http_requests_in_progress", "HTTP requests being answered.", registry=registry
        )
        self._requests = Counter(
            f"{PREFIX}http_requests",
            "HTTP requests answered, by route and status.",
            ("route", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            f"{PREFIX}http_request_duration_seconds",
            "From the head of a request to the end of its answer.",
            ("route", "method"),
            buckets=HTTP_BUCKETS,
            registry=registry,
        )
        self._refused = Counter(
            f"{PREFIX}requests_refused",
            "Requests answered with an error, by its code.",
            ("reason",),
            registry=registry,
        )
        self._left = Counter(
            f"{PREFIX}http_requests_abandoned",
            "HTTP requests whose client left before the answer's end.",
            ("route",),
            registry=registry,
        )

    def ended(self, route: str | None, method: str, status: int, seconds: float, *, left: bool) -> None:
        """`route`: its template; None where none matched."""
        route = OTHER if route is None else route
        method = method if method in METHODS else OTHER
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route, method).observe(seconds)
        if left:
            self._left.labels(route).inc()

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()
