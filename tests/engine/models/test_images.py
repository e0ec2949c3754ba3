"""Arrays told apart by image, and the store of what is encoded."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.engine.models.encoded import EncodedImages
from chairlift.engine.models.image_inputs import as_mlx, image_token_ids, split_inputs


def pixels(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_patches_go_to_the_image_whose_grid_counts_them() -> None:
    inputs = {"pixel_values": pixels(4 + 8, 6), "image_grid_thw": np.array([[1, 2, 2], [1, 2, 4]])}
    parts = split_inputs(inputs, (1, 2))
    assert parts is not None
    first, second = parts
    assert np.array_equal(first["pixel_values"], inputs["pixel_values"][:4])
    assert np.array_equal(second["pixel_values"], inputs["pixel_values"][4:])
    assert [part["image_grid_thw"].tolist() for part in (first, second)] == [[[1, 2, 2]], [[1, 2, 4]]]


def test_one_array_entry_an_image() -> None:
    inputs = {"pixel_values": pixels(2, 3, 4, 4), "image_sizes": np.array([[4, 4], [2, 4]])}
    parts = split_inputs(inputs, (4, 2)) or []
    assert [part["pixel_values"].shape for part in parts] == [(1, 3, 4, 4)] * 2
    assert [part["image_sizes"].tolist() for part in parts] == [[[4, 4]], [[2, 4]]]


@pytest.mark.parametrize("batched", [False, True])
def test_tiles_go_by_tokens(batched: bool) -> None:
    tiles, mask = pixels(4, 3, 2, 2), np.ones((4, 2, 2))
    arrays = {"pixel_values": tiles, "pixel_attention_mask": mask}
    parts = split_inputs({k: v[None] if batched else v for k, v in arrays.items()}, (5, 15)) or []
    assert len(parts) == 2
    for part, expected in zip(parts, (tiles[:1], tiles[1:]), strict=True):
        assert np.array_equal(part["pixel_values"], expected[None] if batched else expected)
        assert part["pixel_attention_mask"].shape[1 if batched else 0] == len(expected)


@pytest.mark.parametrize(
    ("inputs", "tokens"),
    [
        ({}, (1, 2)),
        ({"pixel_values": pixels(5, 3, 2, 2)}, (4, 5)),
        ({"pixel_values": pixels(3, 3, 2, 2)}, (5, 4)),
        ({"pixel_values": pixels(3, 3, 2, 2), "spatial_shapes": np.ones((3, 2))}, (3, 6)),
        ({"pixel_values": pixels(3, 3, 2, 2), "pixel_attention_mask": np.ones((2, 2, 2))}, (3, 6)),
        ({"pixel_values": pixels(7, 6), "image_grid_thw": np.array([[1, 2, 2], [1, 2, 2]])}, (1, 1)),
        ({"pixel_values": pixels(4, 6), "image_grid_thw": np.array([[1, 2, 2]])}, (1, 1)),
        (
            {"pixel_values": pixels(8, 6), "image_grid_thw": np.array([[1, 2, 2]] * 2), "more": np.ones(1)},
            (1, 1),
        ),
    ],
)
def test_what_cannot_be_told_apart(inputs: dict[str, np.ndarray], tokens: tuple[int, ...]) -> None:
    assert split_inputs(inputs, tokens) is None


def test_token_ids_of_a_configuration() -> None:
    config = SimpleNamespace(image_token_id=7, image_token_index=7, media_placeholder_token_id=None)
    assert image_token_ids(config) == [7]


def test_float64_is_no_type_of_mlx() -> None:
    assert str(as_mlx(np.ones(2)).dtype) == "mlx.core.float32"
    assert [array.shape for array in as_mlx([np.ones(2, dtype=np.float32), np.ones(3)])] == [(2,), (3,)]
    assert as_mlx("text") == "text"


class Blob:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), max_size=40), st.integers(0, 20))
def test_the_store_keeps_the_latest_that_fit(puts: list[tuple[int, int]], capacity: int) -> None:
    store: EncodedImages[Blob] = EncodedImages(capacity)
    order: list[int] = []
    sizes: dict[int, int] = {}
    for key, size in puts:
        store.put(key, Blob(size))
        order = [other for other in order if other != key]
        sizes.pop(key, None)
        if size <= capacity:
            order.append(key)
            sizes[key] = size
        while sum(sizes.values()) > capacity:
            sizes.pop(order.pop(0))
        assert store.nbytes == sum(sizes.values())
        assert [key in store for key in range(7)] == [key in sizes for key in range(7)]


def test_what_is_used_stays() -> None:
    store: EncodedImages[Blob] = EncodedImages(2)
    store.put("a", Blob(1))
    store.put("b", Blob(1))
    assert store.get("a") is not None
    store.put("c", Blob(1))
    assert store.get("b") is None
    assert store.get("a") is not None
    store.clear()
    assert (len(store), store.nbytes, store.get("a")) == (0, 0, None)
