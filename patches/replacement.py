"""One replaced attribute of an upstream module, whose original is kept."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MARK = "__chairlift_original__"


@dataclass(frozen=True, slots=True)
class Replacement:
    """
    Attributes:
        module: import path.
        owner: a class of the module; empty for the module itself.
        name: the attribute.
        make: from the original to what takes its place.
    """

    module: str
    owner: str
    name: str
    make: Callable[[Any], Any]

    def apply(self) -> bool:
        """Replace, unless it is replaced. False where the module is absent.

        Raises:
            RuntimeError: a module that is built differently.
        """
        try:
            target = self._target()
        except ImportError:
            return False
        original = vars(target).get(self.name) if target is not None else None
        if original is None:
            raise RuntimeError(f"{self.module} has no {self.owner}.{self.name}.")
        if not hasattr(original, MARK):
            new = self.make(original)
            setattr(new, MARK, original)
            setattr(target, self.name, new)
        return True

    def undo(self) -> None:
        """Put the original back, if it is replaced."""
        if self.applied():
            target = self._target()
            setattr(target, self.name, getattr(vars(target)[self.name], MARK))

    def applied(self) -> bool:
        try:
            target = self._target()
        except ImportError:
            return False
        return target is not None and hasattr(vars(target).get(self.name), MARK)

    def _target(self) -> Any:
        module = importlib.import_module(self.module)
        return getattr(module, self.owner, None) if self.owner else module
