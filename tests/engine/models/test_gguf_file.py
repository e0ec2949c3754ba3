"""Damaged files are told from sound ones, in one line."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader

from chairlift.engine.errors import ModelUnavailable
from chairlift.engine.models.gguf_file import GGUFFile
from tests.engine.models.gguf_files import Llama


def test_it_reads_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = Llama().write(tmp_path / "m.gguf", Kind.Q4_1)
    ours, theirs = GGUFFile(path), GGUFReader(path)
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(ours.metadata) == keys
    assert {key: theirs.fields[key].contents() for key in keys} == ours.metadata
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        got = ours.tensors[tensor.name]
        assert (got.type, list(got.shape)) == (tensor.tensor_type, tensor.shape.tolist()[::-1])
        assert ours.rows(got).tobytes() == tensor.data.tobytes()


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = Llama().write(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [4, 5, 11, 20, 24, 25, 40, 100, 1000, len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(
            ModelUnavailable, match=r"cut\.gguf is not a sound GGUF file: .*truncated"
        ) as refusal:
            GGUFFile(cut)
        assert "\n" not in refusal.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GGU", "is not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is GGUF version 1; versions 2 and 3 are read"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ2sI", 3, 0, 1, 2, b"\xff\xfe", 4) + bytes(4), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "value of an unknown kind"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "list of an unknown kind"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**61), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), "gives t 9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 4, 999, 0), "unknown format"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 8, 0), "impossible shape"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 0, 2**63), "before the data of t"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelUnavailable, match=message):
        GGUFFile(path)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"none\.gguf cannot be read: No such file or directory\."):
        GGUFFile(tmp_path / "none.gguf")
