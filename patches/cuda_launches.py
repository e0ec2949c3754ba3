"""CUDA: operations are launched one by one, and caches of plans that miss are no error.

Upstream, mlx 0.32: each stream gathers some thirty operations into a CUDA graph, and keeps the graphs that it
has instantiated by how their operations depend on each other. A batch that rows join and leave hardly ever
repeats itself there: on an H200 a third of a step's host time was instantiation, and a step with prompts took
60 ms in place of 15 (bench/RESULTS.md).

Misses of that cache, and of those of attention's and convolution's plans, are counted from the process's
start and never set back. Past twice a cache's size each further one raises 'Cache thrashing is happening',
which sooner or later is every server's lot.

MLX reads both from the environment when a stream is first used; what is set there already stands.
"""

from __future__ import annotations

import os

VERSIONS = ">=0.32.4,<0.33"

SETTINGS = {"MLX_USE_CUDA_GRAPHS": "0", "MLX_ENABLE_CACHE_THRASHING_CHECK": "0"}


def set_launches() -> bool:
    """Idempotent. Other devices do not read these."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    return True


def unset_launches() -> None:
    for name, value in SETTINGS.items():
        if os.environ.get(name) == value:
            del os.environ[name]


def launches_are_set() -> bool:
    return all(name in os.environ for name in SETTINGS)
