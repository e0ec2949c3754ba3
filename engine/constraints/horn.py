"""What can be made of finitely many parts: Horn clauses, solved in time linear in their size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

Clause = tuple[Hashable, Sequence[Hashable]]
"""(head, body): the head holds if all of the body holds; without a body it holds."""


def derivable(clauses: Iterable[Clause]) -> set[Hashable]:
    """The heads that hold (Dowling and Gallier 1984)."""
    heads: list[Hashable] = []
    missing: list[int] = []
    waiting: dict[Hashable, list[int]] = defaultdict(list)
    found: list[Hashable] = []
    for index, (head, body) in enumerate(clauses):
        parts = set(body)
        heads.append(head)
        missing.append(len(parts))
        for part in parts:
            waiting[part].append(index)
        if not parts:
            found.append(head)
    known: set[Hashable] = set()
    while found:
        head = found.pop()
        if head in known:
            continue
        known.add(head)
        for index in waiting[head]:
            missing[index] -= 1
            if not missing[index]:
                found.append(heads[index])
    return known
