"""Fixed schedules of the parity tests and of `docs/models.md`."""

from __future__ import annotations

from tests.mlx.lift import Ride
from tests.mlx.solo import prompt

FULL = (
    Ride(prompt(5), tokens=20),
    Ride(prompt(9), tokens=15),
    Ride(prompt(40), tokens=16, chunks=(7,)),
    Ride(prompt(100), join=2, tokens=20, chunks=(64,)),
    Ride(prompt(1), join=3, tokens=20),
    Ride(prompt(17), join=3, tokens=20, chunks=(1, 3)),
    Ride(prompt(2), join=5, tokens=20, preempt=(9, 15)),
    Ride(prompt(200), join=4, tokens=10, chunks=(50,), cancel=6),
    Ride(prompt(30), join=4, tokens=20, chunks=(16,), cancel=12),
    Ride(prompt(250), join=2, tokens=12, chunks=(90,)),
    Ride(prompt(420), join=5, tokens=4, chunks=(300,)),
    Ride(prompt(64), join=6, tokens=14, chunks=(10,), preempt=(9,)),
    Ride(prompt(16), join=7, tokens=18),
    Ride(prompt(128), join=40, tokens=6),
)
"""Several joins in one step, joins later, chunks of every kind, cancels in mid-prefill and mid-decode,
preemption in mid-prefill and (twice) in mid-decode, rows on both sides of the 256 tokens below which all
share a cohort and one that grows past them, and a row that joins after all others have left."""

SHORT = (
    Ride(prompt(19), tokens=10, chunks=(8,)),
    Ride(prompt(1), tokens=9),
    Ride(prompt(90), join=1, tokens=6, chunks=(40, 1)),
    Ride(prompt(3), join=2, tokens=8, preempt=(5,)),
    Ride(prompt(33), join=3, tokens=8, cancel=6),
)
