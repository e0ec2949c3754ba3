"""Where a server may listen without keys."""

from __future__ import annotations

import pytest

from chairlift.server.security.exposure import is_loopback, refusal


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "127.255.255.254", "::1", "::ffff:127.0.0.1"])
def test_loopback(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0", "::", "192.168.1.5", "10.0.0.1", "128.0.0.1", "fe80::1%en0", "2001:db8::1", "::ffff:10.0.0.1"]
    + ["localhost", "", "126.255.255.255"],
)
def test_elsewhere(address: str) -> None:
    assert not is_loopback(address)


def test_a_name_is_what_it_resolves_to() -> None:
    asked = {"protected": False, "insecure": False}
    assert refusal("localhost", ["127.0.0.1", "::1"], **asked) is None
    assert refusal("studio", ["127.0.1.1"], **asked) is None
    for addresses in (["192.168.1.5"], ["127.0.0.1", "192.168.1.5"], []):
        why = refusal("localhost", addresses, **asked)
        assert why is not None and "localhost" in why
        for word in ("--api-key-file", "CHAIRLIFT_API_KEY", "127.0.0.1", "--insecure"):
            assert word in why
    assert refusal("", ["0.0.0.0"], **asked)


def test_with_a_key_or_when_told_so() -> None:
    assert refusal("0.0.0.0", ["0.0.0.0"], protected=True, insecure=False) is None
    assert refusal("0.0.0.0", ["0.0.0.0"], protected=False, insecure=True) is None
