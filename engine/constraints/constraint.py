"""A checked constraint: what a request carries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from chairlift.engine.constraints.matcher import Matcher


class Followed(Protocol):
    """A grammar ready to be followed."""

    def matcher(self) -> Matcher:
        """A fresh one, in microseconds; from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer's tokens must follow. Made by `Compiler.compile` alone: every one can be followed."""

    grammar: str
    """llguidance's, which says all there is to it: equal grammars are equal constraints."""
    compiled: Followed = field(compare=False, repr=False)
    """Kept with the request, so that it is never compiled again."""
