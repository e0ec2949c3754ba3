"""A service in systemd's language: systemd.service(5), systemd.exec(5).

System units are confined as far as a server that computes on a GPU can be. What is left out, and why:

- `PrivateDevices`, `DevicePolicy`, and `ProtectClock` (which up to systemd 252 brings a list of allowed
  devices with it) would take the NVIDIA devices away.
- `MemoryDenyWriteExecute`: CUDA and regular expressions compile to memory.
- `ProtectHome=yes`: models and Python environments lie in homes; they can be read, not written.

Users' units have only what needs no namespace: those of a user's own are turned off on some systems, where
the unit would not start at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from chairlift.server.service.definition import GAVE_UP, RESTART_S, Credential, ServiceDefinition

FAILURES, WINDOW_S = 10, 1800
"""systemd itself gives up after so many starts in so many seconds: for a service that cannot even count."""
OPEN_FILES = 65_536

CONFINED = """\
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
""".splitlines()
"""For every unit."""

CONFINED_SYSTEM = """\
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectProc=invisible
RemoveIPC=yes
""".splitlines()
"""For units of the system's manager, which may make namespaces."""


def unit_name(name: str) -> str:
    return "chairlift.service" if name == "chairlift" else f"chairlift-{name}.service"


def unit(service: ServiceDefinition) -> str:
    """The unit file."""
    return "\n".join(_lines(service)) + "\n"


def _lines(service: ServiceDefinition) -> Iterator[str]:
    yield "[Unit]"
    yield "Description=Chairlift, an inference server for language models"
    if service.system:
        yield from ("After=network-online.target", "Wants=network-online.target")
    yield from (f"StartLimitIntervalSec={WINDOW_S}", f"StartLimitBurst={FAILURES}")
    yield from ("", "[Service]", "Type=notify", "NotifyAccess=main")
    if service.before:
        yield f"ExecStartPre=-+{_command(service.before, ())}"
    yield f"ExecStart={_command(service.arguments, service.credentials)}"
    # Keys and certificates are read again.
    yield "ExecReload=/bin/kill -HUP $MAINPID"
    yield f"WorkingDirectory={_unspecified(str(service.working_folder))}"
    for name, value in service.environment.items():
        yield f"Environment={_quoted(f'{name}={value}')}"
    # A fault is started again. What it cannot mend by that, it says by giving up.
    yield from ("Restart=on-failure", f"RestartSec={RESTART_S}", f"RestartPreventExitStatus={GAVE_UP}")
    # Loading takes as long as it takes (a download, say); ending is bounded.
    yield from ("TimeoutStartSec=infinity", f"TimeoutStopSec={service.stop_s}", "KillMode=mixed")
    if service.watchdog_s:
        yield f"WatchdogSec={service.watchdog_s:g}"
    # An end by the watchdog leaves the stacks of all threads in the log, and no image of memory on the disk.
    yield from (f"LimitNOFILE={OPEN_FILES}", "LimitCORE=0", "UMask=0077")
    yield from ("", *_rights(service))
    yield from ("", "[Install]", f"WantedBy={'multi-user' if service.system else 'default'}.target")


def _rights(service: ServiceDefinition) -> Iterator[str]:
    if service.system:
        yield "DynamicUser=yes" if service.user is None else f"User={service.user}"
        folder = unit_name(service.name).removesuffix(".service")
        yield from (f"StateDirectory={folder}", f"CacheDirectory={folder}")
        for credential in service.credentials:
            yield f"LoadCredential={credential.name}:{_unspecified(str(credential.path))}"
        yield from CONFINED_SYSTEM
        capability = "CAP_NET_BIND_SERVICE" if service.low_port else ""
        yield from (f"CapabilityBoundingSet={capability}", f"AmbientCapabilities={capability}")
        if service.folders:
            yield f"ReadWritePaths={_paths(service.folders)}"
    yield from CONFINED


def _command(arguments: Iterable[str], credentials: Iterable[Credential]) -> str:
    """Files that are handed over are named by the place where the service finds them (`%d`)."""
    handed = {str(credential.path): f"%d/{credential.name}" for credential in credentials}
    # A dollar sign begins a variable in a command line, and only there.
    return " ".join(handed.get(word) or _quoted(word.replace("$", "$$")) for word in arguments)


def _paths(paths: Iterable[Path]) -> str:
    """A leading minus: one that is not there is no fault."""
    return " ".join(_quoted(f"-{path}") for path in paths)


def _quoted(text: str) -> str:
    """One word in systemd's syntax."""
    text = _unspecified(text)
    if text and not set(text) & set(" \t\"'\\;"):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _unspecified(text: str) -> str:
    """A percent sign begins a specifier everywhere."""
    return text.replace("%", "%%")
