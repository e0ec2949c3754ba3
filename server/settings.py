"""Limits of the HTTP front end. What the engine may hold is `chairlift.engine.engine.EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from chairlift.server.observe.settings import ObserveSettings
from chairlift.server.security.settings import SecuritySettings

WEDGED_S = 120.0
"""Seconds in a step after which a server says that it is not well."""


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """What images a request may bring, and from where."""

    local_folder: Path | None = None
    """Clients may name files below it; None: no files."""
    allow_private: bool = False
    """Images may be fetched from addresses that are not public."""
    timeout_s: float = 10.0
    """Seconds that fetching one image may take, redirects included."""
    max_redirects: int = 3
    max_images: int = 32
    """In one request."""
    max_bytes: int = 20 * 2**20
    """Of one image's file."""
    max_total_bytes: int = 80 * 2**20
    """Of all files of one request."""
    max_pixels: int = 64_000_000
    """Of all images of one request, decoded: 192 MB."""
    max_prepared_bytes: int = 4 * 2**30
    """Of what the model's processor made of the images of all requests that wait or run; beyond it, 429."""


@dataclass(frozen=True, slots=True)
class ResponsesSettings:
    """What is kept of `/v1/responses`; beyond a bound the least recently used goes first."""

    keep: bool = True
    path: Path | None = None
    """An SQLite file; None keeps them in memory."""
    max_count: int = 10_000
    max_bytes: int = 256 * 2**20
    """Of requests and answers, as JSON."""
    max_age_s: float = 30 * 86400.0
    """Since the last use."""


@dataclass(frozen=True, slots=True)
class ParserSettings:
    """Names of parsers that read the model's answers; None: found from its chat template and tokens."""

    reasoning: str | None = None
    tool_call: str | None = None


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Fixed for the life of an app."""

    max_body_bytes: int = 32 * 2**20
    """A longer request body is refused with 413 before it is read to its end."""
    body_patience_s: float = 30.0
    """A request body of which nothing comes for so many seconds is given up with 408."""
    max_prompts: int = 128
    """Most prompts in one completion request; each is a request of its own to the engine."""
    max_json_depth: int = 64
    """Deepest nesting of arrays and objects in a body."""
    wedge_after_s: float = WEDGED_S
    """`/health` is 503 when a step has not come back for this long, in seconds."""
    ping_s: float = 15.0
    """Seconds between the comments that keep a silent stream open through proxies."""
    media: MediaSettings = field(default_factory=MediaSettings)
    responses: ResponsesSettings = field(default_factory=ResponsesSettings)
    parsers: ParserSettings = field(default_factory=ParserSettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)
    observe: ObserveSettings = field(default_factory=ObserveSettings)
