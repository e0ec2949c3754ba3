"""The tree of kept prefixes: blocks of tokens behind one another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from chairlift.engine.prefix.vocabulary import Page


@dataclass(slots=True, eq=False)
class Node:
    """A block in the tree."""

    page: Page
    digest: bytes
    tokens: tuple[int, ...]
    root: bytes
    parent: Node | None
    children: dict[int, list[Node]] = field(default_factory=dict)
    """By first token, oldest first."""
    checkpoint: Checkpoint | None = None
    dead: bool = False
    pinned: bool = False

    @property
    def stop(self) -> int:
        """Tokens from the sequence's beginning to the node's end."""
        return self.page.start + self.page.tokens

    @property
    def path(self) -> list[Node]:
        """From the first block to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(slots=True, eq=False)
class Checkpoint:
    page: Page
    node: Node
    pinned: bool = False


def subtree(node: Node) -> Iterator[Node | Checkpoint]:
    """Everything behind a node, the node last."""
    stack, found = [node], []
    while stack:
        one = stack.pop()
        found.append(one)
        stack += [child for siblings in one.children.values() for child in siblings]
    for one in reversed(found):
        if one.checkpoint is not None:
            yield one.checkpoint
        yield one
