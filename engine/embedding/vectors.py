"""Arithmetic on vectors in host memory, in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from chairlift.engine.embedding.types import Vectors


def normalised(vectors: Vectors, dimensions: int | None = None) -> Vectors:
    """The first `dimensions` numbers of each vector (None: all), scaled to length 1.

    Args:
        vectors: `[texts, width]`; a vector of zeros stays one.
    """
    cut = vectors[:, :dimensions].astype(np.float64)
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return (cut / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)


def similarities(left: Vectors, right: Vectors) -> npt.NDArray[np.float64]:
    """Cosines of the angles between the vectors of two arrays, row by row; `left` may have one row.

    Returns:
        `[texts]`, from -1 to 1.
    """
    first, second = (normalised(vectors).astype(np.float64) for vectors in (left, right))
    cosines: npt.NDArray[np.float64] = np.clip((first * second).sum(axis=1), -1.0, 1.0)
    return cosines
