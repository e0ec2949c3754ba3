"""Images within the request itself."""

from __future__ import annotations

import pytest

from chairlift.server.media.data_uri import read_data_uri
from chairlift.server.media.errors import MediaError


@pytest.mark.parametrize(
    ("url", "content", "mime"),
    [
        ("data:image/png;base64,+/+/YQ==", b"\xfb\xff\xbfa", "image/png"),
        ("data:image/png;base64,YWI", b"ab", "image/png"),
        ("data:image/png;base64,YWI%3D", b"ab", "image/png"),
        ("data:image/png;base64,YW\r\n I=", b"ab", "image/png"),
        ("data:;base64,YWI=", b"ab", None),
        ("data:image/png;charset=utf-8;BASE64,YWI=", b"ab", "image/png"),
        ("data: image/PNG ; base64 ,YWI=", b"ab", "image/PNG"),
        ("data:image/png;base64,", b"", "image/png"),
    ],
)
def test_bytes_and_type(url: str, content: bytes, mime: str | None) -> None:
    assert read_data_uri(url, 100) == (content, mime)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "comma"),
        ("data:", "comma"),
        ("data:image/svg+xml,<svg/>", "not in base64"),
        ("data:,abc", "not in base64"),
        ("data:image/png;base64,a!b=", "not base64"),
        ("data:image/png;base64,YWJj=YWJj", "not base64"),
        ("data:image/png;base64,Y", "not base64"),
        ("data:image/png;base64,ÄÖ", "not base64"),
        ("data:image/png;base64,-_-_", "not base64"),
        ("data:image/png;base64," + "QUFB" * 4, "larger than 10 bytes"),
        ("data:image/png;base64," + "QUFB" * 100, "larger than 10 bytes"),
    ],
)
def test_refusals(url: str, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        read_data_uri(url, 10)
