"""The contract's part 1, by its public names."""

from __future__ import annotations

import copy

import mlx.core as mx
import mlx_vlm.models.cache as vlm_caches
import pytest
from mlx_lm.models.cache import ArraysCache

from chairlift.cache.mamba import BatchMambaCache
from chairlift.cache.recurrent_batch import UNBOUNDED


def written(value: float, *, size: int = 2, rows: int = 1) -> ArraysCache:
    """A cache whose states are full of `value`, `value` + 100, …"""
    cache = ArraysCache(size)
    for which in range(size):
        cache[which] = mx.full((rows, 2 + which), value + 100 * which, dtype=mx.float32)
    return cache


def column(state: mx.array | None) -> list[float]:
    """The first number of every row."""
    assert state is not None
    return [float(row[0]) for row in state.tolist()]  # type: ignore[union-attr, index]


# merge


def test_merge_keeps_the_order_of_rows() -> None:
    batch = BatchMambaCache.merge([written(1), written(2), written(3)])
    assert batch.batch_size == 3
    assert column(batch[0]) == [1, 2, 3]
    assert column(batch[1]) == [101, 102, 103]


def test_merge_of_nothing_is_empty() -> None:
    batch = BatchMambaCache.merge([])
    assert batch.batch_size == 0 and batch.empty() and batch.nbytes == 0


def test_unwritten_caches_are_rows_of_zeros_so_rows_do_not_shift() -> None:
    batch = BatchMambaCache.merge([ArraysCache(2), written(2), ArraysCache(2), written(4)])
    assert column(batch[0]) == [0, 2, 0, 4]
    assert column(batch[1]) == [0, 102, 0, 104]


def test_states_are_written_or_not_one_by_one() -> None:
    first, second = ArraysCache(3), ArraysCache(3)
    first[0] = mx.ones((1, 4), dtype=mx.bfloat16)
    second[1] = mx.full((1, 2, 2), 2, dtype=mx.int32)
    batch = BatchMambaCache.merge([first, second])
    assert batch[0].dtype == mx.bfloat16 and column(batch[0]) == [1, 0]
    assert batch[1].dtype == mx.int32 and batch[1].tolist() == [[[0, 0], [0, 0]], [[2, 2], [2, 2]]]
    assert batch[2] is None


def test_a_batch_with_nothing_written_knows_its_rows() -> None:
    batch = BatchMambaCache.merge([ArraysCache(2), ArraysCache(2)])
    assert batch.empty() and batch.batch_size == 2
    batch.extend(written(7))
    assert column(batch[0]) == [0, 0, 7]


def test_merge_takes_batches_in_order() -> None:
    two = BatchMambaCache.merge([written(1), written(2)])
    three = BatchMambaCache(left_padding=[0, 0, 0])
    batch = BatchMambaCache.merge([two, written(3), three, written(4, rows=2)])
    assert column(batch[0]) == [1, 2, 3, 0, 0, 0, 4, 4]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_number_of_states(size: int) -> None:
    batch = BatchMambaCache.merge([written(1, size=size), written(2, size=size)])
    assert len(batch.cache) == size
    assert [column(batch[which]) for which in range(size)] == [
        [100 * which + 1, 100 * which + 2] for which in range(size)
    ]
    assert len(batch.extract(1).cache) == size
    assert len(BatchMambaCache(size=size).cache) == size


def test_other_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="2 and 3 states"):
        BatchMambaCache.merge([written(1), written(2, size=3)])


def test_other_dtypes_are_named() -> None:
    other = written(1)
    other[1] = other[1].astype(mx.bfloat16)
    with pytest.raises(ValueError, match=r"state 1 .*bfloat16 and .*float32"):
        BatchMambaCache.merge([written(1), other])
    with pytest.raises(ValueError, match=r"state 1 .*bfloat16 and .*float32"):
        BatchMambaCache.merge([written(1)]).extend(other)


def test_other_shapes_are_named() -> None:
    other = written(1)
    other[0] = mx.zeros((1, 5))
    with pytest.raises(ValueError, match=r"state 0 .*\(2,\) and \(5,\)"):
        BatchMambaCache.merge([written(1), other])


def test_padding_and_lengths_survive_merge() -> None:
    first, second, third = written(1), written(2), written(3)
    first.left_padding, first.lengths = mx.array([3]), mx.array([8])
    second.left_padding = mx.array([1])
    batch = BatchMambaCache.merge([first, second, third])
    assert batch.left_padding.tolist() == [3, 1, 0]
    assert batch.lengths.tolist() == [8, UNBOUNDED, UNBOUNDED]


def test_rows_in_mid_prefill_merge_and_come_back() -> None:
    """Rows that stopped after different parts of padded prompts: each goes on with its own rest."""
    chunked = BatchMambaCache(left_padding=[4, 0])
    chunked.prepare(lengths=[10, 7])
    chunked[0] = mx.array([[1.0], [2.0]])
    chunked.advance(3)
    fresh = BatchMambaCache(left_padding=[2])
    batch = BatchMambaCache.merge([chunked, fresh])
    assert batch.left_padding.tolist() == [1, -3, 2]
    assert batch.lengths.tolist() == [7, 4, UNBOUNDED]
    assert batch.make_mask(5).tolist() == [
        [False, True, True, True, True],
        [True, True, True, True, False],
        [False, False, True, True, True],
    ]
    back = BatchMambaCache.merge([batch.extract(row) for row in range(3)])
    assert back.make_mask(5).tolist() == batch.make_mask(5).tolist()
    assert back.lengths.tolist() == batch.lengths.tolist()
    assert column(back[0]) == [1, 2, 0]


# extract


def test_extract_is_the_single_cache_of_the_row() -> None:
    batch = BatchMambaCache.merge([written(1), written(2), written(3)])
    for row in (1, -2):
        single = batch.extract(row)
        assert type(single) is ArraysCache
        assert [state.tolist() for state in single.cache] == [[[2, 2]], [[102, 102, 102]]]
        assert single.left_padding is None and single.lengths is None


def test_extract_leaves_unwritten_states_unwritten() -> None:
    batch = BatchMambaCache(left_padding=[0, 0])
    assert batch.extract(1).cache == [None, None]
    batch[0] = mx.array([[1.0], [2.0]])
    single = batch.extract(1)
    assert single[0].tolist() == [[2]] and single[1] is None


def test_extract_does_not_follow_the_batch() -> None:
    batch = BatchMambaCache.merge([written(1), written(2)])
    single = batch.extract(1)
    batch[0][1] = mx.full((2,), 9.0)
    batch.filter([0])
    assert column(single[0]) == [2]


def test_extract_does_not_hold_the_batch_in_memory() -> None:
    rows, width = 64, 1 << 16
    batch = BatchMambaCache(size=1)
    batch[0] = mx.zeros((rows, width)) + 1
    mx.eval(batch[0])
    before = mx.get_active_memory()
    single = batch.extract(5)
    mx.synchronize()
    batch[0] = None
    assert before - mx.get_active_memory() > (rows - 2) * width * 4
    assert single[0].shape == (1, width)


@pytest.mark.parametrize("row", [2, -3])
def test_a_row_that_is_not_there(row: int) -> None:
    batch = BatchMambaCache.merge([written(1), written(2)])
    with pytest.raises(IndexError, match=f"row {row} of a batch of 2"):
        batch.extract(row)
    with pytest.raises(IndexError, match=f"row {row} of a batch of 2"):
        batch.filter([0, row])


# filter, extend


def test_filter_takes_lists_and_arrays_in_any_order() -> None:
    for rows in ([2, 0], mx.array([2, 0])):
        batch = BatchMambaCache.merge([written(1), written(2), written(3)])
        batch.left_padding, batch.lengths = [1, 2, 3], [4, 5, 6]
        batch.filter(rows)
        assert column(batch[0]) == [3, 1] and column(batch[1]) == [103, 101]
        assert batch.left_padding.tolist() == [3, 1] and batch.lengths.tolist() == [6, 4]


def test_filter_to_no_rows_and_on() -> None:
    for rows in ([], mx.array([], dtype=mx.int32)):
        batch = BatchMambaCache.merge([written(1), written(2)])
        batch.filter(rows)
        assert batch.batch_size == 0 and batch.nbytes == 0
        batch.extend(written(5))
        assert column(batch[0]) == [5]


def test_filter_counts_rows_without_states() -> None:
    batch = BatchMambaCache(left_padding=[0, 0, 0])
    batch.filter([1, 2])
    assert batch.batch_size == 2
    batch.extend(written(1))
    assert column(batch[0]) == [0, 0, 1]


def test_extend_counts_unwritten_rows_on_either_side() -> None:
    batch = BatchMambaCache(left_padding=[0, 0])
    batch.extend(BatchMambaCache.merge([written(1), ArraysCache(2)]))
    batch.extend(BatchMambaCache(left_padding=[0, 0, 0]))
    batch.extend(ArraysCache(2))
    assert column(batch[0]) == [0, 0, 1, 0, 0, 0, 0, 0]


def test_extend_does_not_mask_rows_without_lengths() -> None:
    """Upstream gives them the length 0."""
    batch = BatchMambaCache.merge([written(1)])
    batch.lengths = [2]
    batch.extend(written(2))
    assert batch.make_mask(3).tolist() == [[True, True, False], [True, True, True]]


def test_extend_of_an_empty_batch_takes_the_other_size() -> None:
    batch = BatchMambaCache.merge([])
    batch.extend(written(1, size=4))
    assert len(batch.cache) == 4 and batch.batch_size == 1


def test_extend_leaves_the_other_alone() -> None:
    batch, other = BatchMambaCache.merge([written(1)]), BatchMambaCache.merge([written(2)])
    batch.extend(other)
    assert column(other[0]) == [2] and other.batch_size == 1


# metadata


def test_metadata_never_becomes_a_graph() -> None:
    """Arrays that each step subtracts from, and nobody evaluates, grow by a node a step."""
    batch = BatchMambaCache(left_padding=[5, 0])
    batch.prepare(lengths=[100, 90])
    for _ in range(3):
        batch.advance(1)
    for values in (batch.left_padding, batch.lengths):
        mx.export_to_dot(graph := _Text(), values)
        assert "Subtract" not in graph.text
    assert batch.left_padding.tolist() == [2, -3] and batch.lengths.tolist() == [97, 87]


def test_upstream_metadata_becomes_a_graph() -> None:
    """What the test above would see, were it wrong."""
    cache = ArraysCache(2, left_padding=[5])
    for _ in range(3):
        cache.advance(1)
    mx.export_to_dot(graph := _Text(), cache.left_padding)
    assert graph.text.count("Subtract") >= 3


class _Text:
    """A file of text, as `mx.export_to_dot` writes to."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def test_advance_without_metadata() -> None:
    batch = BatchMambaCache.merge([written(1)])
    batch.advance(5)
    assert batch.left_padding is None and batch.lengths is None


@pytest.mark.parametrize("left_padding", [None, [2, 0]])
@pytest.mark.parametrize("lengths", [None, [5, 3]])
def test_make_mask_as_upstream(left_padding: list[int] | None, lengths: list[int] | None) -> None:
    ours, theirs = BatchMambaCache(left_padding), ArraysCache(2, left_padding)
    if lengths is not None:
        ours.prepare(lengths=lengths)
        theirs.prepare(lengths=lengths)
    for tokens in (4, 1, 2):
        expected = theirs.make_mask(tokens)
        got = ours.make_mask(tokens)
        assert (got is None) == (expected is None)
        assert expected is None or got.tolist() == expected.tolist()
        ours.advance(tokens)
        theirs.advance(tokens)
    ours.finalize()
    assert ours.make_mask(1) is None and ours.batch_size == (2 if left_padding or lengths else 0)


def test_prepare_announces_left_padding() -> None:
    batch = BatchMambaCache.merge([written(1), written(2)])
    batch.prepare(left_padding=[1, 0], right_padding=[0, 1])
    assert batch.make_mask(2).tolist() == [[False, True], [True, True]]


def test_metadata_of_another_length_is_refused() -> None:
    batch = BatchMambaCache.merge([written(1), written(2)])
    with pytest.raises(ValueError, match="lengths has 3 entries, the batch has 2 rows"):
        batch.prepare(lengths=[1, 2, 3])


def test_nbytes() -> None:
    batch = BatchMambaCache.merge([written(1), written(2)])
    assert batch.nbytes == 2 * (2 + 3) * 4


def test_state_goes_out_and_in() -> None:
    batch = BatchMambaCache.merge([written(1), written(2)])
    batch.left_padding, batch.lengths = [1, 0], [3, 4]
    states, left_padding, lengths = batch.state
    assert [column(state) for state in states] == [[1, 2], [101, 102]]
    assert left_padding.tolist() == [1, 0] and lengths.tolist() == [3, 4]
    for other in (BatchMambaCache.from_state(batch.state), copy.deepcopy(batch)):
        assert column(other[0]) == [1, 2] and other.left_padding.tolist() == [1, 0]
        other.filter([0])
        assert batch.batch_size == 2


def test_state_carries_the_rows_of_a_batch_with_nothing_written() -> None:
    batch = BatchMambaCache.from_state(BatchMambaCache.merge([ArraysCache(3)] * 2).state)
    assert batch.batch_size == 2 and batch.cache == [None] * 3


def test_it_is_upstream_s_state_cache() -> None:
    assert issubclass(BatchMambaCache, ArraysCache)


# what mlx-vlm's models call


@pytest.mark.parametrize("lengths", [None, [1, 4]])
def test_windows_as_mlx_vlm_keeps_them(lengths: list[int] | None) -> None:
    ours, theirs = BatchMambaCache(size=1), vlm_caches.ArraysCache(1)
    source = mx.arange(2 * 7 * 3).reshape(2, 7, 3)
    ends = None if lengths is None else mx.array(lengths)
    kept = ours.update_window(0, source, 3, lengths=ends)
    expected = theirs.update_window(0, source, 3, lengths=ends)
    assert kept.tolist() == expected.tolist() == ours[0].tolist()


def test_recurrent_updates_as_mlx_vlm_makes_them() -> None:
    cache = BatchMambaCache.merge([written(1)])
    asked: list[object] = []

    def update(state: mx.array, between: object) -> tuple[str, mx.array]:
        asked.append(between)
        return "output", state + 1

    output, state = cache.update_recurrent(0, 4, update)
    assert output == "output" and asked == [None]
    assert column(state) == column(cache[0]) == [2]
