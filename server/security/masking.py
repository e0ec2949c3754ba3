"""No key in a log, wherever it came from: the log is masked where it is written, whatever writes it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from urllib.parse import quote

MASK = "[key]"
_LOOKS = re.compile(
    r"""(?ix)
    (?P<before>
        \bBearer\s+
        | \b(?:x-)?(?:api|access|admin|secret)[-_ ]?(?:key|token)\\?["']?\s*[:=]\s*\\?["']?
    )
    [A-Za-z0-9._~+/%-]{4,}=*
    | \bsk-[A-Za-z0-9_-]{8,}
    """
)
"""What is a key by its looks or its place: those for elsewhere, which clients send by mistake, are not told
either."""


class SecretMask:
    """Takes keys out of texts."""

    def __init__(self) -> None:
        self._known: re.Pattern[str] | None = None

    def learn(self, secrets: Iterable[str]) -> None:
        """In place of those learnt before."""
        forms = {form for secret in secrets for form in (secret, quote(secret, safe=""))}
        longest_first = sorted(forms, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if forms else None

    def __call__(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(MASK, text)
        return _LOOKS.sub(lambda match: (match["before"] or "") + MASK, text)


class MaskedFormatter(logging.Formatter):
    """Another formatter's lines, traces and fields included, without keys."""

    def __init__(self, inner: logging.Formatter, mask: SecretMask) -> None:
        super().__init__()
        self.inner = inner
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        return self._mask(self.inner.format(record))


def mask_logs(mask: SecretMask) -> None:
    """From now on, of all that the process logs to where it logs now."""
    for handler in logging.getLogger().handlers:
        inner = handler.formatter or logging.Formatter()
        if isinstance(inner, MaskedFormatter):
            inner = inner.inner
        handler.setFormatter(MaskedFormatter(inner, mask))
