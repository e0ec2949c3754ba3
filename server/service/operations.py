"""What an operator does with a service."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chairlift.server.service.definition import ServiceDefinition
from chairlift.server.service.errors import ServiceFault
from chairlift.server.service.places import Person, Places
from chairlift.server.service.readiness import Waited, await_ready
from chairlift.server.service.record import RecordFile
from chairlift.server.service.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Service:
    """One service on this machine, installed or not.

    Attributes:
        system: of the machine, for root to change.
        who: whom it runs as; None: a user made for it.
    """

    name: str
    supervisor: Supervisor
    places: Places
    system: bool
    who: Person | None

    @property
    def record(self) -> RecordFile:
        return RecordFile(self.places.record(self.name))


Wait = Callable[[Service, float], Waited]
"""Waits for a service started at that time."""


def waiting(bound_s: float) -> Wait:
    """Wait so many seconds at most; 0: not at all."""

    def wait(service: Service, since: float) -> Waited:
        if bound_s <= 0:
            return Waited()
        return await_ready(service.supervisor, service.record, since=since, bound_s=bound_s)

    return wait


def install(service: Service, definition: ServiceDefinition, wait: Wait) -> Waited:
    """Write the definition and start the service, in place of one of this name.

    Raises:
        ServiceFault: it cannot be written or is refused; nothing is left of a new one then.
    """
    _may_change(service)
    supervisor = service.supervisor
    text = supervisor.text(definition)
    fresh = not supervisor.file.exists()
    make_folders(definition.folders, service.who if service.system else None)
    if supervisor.loaded():
        supervisor.stop()
    since = time.time()
    try:
        write(supervisor.file, text)
        supervisor.load()
    except ServiceFault:
        if fresh:
            with contextlib.suppress(OSError, ServiceFault):
                supervisor.file.unlink(missing_ok=True)
                supervisor.reread()
        raise
    return wait(service, since)


def uninstall(service: Service) -> None:
    """Stop the service and remove its definition and record. Logs and caches stay.

    Raises:
        ServiceFault: there is none, or it does not stop.
    """
    _may_change(service)
    _must_be_installed(service)
    service.supervisor.forget()
    try:
        service.supervisor.file.unlink(missing_ok=True)
    except OSError as error:
        raise ServiceFault(f"{service.supervisor.file} cannot be removed: {error.strerror}.") from None
    service.supervisor.reread()
    with contextlib.suppress(OSError):
        service.record.path.unlink(missing_ok=True)


def start(service: Service, wait: Wait) -> Waited:
    """Raises: ServiceFault: there is none, or it is refused."""
    _may_change(service)
    _must_be_installed(service)
    if service.supervisor.seen().pid is not None:
        run = service.record.read().run
        return wait(service, run.started if run is not None else time.time())
    since = time.time()
    service.supervisor.start()
    return wait(service, since)


def stop(service: Service) -> None:
    """Raises: ServiceFault: there is none, or it does not stop."""
    _may_change(service)
    _must_be_installed(service)
    service.supervisor.stop()


def restart(service: Service, wait: Wait) -> Waited:
    """Raises: ServiceFault: there is none, it does not stop, or it is refused."""
    stop(service)
    since = time.time()
    service.supervisor.start()
    return wait(service, since)


def make_folders(folders: tuple[Path, ...], owner: Person | None) -> None:
    """Those that are missing, for their owner only.

    Args:
        owner: None: whoever runs this process.

    Raises:
        ServiceFault: one cannot be made.
    """
    for folder in folders:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            try:
                path.mkdir(mode=0o700, exist_ok=True)
                if owner is not None:
                    os.chown(path, owner.uid, owner.gid)
            except OSError as error:
                raise ServiceFault(f"The folder {path} cannot be made: {error.strerror}.") from None


def write(path: Path, text: str) -> None:
    """Whole or not at all; everybody may read it, as supervisors want it.

    Raises:
        ServiceFault: it cannot be written.
    """
    partial = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(descriptor, 0o644)
        os.replace(partial, path)
    except OSError as error:
        if partial:
            with contextlib.suppress(OSError):
                os.unlink(partial)
        raise ServiceFault(f"{path} cannot be written: {error.strerror}.") from None


def _may_change(service: Service) -> None:
    if service.system and os.geteuid() != 0:
        raise ServiceFault("A service of the whole system is root's: use sudo.")


def _must_be_installed(service: Service) -> None:
    if not service.supervisor.file.exists():
        raise ServiceFault(
            f"There is no such service ({service.supervisor.file}): chairlift service install makes one."
        )
