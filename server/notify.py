"""Signs of life for systemd: sd_notify(3), a datagram on the socket that `NOTIFY_SOCKET` names."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

logger = logging.getLogger("chairlift.server")


class Notifier:
    """Sends nothing where nobody listens.

    Args:
        environ: `NOTIFY_SOCKET`: a path, or after an `@` a name in the abstract namespace.
            `WATCHDOG_USEC` and `WATCHDOG_PID`: how often systemd wants to hear of which process.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.watchdog_s = _watchdog_s(environ) if self._address else None
        """Seconds within which systemd must hear that all is well; None: it does not ask."""

    def ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={status}")

    def stopping(self) -> None:
        self._send("STOPPING=1", "STATUS=Running answers finish.")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={text}")

    def _send(self, *assignments: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        message = "\n".join(line.replace("\n", " ") for line in assignments)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(1.0)
                sender.sendto(message.encode(), address)
        except OSError as error:
            logger.warning("systemd cannot be told %s: %s", assignments[0], error.strerror or error)


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    asked, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not asked.isdecimal() or (pid and pid != str(os.getpid())):
        return None
    return int(asked) / 1e6 or None
