"""Chairlift: an OpenAI-compatible inference server with continuous batching on MLX.

`LLM` is loaded at its first use, so that importing the package needs no mlx.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chairlift.engine.llm import LLM
    from chairlift.engine.request import SamplingParams

    __version__: str

__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "chairlift.engine.llm", "SamplingParams": "chairlift.engine.request"}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return version("chairlift")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
