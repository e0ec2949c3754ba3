"""How rows stand: who decodes, who prefills, who is next, and when to come back where too many wait. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from chairlift.engine.memory.rows import MAX_OVERTAKEN, RowMemory
from chairlift.engine.prefix.prefixes import Computing, Prefixes
from chairlift.engine.row import Row, RowState

RETRY_AFTER = (1.0, 60.0)
"""Seconds: bounds of `retry_after`."""


def standing(live: Iterable[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    """Of rows with states: those that decode, those that prefill, and those whose last draw is launched."""
    decode: list[Row] = []
    prefilling: list[Row] = []
    ending: list[Row] = []
    for row in live:
        if row.state is RowState.PREFILLING:
            prefilling.append(row)
        else:
            (decode if row.launched < row.limit else ending).append(row)
    return decode, prefilling, ending


def looking(candidates: Iterable[Row]) -> Row | None:
    """The row that encodes an image in this step, if any has one left: the oldest. It gets no span, so
    that a step has one large piece of work; others with images wait for their turn."""
    return min((row for row in candidates if row.unseen), key=lambda row: row.arrival, default=None)


def next_in_line(
    waiting: Iterable[Row], prefilling: Iterable[Row], seats: int, prefixes: Prefixes, memory: RowMemory
) -> list[Row]:
    """The waiting rows that may take the free seats beside those that prefill, best first: those that gave
    their state up, then those that were passed too often, then by priority and arrival."""

    def order(row: Row) -> tuple[bool, bool, int, int]:
        overdue = row.overtaken >= MAX_OVERTAKEN
        first = overdue or row.preempted > 0
        return not row.preempted, not overdue, 0 if first else row.request.priority, row.arrival

    computing = Computing(prefilling)
    line: list[Row] = []
    for row in sorted(waiting, key=order) if seats > 0 else ():
        if not prefixes.waits(row, computing) and memory.admits(row):
            computing.add(row)
            line.append(row)
            if len(line) == seats:
                break
    return line


def retry_after(finish_times: Sequence[float], now: float, waiting: Collection[object]) -> float:
    """Seconds in which half of the queue is worked off at the pace of the last finished rows."""
    least, most = RETRY_AFTER
    if len(finish_times) < 2:
        return least
    pace = (now - finish_times[0]) / len(finish_times)
    return min(max(pace * len(waiting) / 2, least), most)
