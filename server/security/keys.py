"""API keys: where they come from, and whose a presented one is.

Requests are compared with digests. A key has the form of a bearer token (RFC 6750, section 2.1), so that it
needs no quoting in a header, a file, an environment variable or a log line.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LEAST_LENGTH = 8
"""Of a key, in characters; a good one has 32 (`docs/security.md`)."""
MOST_BYTES = 2**20
"""Of a key file."""
_KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")


class KeyFault(Exception):
    """Keys that cannot be used; the message is for the operator, and holds no key."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key without its secret."""

    name: str
    """What logs and metrics call whoever holds it."""
    digest: bytes
    """SHA-256."""
    admin: bool = False
    named: bool = True
    """The operator has given the name. Keys of one name are one client's."""

    @property
    def tenant(self) -> str:
        """The same for all keys of a client, at every start of the server."""
        return f"name {self.name}" if self.named else f"digest {self.digest.hex()}"


def digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


@dataclass(frozen=True, slots=True)
class Given:
    """A key as the operator has given it."""

    place: str
    name: str | None
    secret: str = field(repr=False)
    admin: bool = False


@dataclass(frozen=True, slots=True)
class KeySources:
    """Where keys are read, once at the start and again at SIGHUP."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Each `KEY` or `NAME:KEY`."""
    api_key_files: tuple[Path, ...] = ()
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key_files: tuple[Path, ...] = ()

    def read(self) -> tuple[Key, ...]:
        """Raises: KeyFault."""
        keys: dict[bytes, Key] = {}
        unnamed = 0
        for given in self.given():
            known = keys.get(digest(given.secret.encode()))
            if known is None:
                unnamed += given.name is None
                name = given.name or f"key-{unnamed}"
                key = Key(name, digest(given.secret.encode()), given.admin, given.name is not None)
                keys[key.digest] = key
            elif (known.name, known.admin) != (given.name or known.name, given.admin):
                raise KeyFault(f"{given.place}: this key is also that of {known.name}.")
        return tuple(keys.values())

    def given(self) -> Iterator[Given]:
        """Raises: KeyFault."""
        for texts, files, admin in (
            (self.api_keys, self.api_key_files, False),
            (self.admin_keys, self.admin_key_files, True),
        ):
            for text in texts:
                yield parse_key(text, "an admin key" if admin else "an API key", admin=admin)
            for path in files:
                yield from read_key_file(path, admin=admin)


def parse_key(text: str, place: str, *, admin: bool = False) -> Given:
    """`KEY` or `NAME:KEY`. Raises: KeyFault."""
    name, colon, secret = text.strip().rpartition(":")
    name, secret = name.strip(), secret.strip()
    if colon and not _NAME.fullmatch(name):
        raise KeyFault(
            f"{place}: a key's name has up to 64 letters, digits, . _ @ and -, and begins with no mark."
        )
    if not _KEY.fullmatch(secret):
        raise KeyFault(f"{place}: a key consists of letters, digits and . _ ~ + / - , and may end in =.")
    if len(secret) < LEAST_LENGTH:
        raise KeyFault(f"{place}: a key has at least {LEAST_LENGTH} characters.")
    return Given(place, name or None, secret, admin)


def read_key_file(path: Path, *, admin: bool = False) -> Iterator[Given]:
    """A key for each line that is neither empty nor begins with `#`.

    Raises: KeyFault: it cannot be read, others may read it, or it holds no key.
    """
    lines = _private_text(path).splitlines()
    found = False
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if line and not line.startswith("#"):
            found = True
            yield parse_key(line, f"{path}, line {number}", admin=admin)
    if not found:
        raise KeyFault(f"{path} holds no key.")


def is_private(path: Path, mode: int) -> bool:
    """Nobody but its owner can read or change a file of this mode.

    Of those that systemd hands to a service, the group's bits are no group's: they bound an access list, in
    which the service's user may read (systemd 254 and newer, its issue 29435).
    """
    handed = os.environ.get("CREDENTIALS_DIRECTORY")
    is_handed = bool(handed) and path.absolute().parent == Path(str(handed))
    return not mode & 0o077 & ~(stat.S_IRGRP if is_handed else 0)


def _private_text(path: Path) -> str:
    try:
        # Not blocking: nothing may wait for the other end of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise KeyFault(f"{path} is not a regular file.")
            if not is_private(path, state.st_mode):
                raise KeyFault(
                    f"{path} can be read or changed by others (mode {stat.S_IMODE(state.st_mode):04o}): "
                    f"chmod 600 {path}"
                )
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise KeyFault(f"{path} cannot be read: {error.strerror or error}.") from None
    if len(content) > MOST_BYTES:
        raise KeyFault(f"{path} is longer than {MOST_BYTES} bytes; it is no key file.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise KeyFault(f"{path} is not UTF-8 text.") from None


class Keys:
    """Those in force; the event loop's. Without any, everybody may ask."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys: tuple[Key, ...] = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def has_admin(self) -> bool:
        return any(key.admin for key in self._keys)

    @property
    def names(self) -> Sequence[str]:
        return tuple(key.name for key in self._keys)

    def replace(self, keys: Iterable[Key]) -> None:
        """From the next request on. What was admitted goes on."""
        self._keys = tuple(keys)

    def find(self, secret: bytes) -> Key | None:
        """Takes the same time whichever of the keys it is, or none: digests are compared, all of them, in
        constant time."""
        asked = digest(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, asked):
                found = key
        return found
