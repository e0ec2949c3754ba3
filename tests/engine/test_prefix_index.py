"""What is kept, what is found, what goes first."""

from __future__ import annotations

from collections import OrderedDict

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from chairlift.engine.prefix.chain import Chain, bisect, common, digest, root_digest
from chairlift.engine.prefix.images import NamedPrompt
from chairlift.engine.prefix.index import Hit, PrefixIndex
from chairlift.engine.prefix.row import RowPrefix
from chairlift.engine.prefix.vocabulary import PrefixSpec

ANYWHERE = PrefixSpec(4, 1)
CHECKPOINTS = PrefixSpec(4, 1, checkpoint_bytes=10)
ROOT = root_digest()

tokens = st.lists(st.integers(0, 2), max_size=24)


def chain(*values: int, root: bytes = ROOT) -> Chain:
    return Chain(root, 4, values)


def keep(index: PrefixIndex, *values: int, root: bytes = ROOT) -> None:
    """As a row leaves it that ends with these tokens."""
    one = chain(*values, root=root)
    node, _ = index.grow(one, None, len(one))
    index.grow_tail(one, node, len(one))
    end = index.node_at(one, node, len(one))
    if end is not None:
        index.checkpoint(end)


def found(index: PrefixIndex, *values: int, root: bytes = ROOT) -> int:
    return index.find(chain(*values, root=root), len(values)).tokens


def test_digests_name_everything_before() -> None:
    one, two = chain(1, 2, 3, 4, 5, 6, 7, 8), chain(9, 2, 3, 4, 5, 6, 7, 8)
    assert one.digests(9) == [digest(ROOT, [1, 2, 3, 4]), digest(digest(ROOT, [1, 2, 3, 4]), [5, 6, 7, 8])]
    assert not set(one.digests(2)) & set(two.digests(2)), "the same block behind another is another"
    assert root_digest("a", "b") != root_digest("ab") != root_digest("", "ab")


def test_prompts_that_differ_at_once_are_not_digested_further() -> None:
    first, second = (Chain(ROOT, 4, [own, *range(4000)]) for own in (1, 2))
    assert first.beginning == digest(ROOT, [1, 0, 1, 2])
    assert first.shared_blocks(second) == 0
    assert len(first._digests) == len(second._digests) == 1
    assert Chain(ROOT, 4, [1, 0, 1]).beginning is None
    assert Chain(root_digest("other"), 4, first.tokens).beginning != first.beginning


@given(first=tokens, second=tokens)
def test_shared_blocks_are_those_that_agree(first: list[int], second: list[int]) -> None:
    expected = common(first, second) // 4
    assert chain(*first).shared_blocks(chain(*second)) == expected
    assert chain(*first).shared_blocks(chain(*second, root=root_digest("other"))) == 0


@given(most=st.integers(0, 50), border=st.integers(0, 50))
def test_bisect(most: int, border: int) -> None:
    assert bisect(most, lambda n: n <= border) == min(most, border)


@given(kept=st.lists(tokens, max_size=8), asked=tokens)
def test_the_longest_common_prefix_is_found_to_the_token(kept: list[list[int]], asked: list[int]) -> None:
    index = PrefixIndex(ANYWHERE, 10**6)
    for values in kept:
        keep(index, *values)
    expected = max((common(values, asked) for values in kept), default=0)
    assert found(index, *asked) == expected
    assert index.find(chain(*asked), max(0, len(asked) - 1)).tokens == min(expected, max(0, len(asked) - 1))


@given(kept=st.lists(tokens, max_size=8), asked=tokens)
def test_with_states_the_longest_whole_prefix_is_found(kept: list[list[int]], asked: list[int]) -> None:
    index = PrefixIndex(CHECKPOINTS, 10**6)
    for values in kept:
        keep(index, *values)
    expected = max((len(v) for v in kept if v == asked[: len(v)]), default=0)
    assert found(index, *asked) == expected


def test_a_hit_names_its_pages_in_order() -> None:
    index = PrefixIndex(ANYWHERE, 100)
    keep(index, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    hit = index.find(chain(1, 2, 3, 4, 5, 6, 0), 7)
    pages, checkpoint = index.use(hit)
    assert hit.tokens == 6 and checkpoint is None
    assert [(page.start, page.tokens) for page in pages] == [(0, 4), (4, 4)]
    assert index.use(Hit()) == ((), None)


def test_what_was_not_used_for_longest_goes_first_and_leaves_before_trunks() -> None:
    index = PrefixIndex(ANYWHERE, 12)
    keep(index, 1, 1, 1, 1, 2, 2, 2, 2)
    keep(index, 3, 3, 3, 3)
    index.use(index.find(chain(1, 1, 1, 1), 4))
    keep(index, 4, 4, 4, 4)
    assert found(index, 1, 1, 1, 1, 2, 2, 2, 2) == 4, "the leaf went, its trunk was used since"
    assert found(index, 3, 3, 3, 3) == found(index, 4, 4, 4, 4) == 4
    keep(index, 5, 5, 5, 5)
    assert found(index, 3, 3, 3, 3) == 0
    assert index.used == 12 and index.evicted == 2 and len(index.take_dropped()) == 2


@pytest.mark.parametrize("spec", [ANYWHERE, CHECKPOINTS], ids=["anywhere", "checkpoints"])
def test_long_sequences_go_one_after_the_other_and_not_a_piece_of_each(spec: PrefixSpec) -> None:
    """The one not used for longest pays for a new one, from its end; the others stay whole."""
    each = 100 + spec.checkpoint_bytes
    index = PrefixIndex(spec, 3 * each)
    first, second, third, fourth = ([start, *range(99)] for start in (1, 2, 3, 4))
    for values in (first, second, third):
        keep(index, *values)
    index.use(index.find(chain(*first), 100))
    keep(index, *fourth[:80])
    whole = [found(index, *values) for values in (first, third, fourth[:80])]
    assert whole == [100, 100, 80]
    assert found(index, *second) == (0 if spec.checkpointed else 20)
    assert index.evicted == 20 + spec.checkpointed


def test_making_room_looks_only_at_what_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever scans trunks to find a leaf, for every block anew, stops the server for seconds."""
    index = PrefixIndex(ANYWHERE, 4 * 500)
    looks = 0

    class Entries(OrderedDict[object, int]):
        def move_to_end(self, key: object, last: bool = True) -> None:
            nonlocal looks
            looks += 1
            super().move_to_end(key, last)

    monkeypatch.setattr(index, "_entries", Entries())
    for start in range(4):
        keep(index, start, *range(4 * 300 - 1))
    assert found(index, 3, *range(4 * 300 - 1)) == 4 * 300
    assert looks < 10 * 4 * 300


def test_entries_are_bounded_in_number_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a model without attention have no bytes, and a device counts buffers."""
    monkeypatch.setattr("chairlift.engine.prefix.index.MOST_ENTRIES", 10)
    index = PrefixIndex(PrefixSpec(4, 0, checkpoint_bytes=1), 10**6)
    for start in range(20):
        keep(index, start, *range(15))
    assert len(index) <= 10
    assert found(index, 19, *range(15)) == 16 and found(index, 0, *range(15)) == 0


def test_a_tail_is_kept_only_where_something_can_begin_behind_it() -> None:
    for spec, kept in ((ANYWHERE, [4, 4, 2]), (CHECKPOINTS, [4, 4])):
        save = RowPrefix(PrefixIndex(spec, 100), ROOT, NamedPrompt(tuple(range(8)))).at_end(1, range(10), 10)
        assert save is not None and [page.tokens for page in save.pages] == kept
        assert save.checkpoint is None, "too short for one"


def test_what_does_not_fit_is_not_kept() -> None:
    index = PrefixIndex(ANYWHERE, 6)
    keep(index, *range(12))
    assert found(index, *range(12)) == 6 or found(index, *range(12)) == 4
    assert index.used <= 6
    nothing = PrefixIndex(ANYWHERE, 3)
    keep(nothing, *range(12))
    assert len(nothing) == 0 and nothing.take_dropped() == ()


def test_a_tail_makes_way_for_the_block_that_begins_with_it() -> None:
    index = PrefixIndex(ANYWHERE, 100)
    keep(index, 1, 2)
    keep(index, 1, 2, 3, 4)
    assert len(index) == 1 and index.used == 4 and len(index.take_dropped()) == 1
    keep(index, 1, 2, 3)
    assert len(index) == 1, "it adds nothing"


def test_what_is_forgotten_takes_along_what_is_behind_it() -> None:
    index = PrefixIndex(CHECKPOINTS, 1000)
    keep(index, *range(10))
    keep(index, *range(4))
    first = index.use(index.find(chain(*range(4)), 4))[0][0]
    index.forget([first.id])
    assert len(index) == index.used == found(index, *range(10)) == 0
    assert len(index.take_dropped()) == 3 + 2
    index.forget([first.id])
    assert index._roots == {}


@settings(deadline=None)
@given(
    steps=st.lists(st.tuples(tokens, st.sampled_from(["keep", "keep", "use", "forget", "pin"])), max_size=40),
    limit=st.integers(0, 60),
    spec=st.sampled_from([ANYWHERE, CHECKPOINTS]),
)
def test_whatever_happens_the_books_balance(
    steps: list[tuple[list[int], str]], limit: int, spec: PrefixSpec
) -> None:
    index = PrefixIndex(spec, limit)
    alive: set[int] = set()
    stay: set[int] = set()
    for values, what in steps:
        hit = index.find(chain(*values), len(values))
        if what == "keep":
            keep(index, *values)
        elif what == "use":
            pages, checkpoint = index.use(hit)
            assert sum(page.tokens for page in pages) >= hit.tokens
            assert (checkpoint is not None) == (spec.checkpointed and hit.tokens > 0)
        elif what == "pin":
            assert index.pin(chain(*values)) == hit.tokens
            assert index.use(hit)[0] == () or hit.node is not None and hit.node.pinned
        elif hit.node is not None:
            index.forget([hit.node.page.id])
            assert hit.node.dead
        pinned = {entry.page.id for entry in index._entries if entry.pinned}
        assert stay <= pinned or what == "forget", "they do not go for room"
        assert index.pinned == sum(size for entry, size in index._entries.items() if entry.pinned)
        stay = pinned
        dropped = set(index.take_dropped())
        alive = (alive | set(index._by_id)) - dropped
        assert alive == set(index._by_id) and not dropped & set(index._by_id)
        assert index.used == sum(index._entries.values()) <= limit
        for node in index._nodes.values():
            assert not node.dead and (node.parent is None or index._nodes[node.parent.digest] is node.parent)
            assert [n.page.start for n in node.path] == [4 * i for i in range(len(node.path))]
