"""SIGHUP: keys and the certificate are read again, while the server runs."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable

from chairlift.server.security.keys import KeyFault, Keys, KeySources
from chairlift.server.security.masking import SecretMask
from chairlift.server.security.tls import TLSFault, TLSSettings, load_certificate

logger = logging.getLogger("chairlift.server")


def has_terminal() -> bool:
    """The process is controlled from a terminal, which is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class Reload:
    """What a SIGHUP does. The same signal says that the terminal has been closed: then it is a signal to
    stop.

    Args:
        mask: learns the keys.
        hang_up: called where the terminal that the server was started from is gone.
        terminal: see `has_terminal`.
    """

    def __init__(
        self,
        keys: Keys,
        sources: KeySources,
        *,
        tls: tuple[ssl.SSLContext, TLSSettings] | None = None,
        mask: SecretMask | None = None,
        hang_up: Callable[[], None] = lambda: None,
        terminal: Callable[[], bool] = has_terminal,
    ) -> None:
        self._keys = keys
        self._sources = sources
        self._tls = tls
        self._mask = mask
        self._hang_up = hang_up
        self._terminal = terminal
        self._had_terminal = terminal()

    def __call__(self) -> None:
        if self._had_terminal and not self._terminal():
            self._hang_up()
            return
        self._read_keys()
        self._read_certificate()

    def _read_keys(self) -> None:
        try:
            keys = self._sources.read()
            secrets = [given.secret for given in self._sources.given()]
        except KeyFault as fault:
            logger.error("The keys stay as they were: %s", fault)
            return
        if bool(keys) != bool(self._keys):
            # Cannot come of a change of files, which must hold keys.
            logger.error("The keys stay as they were: a server cannot begin or cease to have keys.")
            return
        if self._mask is not None:
            self._mask.learn(secrets)
        self._keys.replace(keys)
        logger.warning("Keys were read again: %s", ", ".join(self._keys.names) or "there are none")

    def _read_certificate(self) -> None:
        if self._tls is None:
            return
        try:
            load_certificate(*self._tls)
        except TLSFault as fault:
            logger.error("The certificate stays as it was: %s", fault)
        else:
            logger.warning("The certificate was read again.")
