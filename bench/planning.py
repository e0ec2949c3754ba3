"""What a plan costs while many wait: `python bench/planning.py`.

The scheduler alone, memory bounded and plenty, over a runner that draws at once: as many requests at once as
may run, prompts of 32 to 512 tokens, none of which begin alike. The first plans, in which the queue is worked
off."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from chairlift.engine.memory.states import StateSizes
from chairlift.engine.plan import StepPlan
from chairlift.engine.prefix.vocabulary import PrefixSpec
from tests.engine.memory.test_rows import Served

BYTES = 114_688
"""A token's keys and values, Qwen3-0.6B's shape in bfloat16."""
PLANS = 40


def plans(requests: int, *, prefixes: bool) -> list[float]:
    """Seconds of the first plans."""
    spec = PrefixSpec(64, BYTES) if prefixes else None
    served = Served(StateSizes(BYTES, floor=512, early=True), 10**11, seqs=requests, tokens=512, spec=spec)
    draw, seconds = random.Random(1), list[float]()
    schedule = served.driver.scheduler.schedule

    def timed() -> StepPlan:
        started = time.perf_counter()
        plan = schedule()
        seconds.append(time.perf_counter() - started)
        return plan

    served.driver.scheduler.schedule = timed  # type: ignore[method-assign]
    for seed in range(requests):
        served.driver.add(draw.randint(32, 512), draw.randint(64, 128), seed=seed)
    for _ in range(PLANS):
        served.driver.step()
    return seconds


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", nargs="+", type=int, default=[8, 32, 128], help="that come at once")
    return parser.parse_args(argv)


def main() -> int:
    for requests in parse().requests:
        for prefixes in (False, True):
            took = plans(requests, prefixes=prefixes)
            kept = "prefixes kept" if prefixes else "none kept"
            each, most = 1000 * median(took), 1000 * max(took)
            print(f"{requests} requests, {kept}: {each:.2f} ms a plan, {most:.1f} at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
