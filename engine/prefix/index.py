"""Which prefixes are kept, and which go when memory is short: pure bookkeeping, no arrays.

A tree of blocks. A **node** is a block of tokens behind its parent's: full, or a **tail** that is shorter
and has no children. What the runner keeps of it is a **page**: keys and values of its tokens in all
attention layers that keep every token. Layers that keep a state or a window instead are kept as
**checkpoints**, the state behind a node's last token. A model without such layers resumes behind any token,
even inside a page; one with them resumes at checkpoints only.

Pages and checkpoints are named by numbers that are never used again, so that what the runner still holds
under one can never be taken for another.

Invariants: every ancestor of a node is in the tree, and counts as used later than the node; the bytes of all
entries are at most `limit`, and there are at most `MOST_ENTRIES`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from chairlift.engine.prefix.chain import Chain, bisect, checkpoint_digest, common, digest
from chairlift.engine.prefix.node import Checkpoint, Node, subtree
from chairlift.engine.prefix.vocabulary import Page, PrefixSpec, PrefixStats

MOST_ENTRIES = 100_000
"""Pages and checkpoints: each is a buffer on the device, and Metal bounds their number beside their bytes."""
MOST_COMPARED = 64
"""Siblings, latest first, that are searched for one that begins as the sequence goes on."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What of a sequence is kept."""

    tokens: int = 0
    node: Node | None = None
    """The last one; a sequence may end inside it."""


class PrefixIndex:
    """Args: limit: bytes of all pages and checkpoints together."""

    def __init__(self, spec: PrefixSpec, limit: int) -> None:
        self.spec = spec
        self.limit = limit
        self.used = 0
        self.pinned = 0
        """Bytes, of those used, that do not go for room."""
        self.queried = 0
        """Tokens of sequences that were looked up to be taken over."""
        self.hit = 0
        """Of these, taken over."""
        self.disk_hit = 0
        """Of these, fetched from the disk for the row."""
        self.evicted = 0
        self.checkpoints = 0
        """Of the entries."""
        self.checkpoints_taken = 0
        self.version = 0
        """Changes whenever a look-up may come out differently."""
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, dict[int, list[Node]]] = {}
        self._entries: OrderedDict[Node | Checkpoint, int] = OrderedDict()  # bytes; least recently used first
        self._by_id: dict[int, Node | Checkpoint] = {}
        self._dropped: list[int] = []
        self._distrusted: list[bytes] = []
        self._next_id = 1

    def __len__(self) -> int:
        """Pages and checkpoints."""
        return len(self._entries)

    @property
    def longest(self) -> int:
        """Most tokens of a sequence that can be kept, in whole blocks."""
        size = self.spec.block_tokens * self.spec.bytes_per_token
        blocks = (self.limit - self.spec.checkpoint_bytes) // size if size else MOST_ENTRIES
        return max(0, min(blocks, MOST_ENTRIES)) * self.spec.block_tokens

    @property
    def stats(self) -> PrefixStats:
        return PrefixStats(
            *(self.limit, self.used, len(self), self.queried, self.hit, self.evicted),
            *(self.disk_hit, self.pinned, self.checkpoints, self.checkpoints_taken),
        )

    # Look-up

    def find(self, chain: Chain, limit: int) -> Hit:
        """The longest kept prefix of `chain`, of at most `limit` tokens. Changes nothing."""
        block = self.spec.block_tokens
        digests = chain.digests(limit // block)
        blocks = bisect(len(digests), lambda n: digests[n - 1] in self._nodes)
        node = self._nodes[digests[blocks - 1]] if blocks else None
        if not self.spec.checkpointed:
            rest = chain.tokens[blocks * block : min(limit, (blocks + 1) * block)]
            best, tokens = self._longest_child(chain.root, node, rest)
            return Hit(blocks * block + tokens, best) if tokens else Hit(blocks * block, node)
        while True:
            start = node.stop if node is not None else 0
            rest = chain.tokens[start : min(limit, start + block)]
            if (end := self._longest_end(chain.root, node, rest)) is not None:
                return Hit(end.stop, end)
            if node is None or node.checkpoint is not None:
                return Hit(start, node)
            node = node.parent

    def use(self, hit: Hit) -> tuple[tuple[Page, ...], Page | None]:
        """The pages to restore and the checkpoint, now used last of all."""
        if hit.node is None:
            return (), None
        path = self._touch(hit.node)
        checkpoint = hit.node.checkpoint if self.spec.checkpointed else None
        if checkpoint is not None:
            self._entries.move_to_end(checkpoint)
        return tuple(node.page for node in path), checkpoint.page if checkpoint is not None else None

    def _touch(self, node: Node) -> list[Node]:
        """The path to a node, now used last of all. The end first: a sequence goes from its end, before what
        was used later is touched, and what is to go next is found at once."""
        path = node.path
        for each in reversed(path):
            self._entries.move_to_end(each)
        return path

    def _children(self, root: bytes, node: Node | None) -> dict[int, list[Node]]:
        """A node's, or where there is none those that begin a sequence under `root`."""
        return node.children if node is not None else self._roots.get(root, {})

    def _longest_end(self, root: bytes, node: Node | None, rest: list[int]) -> Node | None:
        """The longest child with a checkpoint of whose tokens `rest` has all."""
        children = self._children(root, node).get(rest[0], []) if rest else []
        whole = [
            child
            for child in children
            if child.checkpoint is not None and child.tokens == tuple(rest[: len(child.tokens)])
        ]
        return max(whole, key=lambda child: len(child.tokens), default=None)

    def _longest_child(self, root: bytes, node: Node | None, rest: list[int]) -> tuple[Node | None, int]:
        best, length = None, 0
        for child in (self._children(root, node).get(rest[0], []) if rest else [])[-MOST_COMPARED:]:
            tokens = common(child.tokens, rest)
            if tokens > length:
                best, length = child, tokens
        return best, length

    # Growth

    def grow(self, chain: Chain, parent: Node | None, stop: int) -> tuple[Node | None, list[Node]]:
        """Nodes for the full blocks of `chain` behind `parent` that end by `stop`.

        Returns the last node there is then, and those that are new, whose pages are to be saved. Ends early
        where room is short or the parent is gone.
        """
        block = self.spec.block_tokens
        new: list[Node] = []
        digests = chain.digests(stop // block)
        for index in range(parent.stop // block if parent is not None else 0, len(digests)):
            if parent is not None and parent.dead:
                break
            node = self._nodes.get(digests[index])
            if node is None:
                node = self._add(chain, parent, index * block, block, digests[index])
                if node is None:
                    break
                new.append(node)
            parent = node
        if parent is not None and not parent.dead:
            self._touch(parent)
        return parent, new

    def grow_tail(self, chain: Chain, parent: Node | None, stop: int) -> Node | None:
        """A new node for what lies between `parent` and `stop`, less than a block; None if there is nothing,
        no room, or no need."""
        start = parent.stop if parent is not None else 0
        tokens = stop - start
        if not 0 < tokens < self.spec.block_tokens or (parent is not None and parent.dead):
            return None
        if not self.spec.checkpointed:
            _, kept = self._longest_child(chain.root, parent, chain.tokens[start:stop])
            if kept == tokens:
                return None
        name = digest(parent.digest if parent is not None else chain.root, chain.tokens[start:stop])
        tail = None if name in self._nodes else self._add(chain, parent, start, tokens, name)
        if tail is not None:
            self._touch(tail)
        return tail

    def checkpoint(self, node: Node) -> Page | None:
        """A checkpoint behind the node to be saved; None if there is one, or no room, or no use for it."""
        if not self.spec.checkpointed or node.checkpoint is not None or node.dead:
            return None
        if not self._make_room(self.spec.checkpoint_bytes, node):
            return None
        name = checkpoint_digest(node.digest)
        node.checkpoint = Checkpoint(Page(self._new_id(), node.stop, 0, name, node.digest), node)
        self._enter(node.checkpoint, self.spec.checkpoint_bytes)
        self.checkpoints += 1
        self.checkpoints_taken += 1
        return node.checkpoint.page

    def adopt(self, chain: Chain, pages: Iterable[Page]) -> list[Page | None]:
        """What was fetched for `chain`, in its order, under ids of this index: each is to be loaded, unless
        it is here by now, has no place any more, or no room (None)."""
        adopted: list[Page | None] = []
        last: Node | None = None
        for page in pages:
            node = self._adopt(chain, page) if page.tokens else self._nodes.get(page.parent)
            adopted.append(node.page if page.tokens and node is not None else None)
            if not page.tokens and node is not None:
                adopted[-1] = self.checkpoint(node)
            last = node if node is not None else last
        if last is not None and not last.dead:
            self._touch(last)
        return adopted

    def _adopt(self, chain: Chain, page: Page) -> Node | None:
        parent = self._nodes.get(page.parent) if page.start else None
        if page.digest in self._nodes or (page.start and parent is None):
            return None
        return self._add(chain, parent, page.start, page.tokens, page.digest)

    def has(self, digest: bytes) -> bool:
        """Whether a page of this name is kept."""
        return digest in self._nodes

    def node_at(self, chain: Chain, parent: Node | None, stop: int) -> Node | None:
        """The node of `chain` that ends at `stop`, `parent` or a tail behind it."""
        if parent is not None and parent.stop == stop:
            return parent
        start = parent.stop if parent is not None else 0
        name = digest(parent.digest if parent is not None else chain.root, chain.tokens[start:stop])
        return self._nodes.get(name)

    def _add(self, chain: Chain, parent: Node | None, start: int, tokens: int, name: bytes) -> Node | None:
        size = tokens * self.spec.bytes_per_token
        if not self._make_room(size, parent):
            return None
        # Tails are of use with checkpoints only: a few tokens are sooner computed than read.
        worth = tokens == self.spec.block_tokens or self.spec.checkpointed
        before = parent.digest if parent is not None else chain.root
        page = Page(self._new_id(), start, tokens, name if worth else b"", before)
        node = Node(page, name, tuple(chain.tokens[start : start + tokens]), chain.root, parent)
        children = parent.children if parent is not None else self._roots.setdefault(chain.root, {})
        siblings = children.setdefault(node.tokens[0], [])
        outgrown = [
            tail
            for tail in siblings
            if len(tail.tokens) < tokens
            and tail.checkpoint is None
            and not tail.pinned
            and node.tokens[: len(tail.tokens)] == tail.tokens
        ]
        siblings.append(node)
        self._nodes[name] = node
        self._enter(node, size)
        for tail in outgrown:
            self._remove(tail)
        return node

    # Pins

    def pin(self, chain: Chain) -> int:
        """Keep what there is of `chain` whatever else needs room; returns its tokens."""
        hit = self.find(chain, len(chain))
        for entry in self._entries_of(hit):
            if not entry.pinned:
                entry.pinned = True
                self.pinned += self._entries[entry]
        return hit.tokens

    def unpinned_bytes(self, chain: Chain) -> int:
        """What `pin` would add to `pinned` if all of `chain` were kept."""
        size = len(chain) * self.spec.bytes_per_token + self.spec.checkpoint_bytes
        kept = self._entries_of(self.find(chain, len(chain)))
        return max(0, size - sum(self._entries[entry] for entry in kept if entry.pinned))

    def _entries_of(self, hit: Hit) -> list[Node | Checkpoint]:
        path: list[Node | Checkpoint] = list(hit.node.path) if hit.node is not None else []
        if hit.node is not None and hit.node.checkpoint is not None and self.spec.checkpointed:
            path.append(hit.node.checkpoint)
        return path

    def bound(self, limit: int, *, pinned: bool = False) -> None:
        """Keep at most so many bytes from now on. What is pinned goes only if `pinned`, and last."""
        self.limit = limit
        self._make_room(0, None)
        if pinned and self.used > limit:
            for entry in self._entries:
                entry.pinned = False
            self.pinned = 0
            self._make_room(0, None)

    # Loss

    def forget(self, ids: Iterable[int]) -> None:
        """The runner has not got these, or they are not to be trusted: they go, and what is behind them."""
        for id in ids:
            entry = self._by_id.get(id)
            if entry is not None:
                self._remove(entry)

    def spoil(self, ids: Iterable[int]) -> None:
        """The runner has not got these as they should be."""
        self.distrust([entry.page for id in ids if (entry := self._by_id.get(id)) is not None])

    def distrust(self, pages: Iterable[Page]) -> None:
        """These are of a row that went wrong: they go, what is behind them too, and so does what the disk
        has of them."""
        for page in pages:
            entry = self._by_id.get(page.id)
            gone = subtree(entry) if isinstance(entry, Node) else ()
            names = (page.digest, *(one.page.digest for one in gone))
            self._distrusted += [name for name in names if name]
            self.forget([page.id])

    def clear(self) -> None:
        self.forget(list(self._by_id))

    def take_distrusted(self) -> tuple[bytes, ...]:
        """Digests of pages and checkpoints that are not to be trusted, since this was last asked."""
        distrusted = tuple(self._distrusted)
        self._distrusted.clear()
        return distrusted

    @property
    def has_dropped(self) -> bool:
        """`take_dropped` has something to tell."""
        return bool(self._dropped)

    def take_dropped(self) -> tuple[int, ...]:
        """Pages and checkpoints that have gone since this was last asked: the runner is to drop them."""
        dropped = tuple(self._dropped)
        self._dropped.clear()
        return dropped

    def _make_room(self, need: int, keep: Node | None) -> bool:
        """Evict what was not used for longest. A node whose children are kept, or that is itself to be kept,
        has to stay and is looked at again last: one of a sequence that is growing just now. So does one that
        is pinned."""
        looks = len(self._entries)
        while looks and not self._has_room(need):
            looks -= 1
            entry = next(iter(self._entries))
            if entry.pinned or (isinstance(entry, Node) and (entry is keep or entry.children)):
                self._entries.move_to_end(entry)
                continue
            before = len(self)
            self._remove(entry)
            self.evicted += before - len(self)
        return self._has_room(need)

    def _has_room(self, need: int) -> bool:
        return self.used + need <= self.limit and len(self) < MOST_ENTRIES

    def _remove(self, entry: Node | Checkpoint) -> None:
        for gone in list(subtree(entry)) if isinstance(entry, Node) else [entry]:
            if isinstance(gone, Node):
                gone.dead = True
                self._nodes.pop(gone.digest, None)
            else:
                gone.node.checkpoint = None
                self.checkpoints -= 1
            size = self._entries.pop(gone)
            self.used -= size
            self.pinned -= size if gone.pinned else 0
            del self._by_id[gone.page.id]
            self._dropped.append(gone.page.id)
        if isinstance(entry, Node):
            self._unlink(entry)
        self.version += 1

    def _unlink(self, node: Node) -> None:
        children = self._children(node.root, node.parent)
        siblings = children[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del children[node.tokens[0]]
        if node.parent is None and not children:
            del self._roots[node.root]

    def _enter(self, entry: Node | Checkpoint, size: int) -> None:
        self._entries[entry] = size
        self._by_id[entry.page.id] = entry
        self.used += size
        self.version += 1

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
