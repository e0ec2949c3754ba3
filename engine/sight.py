"""What the runner asks of a model that sees: the words between it and `chairlift.engine.models.images`.

Every method is called on the MLX thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from chairlift.engine.media import PreparedMedia


class SightError(Exception):
    """A row's images cannot be used; the message is one line for the client."""


class RowSight(Protocol):
    """The images of one row, from its admission until its state goes. Positions count tokens of the row."""

    @property
    def encoded(self) -> bool:
        """Nothing is left to encode."""
        ...

    @property
    def delta(self) -> int:
        """Rotary position less index of every token behind the prompt. Known once `encoded`."""
        ...

    @property
    def whole_to(self) -> int:
        """The prompt's first so many tokens must be prefilled in one piece; 0 where any chunks will do."""
        ...

    def encode(self) -> None:
        """Encode the next image that is not encoded yet, if any (all at once where the model's features are
        not by image). Blocks.

        Raises:
            SightError: the row is at fault.
        """
        ...

    def bound(self, position: int) -> bool:
        """The token at `position` cannot be fed by its id alone: it must come with a span."""
        ...

    def told(self, start: int, tokens: Sequence[int]) -> dict[str, Any]:
        """What the model's forward is to be told of the tokens `[start, start + len(tokens))`, alone in a
        batch of one, beside ids and caches. Known once `encoded`."""
        ...


class Sight(Protocol):
    """A model's encoder of images."""

    def row(self, prompt: tuple[int, ...], media: PreparedMedia, held: int = 0) -> RowSight:
        """The images of a new row. Encodes nothing.

        Args:
            held: tokens that its state holds already: images that end among them are never encoded.

        Raises:
            SightError: the prompt's image tokens are not those of the images.
        """
        ...
