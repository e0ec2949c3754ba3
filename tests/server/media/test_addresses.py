"""Which addresses are public."""

from __future__ import annotations

import pytest

from chairlift.server.media.addresses import is_public


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "1.1.1.1", "93.184.215.14", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"],
)
def test_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.9.10",
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "169.254.0.1",
        "169.254.169.254",  # metadata of most clouds
        "100.64.0.1",
        "100.100.100.200",  # metadata of Alibaba
        "100.127.255.255",
        "168.63.129.16",  # of Azure
        "192.0.0.192",  # of Oracle
        "192.0.2.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "192.88.99.1",
        "::",
        "::1",
        "::7f00:1",
        "fe80::1",
        "fe80::1%lo",
        "fc00::1",
        "fd00:ec2::254",  # metadata of AWS
        "fec0::1",
        "ff02::1",
        "2001:db8::1",
        "2001::1",
        "2001:2::1",
        "3fff::1",
        "5f00::1",
        "2002:7f00:1::1",
        "64:ff9b:1::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:100.64.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "",
        "localhost",
        "127.1",
        "0x7f000001",
        "2130706433",
    ],
)
def test_not_public(address: str) -> None:
    assert not is_public(address)
