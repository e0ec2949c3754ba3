"""Where a service's things lie, by platform and user."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from chairlift.server.service.errors import ServiceFault


class Platform(StrEnum):
    LAUNCHD = "launchd"
    SYSTEMD = "systemd"


def this_platform() -> Platform:
    """Raises: ServiceFault: this system has neither."""
    if sys.platform == "darwin":
        return Platform.LAUNCHD
    if sys.platform == "linux":
        return Platform.SYSTEMD
    raise ServiceFault("Services are kept by launchd or systemd; this system has neither.")


@dataclass(frozen=True, slots=True)
class Person:
    """Whom a service runs as."""

    name: str
    uid: int
    gid: int
    home: Path


def person(name: str | None = None) -> Person:
    """The user of this name; None: whoever runs this process.

    Raises:
        ServiceFault: there is no such user.
    """
    try:
        entry = pwd.getpwuid(os.geteuid()) if name is None else pwd.getpwnam(name)
    except KeyError:
        raise ServiceFault(f"There is no user {name or os.geteuid()}.") from None
    return Person(entry.pw_name, entry.pw_uid, entry.pw_gid, Path(entry.pw_dir))


def operator(environment: Mapping[str, str] = os.environ) -> str | None:
    """Who asked root to do something, by sudo; None: nobody, or root itself."""
    name = environment.get("SUDO_USER")
    return None if name in (None, "", "root") else name


@dataclass(frozen=True, slots=True)
class Places:
    """Absolute.

    Attributes:
        home: of the service's user.
        state: of the service's record.
        cache: Chairlift's cache folder, for conversions and kept prefixes.
        huggingface: where the hub's client keeps its downloads.
        logs: for log files; None where the supervisor keeps logs.
    """

    home: Path
    state: Path
    cache: Path
    huggingface: Path
    logs: Path | None

    def record(self, name: str) -> Path:
        return self.state / f"{name}.json"

    def log(self, name: str) -> Path | None:
        return None if self.logs is None else self.logs / f"{name}.log"

    def output(self, name: str) -> Path | None:
        """Of what the process prints beside its log."""
        return None if self.logs is None else self.logs / f"{name}.out"


def places(platform: Platform, name: str, who: Person | None, environment: Mapping[str, str]) -> Places:
    """
    Args:
        name: the service's.
        who: None: a user that systemd makes for the service.
        environment: the operator's, which may have moved folders (`CHAIRLIFT_CACHE`, `HF_HOME`).
    """
    if who is None:
        folder = name if name == "chairlift" else f"chairlift-{name}"
        state, cache = Path("/var/lib") / folder, Path("/var/cache") / folder
        return Places(state, state, cache / "chairlift", cache / "huggingface", None)
    home = who.home
    if platform is Platform.LAUNCHD:
        state = home / "Library/Application Support/chairlift/service"
        cache, logs = home / "Library/Caches/chairlift", home / "Library/Logs/chairlift"
    else:
        state, cache, logs = home / ".local/state/chairlift", home / ".cache/chairlift", None
    moved, hub = environment.get("CHAIRLIFT_CACHE"), environment.get("HF_HOME")
    return Places(
        home,
        state,
        Path(moved).expanduser().absolute() if moved else cache,
        Path(hub).expanduser().absolute() if hub else home / ".cache/huggingface",
        logs,
    )
