"""`data:` URIs (RFC 2397) that hold an image in base64."""

from __future__ import annotations

import base64
import binascii
import re
from urllib.parse import unquote_to_bytes

from chairlift.server.media.errors import MediaError
from chairlift.server.media.fetch import too_large

_SPACE = re.compile(rb"[ \t\r\n]+")


def read_data_uri(url: str, limit: int) -> tuple[bytes, str | None]:
    """Bytes, and the type where one is stated.

    Line breaks, escapes and missing padding are let pass: what they stand for is plain.

    Raises:
        MediaError: it is not in base64, or holds more than `limit` bytes.
    """
    head, comma, body = url[len("data:") :].partition(",")
    if not comma:
        raise MediaError("is no data: URI with a comma before its data")
    mime, *parameters = (part.strip() for part in head.split(";"))
    if "base64" not in (parameter.lower() for parameter in parameters):
        raise MediaError("is a data: URI that is not in base64 (data:image/png;base64,…)")
    if len(body) > limit * 2:  # before anything is copied; exact below
        raise too_large(limit)
    text = unquote_to_bytes(body) if "%" in body else body.encode("ascii", "replace")
    text = _SPACE.sub(b"", text).rstrip(b"=")
    try:
        data = base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        raise MediaError("holds characters that are not base64") from None
    if len(data) > limit:
        raise too_large(limit)
    return data, mime or None
