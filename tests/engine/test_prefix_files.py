"""A page's file is right or counts as not there."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from safetensors.numpy import load_file

from chairlift.engine.prefix.files import BadFile, read_page, write_page
from chairlift.engine.prefix.vocabulary import Page, PageData
from tests.engine.pages_on_disk import chain_of, checkpoint_of, content, pages_of, same

PAGE, NEXT = pages_of(chain_of(*range(8)))
CHECKPOINT = checkpoint_of(NEXT)

simple = st.one_of(st.none(), st.integers(), st.text(max_size=5), st.just({}), st.just([0, 0]))
tensor = st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), simple)
json_values = st.one_of(
    simple, st.lists(simple, max_size=3), st.dictionaries(st.sampled_from(["__metadata__", "data"]), tensor)
)


def framed(value: object) -> bytes:
    """As the header of a file."""
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("page", [PAGE, NEXT, CHECKPOINT])
@pytest.mark.parametrize("size", [0, 1, 1000, 3 * 2**20 + 5])
def test_what_is_written_is_read(page: Page, size: int, tmp_path: Path) -> None:
    path = tmp_path / "page.safetensors"
    assert write_page(path, page, content(page, size)) == path.stat().st_size
    assert same(page, read_page(path, page), size)
    assert list(tmp_path.iterdir()) == [path] and path.stat().st_mode & 0o777 == 0o600


def test_it_is_a_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "page.safetensors"
    write_page(path, PAGE, content(PAGE, 100))
    (array,) = load_file(path).values()
    assert array.dtype == np.uint8 and array.tobytes() == bytes(content(PAGE, 100).data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_change_of_a_byte_goes_unseen(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "page.safetensors"
    page = data.draw(st.sampled_from([PAGE, CHECKPOINT]))
    write_page(path, page, content(page, 200))
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    try:
        read = read_page(path, page)
    except BadFile:
        return
    assert same(page, read, 200), "only what does not matter may have changed"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cut=st.integers(0, 10**6), more=st.binary(max_size=20))
def test_no_torn_file_is_read(cut: int, more: bytes, tmp_path: Path) -> None:
    path = tmp_path / "page.safetensors"
    write_page(path, PAGE, content(PAGE, 200))
    whole = path.read_bytes()
    torn = whole[: cut % len(whole)] + more
    if torn == whole:
        return
    path.write_bytes(torn)
    with pytest.raises(BadFile):
        read_page(path, PAGE)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.one_of(st.binary(max_size=300), json_values.map(framed)))
def test_foreign_files_are_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "page.safetensors"
    path.write_bytes(data)
    with pytest.raises(BadFile):
        read_page(path, PAGE)


@pytest.mark.parametrize(
    "asked",
    [
        NEXT,
        CHECKPOINT,
        Page(1, PAGE.start, PAGE.tokens, PAGE.digest, NEXT.digest),
        Page(1, PAGE.start, PAGE.tokens - 1, PAGE.digest, PAGE.parent),
        Page(1, PAGE.start + 4, PAGE.tokens, PAGE.digest, PAGE.parent),
    ],
)
def test_a_page_in_place_of_another_is_refused(asked: Page, tmp_path: Path) -> None:
    path = tmp_path / "page.safetensors"
    write_page(path, PAGE, content(PAGE))
    with pytest.raises(BadFile):
        read_page(path, asked)


def test_nothing_is_left_of_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "page.safetensors").mkdir()
    with pytest.raises(OSError):
        write_page(tmp_path / "page.safetensors", PAGE, PageData(memoryview(b"x")))
    assert [path.name for path in tmp_path.iterdir()] == ["page.safetensors"]
