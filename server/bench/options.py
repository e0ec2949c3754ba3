"""What to measure, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from urllib.parse import urlsplit


class BenchError(Exception):
    """Nothing can be measured. The message is one line for the person at the terminal."""


class Workload(StrEnum):
    """What the clients do."""

    SOLO = "solo"
    """One request after another."""
    BATCH = "batch"
    """All clients at once, equal work."""
    MIXED = "mixed"
    """Requests arrive as a Poisson process: short and long prompts, short and long answers. A long prompt
    waits, if need be, until a short request's answer is under way: it is there to show what it does to it."""
    TURNS = "turns"
    """Conversations, one a client, that share a system prompt and grow turn by turn."""
    ALL = "all"
    """Each of the others in turn."""

    @property
    def parts(self) -> tuple[Workload, ...]:
        """The workloads to run, in order."""
        if self is Workload.ALL:
            return (Workload.SOLO, Workload.BATCH, Workload.MIXED, Workload.TURNS)
        return (self,)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The settings of one run. The same settings send the same requests.

    Raises:
        BenchError: naming the first setting that cannot be used.
    """

    url: str
    """Where the server listens, with or without `/v1`."""
    workload: Workload = Workload.ALL
    clients: int = 6
    """Requests in flight in `batch` and `turns`."""
    max_tokens: int = 24
    """Tokens of an answer; `mixed` asks for half, as many, and twice as many."""
    requests: int | None = None
    """Requests of each workload. None: 4 for `solo`, 2 a client for `batch`, 3 a client for `turns`,
    16 for `mixed`."""
    rate: float = 1.0
    """Mean arrivals a second in `mixed`."""
    seed: int = 0
    model: str | None = None
    """As the server spells it; None takes the first that `/v1/models` lists."""
    api_key: str | None = None
    timeout: float = 600.0
    """Seconds without a byte before a request counts as failed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _base_url(self.url))
        object.__setattr__(self, "workload", Workload(self.workload))
        for name in ("clients", "max_tokens", "requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BenchError(f"{name} must be at least 1, not {value}.")
        if not self.rate > 0:
            raise BenchError(f"rate must be above 0, not {self.rate:g}.")
        if not self.timeout > 0:
            raise BenchError(f"timeout must be above 0, not {self.timeout:g}.")

    @property
    def loopback(self) -> bool:
        """The server is on this machine, so a proxy from the environment is not for it."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def count(self, workload: Workload) -> int:
        """How many requests `workload` sends; `turns` rounds to whole turns of every client."""
        if workload is Workload.TURNS:
            turns = 3 if self.requests is None else max(1, self.requests // self.clients)
            return turns * self.clients
        if self.requests is not None:
            return self.requests
        return {Workload.SOLO: 4, Workload.BATCH: 2 * self.clients, Workload.MIXED: 16}[workload]


def _base_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number or too large, a broken IPv6 address
        usable = False
    if not usable:
        raise BenchError(f"{url!r} is no http URL: give one like http://127.0.0.1:8000.")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
