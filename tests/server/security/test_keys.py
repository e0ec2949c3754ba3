"""Keys as operators give them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.server.security.keys import (
    Key,
    KeyFault,
    Keys,
    KeySources,
    parse_key,
    read_key_file,
)
from tests.server.security.keyring import ALICE, BOB, ROOT, SOURCES


def key_file(folder: Path, text: str, mode: int = 0o600, name: str = "keys") -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(mode)
    return path


def test_what_is_read_are_names_and_digests() -> None:
    keys = SOURCES.read()
    assert [(key.name, key.admin, key.named) for key in keys] == [
        ("alice", False, True),
        ("key-1", False, False),
        ("root", True, True),
    ]
    assert [key.digest for key in keys] == [hashlib.sha256(k.encode()).digest() for k in (ALICE, BOB, ROOT)]


def test_a_file_has_a_key_a_line_names_and_comments(tmp_path: Path) -> None:
    text = f"# who\n\nalice: {ALICE}\r\n  {BOB}  \n#{ROOT}\n"
    path = key_file(tmp_path, "\ufeff" + text)
    assert [(given.name, given.secret) for given in read_key_file(path)] == [("alice", ALICE), (None, BOB)]
    keys = KeySources(api_key_files=(path,)).read()
    assert [key.name for key in keys] == ["alice", "key-1"]
    assert Keys(keys).find(ROOT.encode()) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o610, 0o602])
def test_a_file_that_others_may_touch_is_refused_with_the_command(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, ALICE, mode)
    with pytest.raises(KeyFault) as fault:
        list(read_key_file(path))
    assert f"chmod 600 {path}" in str(fault.value) and f"{mode:04o}" in str(fault.value)
    path.chmod(0o400)
    assert [given.secret for given in read_key_file(path)] == [ALICE]


def test_a_file_that_systemd_hands_over_is_private_though_its_mode_says_that_a_group_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "below"
    elsewhere.mkdir()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert [given.secret for given in read_key_file(key_file(tmp_path, ALICE, 0o440))] == [ALICE]
    for folder, mode in ((tmp_path, 0o444), (tmp_path, 0o460), (tmp_path, 0o450), (elsewhere, 0o440)):
        with pytest.raises(KeyFault, match="can be read or changed by others"):
            list(read_key_file(key_file(folder, ALICE, mode, f"keys-{mode:o}")))


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(KeyFault, match="holds no key"):
        list(read_key_file(key_file(tmp_path, text)))


def test_a_fault_names_the_line_and_not_the_key(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"{ALICE}\nmy secret key\n")
    with pytest.raises(KeyFault) as fault:
        list(read_key_file(path))
    assert f"{path}, line 2" in str(fault.value) and "secret key" not in str(fault.value)


def test_what_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    binary.chmod(0o600)
    long = key_file(tmp_path, "#" * (2**20 + 1), name="long")
    for path, why in (
        (tmp_path / "absent", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "pipe", "not a regular file"),
        (binary, "not UTF-8"),
        (long, "longer than"),
    ):
        with pytest.raises(KeyFault, match=why):
            list(read_key_file(path))


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "alice:",
        "short",
        "with space 1234",
        "käse-käse-käse",
        "a,b,c,d,e,f,g",
        '"quoted-key"',
        "=" * 12,
    ]
    + [f"-a:{ALICE}", f"a b:{ALICE}", f":{ALICE}", f"{'a' * 65}:{ALICE}", f"a:b:{ALICE}", "a" * 9 + "\x00"],
)
def test_what_is_no_key(text: str) -> None:
    with pytest.raises(KeyFault) as fault:
        parse_key(text, "an API key")
    assert ALICE not in str(fault.value)


def test_keys_do_not_show_in_reprs() -> None:
    sources = KeySources(api_keys=(ALICE,), admin_keys=(ROOT,))
    shown = repr(sources) + repr(list(sources.given())) + repr(sources.read())
    assert ALICE not in shown and ROOT not in shown


def test_one_key_is_one_client() -> None:
    twice = KeySources(api_keys=(f"alice:{ALICE}", ALICE, f"alice:{BOB}"))
    alice, other = twice.read()
    assert alice.name == other.name == "alice" and alice.tenant == other.tenant
    for sources in (
        KeySources(api_keys=(f"alice:{ALICE}", f"bob:{ALICE}")),
        KeySources(api_keys=(ALICE,), admin_keys=(ALICE,)),
        KeySources(api_keys=(ALICE, f"alice:{ALICE}")),
    ):
        with pytest.raises(KeyFault, match="this key is also that of"):
            sources.read()


def test_a_client_without_a_name_stays_the_same_when_others_come() -> None:
    (bob,) = KeySources(api_keys=(BOB,)).read()
    _, again = KeySources(api_keys=(ALICE, BOB)).read()
    assert (bob.name, again.name) == ("key-1", "key-2")
    assert bob.tenant == again.tenant


def test_finding() -> None:
    keys = Keys(SOURCES.read())
    assert {(secret, key.name) for secret in (ALICE, BOB, ROOT) if (key := keys.find(secret.encode()))} == {
        (ALICE, "alice"),
        (BOB, "key-1"),
        (ROOT, "root"),
    }
    assert keys and keys.has_admin and list(keys.names) == ["alice", "key-1", "root"]
    keys.replace([Key("x", hashlib.sha256(b"new").digest())])
    assert keys.find(ALICE.encode()) is None and keys.find(b"new") == Key(
        "x", hashlib.sha256(b"new").digest()
    )
    assert not keys.has_admin and not Keys()


def test_every_key_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is, and with a comparison that takes the same time for all."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("chairlift.server.security.keys.hmac.compare_digest", compare)
    keys = Keys(SOURCES.read())
    for secret in (ALICE, BOB, ROOT, "nobody's"):
        compared.clear()
        keys.find(secret.encode())
        assert len(compared) == 3 and {len(part) for pair in compared for part in pair} == {32}


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=40))
def test_no_other_bytes_are_a_key(secret: bytes) -> None:
    found = Keys(SOURCES.read()).find(secret)
    assert (found is not None) == (secret in {ALICE.encode(), BOB.encode(), ROOT.encode()})


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=60))
def test_every_text_is_a_key_or_a_fault(text: str) -> None:
    try:
        given_key = parse_key(text, "here")
    except KeyFault as fault:
        assert str(fault).startswith("here: ")
    else:
        assert given_key.secret.isascii() and len(given_key.secret) >= 8
        assert parse_key(f"name: {given_key.secret}", "here").secret == given_key.secret
