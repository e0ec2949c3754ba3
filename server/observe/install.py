"""What an app is given to observe its requests with."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette

from chairlift.server.metrics import ServerMetrics
from chairlift.server.observe.middleware import Observation, Report
from chairlift.server.observe.request_line import log_request
from chairlift.server.observe.settings import ObserveSettings


def observe(
    app: Starlette, metrics: ServerMetrics, settings: ObserveSettings, reports: Sequence[Report] = ()
) -> None:
    """Args: reports: told of each request at its end, before the log is."""
    lines = (log_request,) if settings.access_log else ()
    app.add_middleware(
        Observation,
        metrics=metrics,
        reports=(*reports, *lines),
        keeps_body=settings.access_log and settings.log_prompts,
    )
