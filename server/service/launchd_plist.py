"""A service in launchd's language: launchd.plist(5).

What each key is for was learned on machines that serve models: see docs/service.md.
"""

from __future__ import annotations

import plistlib
from typing import Any

from chairlift.server.service.definition import RESTART_S, ServiceDefinition

LABEL = "org.chairlift.server"


def label(name: str) -> str:
    """By which launchd knows the service."""
    return LABEL if name == "chairlift" else f"{LABEL}.{name}"


def job(service: ServiceDefinition) -> dict[str, Any]:
    """The keys and values."""
    files = {"NumberOfFiles": service.open_files}
    keys: dict[str, Any] = {
        "Label": label(service.name),
        "ProgramArguments": list(service.arguments),
        "EnvironmentVariables": dict(service.environment),
        "WorkingDirectory": str(service.working_folder),
        "RunAtLoad": True,
        # A fault ends with another code than 0 and is started again; the operator's stop ends with 0.
        "KeepAlive": {"SuccessfulExit": False, "Crashed": True},
        "ThrottleInterval": RESTART_S,
        "ExitTimeOut": service.stop_s,
        # Background, and what launchd takes for it, is throttled: a model then decodes at an eighth of its
        # speed.
        "ProcessType": "Interactive",
        # 256 otherwise, of which each connection takes one.
        "SoftResourceLimits": files,
        "HardResourceLimits": dict(files),
        "Umask": 0o077,
    }
    if service.output is not None:
        keys["StandardOutPath"] = keys["StandardErrorPath"] = str(service.output)
    if service.system and service.user is not None:
        keys["UserName"] = service.user
    return keys


def plist(service: ServiceDefinition) -> bytes:
    """The property list's XML."""
    return plistlib.dumps(job(service), fmt=plistlib.FMT_XML, sort_keys=False)
