"""How many threads a CPU's matrix products take.

OpenBLAS divides each product among its threads, and they wait for one another awake. A chunk of a prompt
gains by it. A decode step, a few rows against hundreds of small weights, hardly does, and where anything else
wants a core it loses most of its speed: one thread waits for another that the system has put aside. So decode
steps of a few rows take the fewest threads that are about as fast as all, measured when the model was loaded.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from chairlift.engine.plan import StepPlan

FEW_TOKENS = 16
"""A step of more takes all threads, and so does one with prompts."""
ABOUT_AS_FAST = 1.1
"""Times the fastest's time. What more is given away is missed where nothing else wants a core."""
TRIES = 3


@dataclass(frozen=True, slots=True)
class Blas:
    """The matrix products' library of this process.

    Attributes:
        threads: that it started with, from the environment or one a core.
        use: sets how many the next product takes, 1 to `threads`.
    """

    threads: int
    use: Callable[[int], None]

    def use_all(self) -> None:
        self.use(self.threads)


@functools.cache
def find_blas() -> Blas | None:
    """None where mlx is not on OpenBLAS, or that has one thread. Looked up once: what a process uses later is
    what the last step of one of its models took."""
    process = ctypes.CDLL(None)
    try:
        count, use = process.openblas_get_num_threads, process.openblas_set_num_threads
    except AttributeError:
        return None
    count.restype, count.argtypes = ctypes.c_int, []
    use.restype, use.argtypes = None, [ctypes.c_int]
    threads = int(count())
    return Blas(threads, use) if threads > 1 else None


class StepThreads:
    """What a step says of threads. They are the process's: another model may have set them since.

    Args:
        few: threads of a step of few tokens.
    """

    def __init__(self, blas: Blas, few: int) -> None:
        self._blas = blas
        self._few = few

    def suit(self, plan: StepPlan) -> None:
        """The step is about to run. One with images takes all, and so does a prompt's last chunk, however
        short: it may bring along what was held back before it."""
        few = len(plan.decode) <= FEW_TOKENS and not plan.encode and not plan.prefill
        self._blas.use(self._few if few else self._blas.threads)


def measured(blas: Blas, seconds: Callable[[], float]) -> StepThreads:
    """The threads for steps of few tokens.

    Args:
        seconds: runs such a step.
    """
    times: dict[int, float] = {}
    threads = blas.threads
    try:
        while threads:
            blas.use(threads)
            times[threads] = min(seconds() for _ in range(TRIES))
            if times[threads] > ABOUT_AS_FAST * min(times.values()):
                break  # fewer are slower still, and a large model's tries take long
            threads //= 2
    finally:
        blas.use_all()
    return StepThreads(blas, fewest(times))


def fewest(times: Mapping[int, float]) -> int:
    """Threads, of seconds by threads."""
    best = min(times.values())
    return min(threads for threads, taken in times.items() if taken <= ABOUT_AS_FAST * best)
