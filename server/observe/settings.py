"""What is told of requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ObserveSettings:
    """Fixed for the life of an app."""

    access_log: bool = False
    """A line in the log for each request, at its end."""
    log_prompts: bool = False
    """With what was asked in it."""
    vllm_names: bool = False
    """Metrics also under vLLM's names."""
    traces: bool = False
    """Traces are sent."""
    otlp_endpoint: str | None = None
    """Where to; None: where OpenTelemetry's own variables say."""
