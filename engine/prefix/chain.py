"""Token sequences as chains of blocks, each named by a digest of everything up to its end.

Two sequences have a block's digest in common exactly if they have the same root and the same tokens up to the
block's end. So equality of a long prefix is one comparison, and the longest common prefix of blocks a search
by halves. Source: vLLM's hash-based prefix caching.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence

DIGEST_BYTES = 16
NAME_BYTES = 40
"""Of what stands in a chain for a token of an image (`chairlift.engine.prefix.images`)."""


def digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a block of `tokens` behind everything that `parent` names."""
    try:
        data = array("I", tokens).tobytes()
    except OverflowError:  # some are of images, and their names are longer than a token
        data = b"".join(token.to_bytes(NAME_BYTES, "little") for token in tokens)
        return hashlib.blake2b(parent + data, digest_size=DIGEST_BYTES, person=b"images").digest()
    return hashlib.blake2b(parent + data, digest_size=DIGEST_BYTES).digest()


def checkpoint_digest(behind: bytes) -> bytes:
    """The name of the checkpoint behind the block that `behind` names."""
    return hashlib.blake2b(behind, digest_size=DIGEST_BYTES, person=b"checkpoint").digest()


def root_digest(*parts: str) -> bytes:
    """The name of the empty sequence under these circumstances: whatever else makes keys and values what
    they are (model, its revision and quantization, type of the cache, the tenant's salt)."""
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


class Chain:
    """A sequence that grows at its end, and the digests of its full blocks.

    Args:
        root: name of the empty sequence.
        block: tokens of a block.
    """

    def __init__(self, root: bytes, block: int, tokens: Iterable[int] = ()) -> None:
        self.root = root
        self.block = block
        self.tokens: list[int] = list(tokens)
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        self.tokens += tokens

    def digests(self, blocks: int) -> list[bytes]:
        """Of the first `blocks` full blocks, or of all there are if these are fewer."""
        blocks = min(blocks, len(self.tokens) // self.block)
        while len(self._digests) < blocks:
            start = len(self._digests) * self.block
            parent = self._digests[-1] if self._digests else self.root
            self._digests.append(digest(parent, self.tokens[start : start + self.block]))
        return self._digests[:blocks]

    @property
    def beginning(self) -> bytes | None:
        """The digest of the first block; None where it is not full. Chains of one model that share any block
        share this."""
        return self._digests[0] if self._digests else next(iter(self.digests(1)), None)

    def shared_blocks(self, other: Chain) -> int:
        """Full blocks that both begin with."""
        most = min(len(self.tokens), len(other.tokens)) // self.block
        if self.root != other.root or self.block != other.block or self.beginning != other.beginning:
            return 0
        mine, theirs = self.digests(most), other.digests(most)
        return bisect(most, lambda blocks: mine[blocks - 1] == theirs[blocks - 1])


def bisect(most: int, holds: Callable[[int], bool]) -> int:
    """The largest n <= most for which `holds(n)`; it holds for 0, and up to some n and for none after it."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that both begin with."""
    most = min(len(first), len(second))
    return next((index for index in range(most) if first[index] != second[index]), most)
