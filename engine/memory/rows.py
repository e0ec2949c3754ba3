"""Which rows may hold states, so that all together stay within the budget. Pure.

Kept pages go first. Then rows wait in the queue. Then the youngest rows give their states up: they keep their
tokens, and go on later from these. What makes this end:
- the oldest row never gives its state up while another has one;
- a row that gave its state up comes back before any row that never had one;
- a row that has waited long enough is passed by no younger one (`MAX_OVERTAKEN`);
- a row is admitted with room to spare, more each time it had to give up, so that rows do not take turns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from chairlift.engine.errors import MemoryExceeded
from chairlift.engine.memory.budget import Account
from chairlift.engine.memory.holdings import SLICE, apart, extra_of, holding, name_of, spare_of
from chairlift.engine.memory.states import Holding, RowStates, StateSizes
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.request import Request
from chairlift.engine.row import Row, RowState

MOST_REFUSED = 4
"""Rows that are looked at behind one that has to wait for memory, in one plan."""
MAX_OVERTAKEN = 8
"""A row that so many younger ones have passed in the queue goes next, whatever its priority."""


@dataclass(slots=True)
class MemoryCounts:
    """
    Attributes:
        preemptions: times that a row gave its state up.
        waits: rows that had a seat and no memory, each counted once for each time in the queue.
        settled: steps that waited for the one before to be computed, since both did not fit.
    """

    preemptions: int = 0
    waits: int = 0
    settled: int = 0


class RowMemory:
    """
    Args:
        sizes: what states take; None: not known, and nothing is bounded.
        account: of the budget; None: nothing is bounded.
        pages: what is kept of rows for later ones.
    """

    def __init__(
        self,
        sizes: StateSizes | None = None,
        account: Account | None = None,
        pages: PrefixIndex | None = None,
    ) -> None:
        self.sizes = sizes
        self.counts = MemoryCounts()
        self._account = account
        self._pages = pages
        self._most_pages = pages.limit if pages is not None else 0
        self._states = RowStates(sizes or StateSizes(0))
        self._needs: dict[int, int] = {}  # by arrival: bytes of a row alone
        self._waited: set[int] = set()
        self._blocked_at: int | None = None
        self._trial = self._states
        """States after the coming plan, as far as it is made."""
        self._twice = 0  # bytes that its step copies
        self._need = 0  # most bytes of it, until all that prefill have joined
        self._stale = False  # rows have been added to the trial since
        self._most: int | None = None  # bytes that its rows could take at most; None: not yet counted
        self._live: list[Row] = []
        self._line: list[Row] = []
        self._refused: list[Row] = []
        self._told = self._height = 0  # bytes of rows, as the account has them, and the most there were

    @property
    def blocked(self) -> bool:
        """Rows wait for memory that is not this engine's to free, and none has come free since they were
        looked at."""
        return self._account is not None and self._blocked_at == self._account.changes

    @property
    def used(self) -> int:
        """Bytes of rows' states, as projected for the last plan."""
        return self._told

    @property
    def height(self) -> int:
        """Most bytes of rows' states, as projected, since this was last asked."""
        height, self._height = self._height, self._told
        return max(height, self._told)

    @property
    def states(self) -> RowStates:
        """As the runner has them once the last plan is launched."""
        return self._states

    # Requests

    def limit(self, request: Request, room: int) -> int:
        """Tokens of the answer: what is asked for, within `room`, the rest of the context; where nothing is,
        as many as memory holds.

        Raises:
            MemoryExceeded: the prompt, or the prompt with an answer of the length asked for, could not be
                held even alone.
        """
        asked = request.sampling.max_tokens
        answer = room if asked is None else min(asked, room)
        if self.sizes is None or self._account is None:
            return answer
        prompt = len(request.prompt_token_ids)
        free = max(0, self._account.most - extra_of(self.sizes, request))
        fits = self.sizes.most_alone(prompt, free, prompt + answer - 1) - prompt + 1
        if fits < 1 or (asked is not None and fits < answer):
            raise MemoryExceeded(
                "prompt" if fits < 1 else "max_tokens",
                needed=self.sizes.alone(prompt, prompt + answer - 1) + extra_of(self.sizes, request),
                available=self._account.most,
                prompt=prompt,
                answer=answer,
                most=self.sizes.longest(free, prompt + answer),
            )
        return fits

    def longest(self, context: int) -> int:
        """Tokens of prompt and answer that a request of text may have, within `context`."""
        if self.sizes is None or self._account is None:
            return context
        return self.sizes.longest(self._account.most, context)

    def accept(self, row: Row) -> None:
        """The request is queued: it is to stay possible, and may fit where those before it do not."""
        self._blocked_at = None
        if self.sizes is not None and self._account is not None:
            prompt = len(row.request.prompt_token_ids)
            need = self.sizes.alone(prompt, prompt + row.limit - 1) + extra_of(self.sizes, row.request)
            self._needs[row.arrival] = need
            self._account.least = max(self._account.least, need)

    def end(self, row: Row) -> None:
        self._waited.discard(row.arrival)
        need = self._needs.pop(row.arrival, 0)
        if self._account is not None and need >= self._account.least:
            self._account.least = max(self._needs.values(), default=0)
        if self._account is not None and row in self._refused:
            # It waits no more: nobody is to keep memory for it, and the queue is looked at again.
            self._refused.remove(row)
            self._blocked_at = None
            self._account.wait(self._refused[0].timing.queued if self._refused else None)

    # A plan, in the order in which it is made

    def over(self, decode: Sequence[Row], prefilling: Sequence[Row]) -> list[Row]:
        """Rows that have to give their states up before the next step; youngest first.

        Args:
            decode: rows that are to feed a token.
            prefilling: rows whose prompt is not all launched. The states of all others go with this plan.
        """
        self._line, self._refused, self._blocked_at = [], [], None
        self._stale, self._most = False, None
        if self._account is None:
            return []
        rows = sorted((*decode, *prefilling), key=lambda row: row.arrival)
        victims: list[Row] = []
        while not self._fit(rows):
            others = self._account.others > 0
            if not rows or (len(rows) == 1 and not others):
                break  # it goes on, whatever: nobody else could make room
            victims.append(rows.pop())
        self._live = rows
        self.counts.preemptions += len(victims)
        return victims

    def _fit(self, rows: list[Row]) -> bool:
        """Whether these rows' states fit, after a step of them and joined; the trial is of these."""
        assert self._account is not None
        decode = [row.id for row in rows if row.id is not None and row.state is RowState.RUNNING]
        ids = {row.id for row in rows}
        if self._states.quiet(decode):
            self._trial, self._twice, self._need = self._states, 0, self._states.nbytes
            return self._need <= self._room(len(rows))
        trial = self._states.copy()
        trial.release([id for id in trial.own if id not in ids])
        twice = trial.step(decode)
        trial.release([id for id in trial.rows if id not in ids])
        joined, later = trial.joined()
        self._trial, self._twice = trial, twice
        self._need = max(trial.nbytes + twice, joined.nbytes + later)
        return self._need <= self._room(len(rows))

    def _room(self, rows: int) -> int:
        """Bytes for so many rows. Pages that are kept for good go for the only one."""
        assert self._account is not None
        pinned = self._pages.pinned if self._pages is not None and rows > 1 else 0
        return self._account.room - pinned

    def admits(self, row: Row) -> bool:
        """Whether a row of the queue may get a state in this plan, beside those that were told yes."""
        if self._account is None or self.sizes is None:
            return True
        if self._passing() or not self._fits_too(row):
            if len(self._refused) < MOST_REFUSED:
                self._refuse(row)
            return False
        return True

    def _passing(self) -> bool:
        """Nobody may pass those who wait for memory."""
        if len(self._refused) >= MOST_REFUSED:
            return True
        return any(row.preempted or row.overtaken >= MAX_OVERTAKEN for row in self._refused)

    def _refuse(self, row: Row) -> None:
        self._refused.append(row)
        if row.arrival not in self._waited:
            self._waited.add(row.arrival)
            self.counts.waits += 1

    def _fits_too(self, row: Row) -> bool:
        assert self._account is not None and self.sizes is not None
        alone = not self._live and not self._line
        older = self._account.yields
        if older is not None and older < row.timing.queued:
            return False
        rows = [*self._live, *self._line, row]
        if self._trial is self._states:
            self._trial = self._states.copy()
        if (most := self._most_with(row)) is not None and most <= self._room(len(rows)):
            self._trial.admit(name_of(row), holding(self.sizes, row))
            self._most, self._stale = most, True
            self._line.append(row)
            self._waited.discard(row.arrival)
            return True
        trial = self._trial.copy()
        trial.admit(name_of(row), holding(self.sizes, row))
        need, joined = self._needs_of(trial)
        if alone:
            # It was accepted because it fits: where nobody else holds anything, it begins.
            if need > self._account.room and self._account.others:
                return False
        else:
            spare = {name_of(each): spare_of(each) for each in rows}
            if need + joined.slack(spare) > self._room(len(rows)):
                return False
        self._trial, self._need, self._stale, self._most = trial, need, False, most
        self._line.append(row)
        self._waited.discard(row.arrival)
        return True

    def _needs_of(self, trial: RowStates) -> tuple[int, RowStates]:
        """Most bytes of a plan after which states are as in `trial`; and those once all have joined."""
        joined, twice = trial.joined()
        return max(trial.nbytes + self._twice, joined.nbytes + twice), joined

    def _most_with(self, row: Row) -> int | None:
        """Bytes that all rows and this one could take at most, however they join; None where that is not
        known. To try it out for each of many that wait takes long, and mostly there is room anyway."""
        sizes = self._trial.sizes
        if not sizes.shared or sizes.single or row.preempted:
            return None
        if self._most is None:
            if any(each.preempted for each in (*self._live, *self._line)):
                return None
            lengths = self._trial.layout.lengths
            rows = self._trial.rows.items()
            self._most = sum(self._trial.most(held, SLICE, lengths.get(each)) for each, held in rows)
        return self._most + self._trial.most(holding(sizes, row), SLICE)

    def reserve(
        self,
        new: Sequence[Row],
        grants: Sequence[tuple[Row, int]],
        decode: Sequence[int],
        live: Sequence[int],
    ) -> None:
        """The rows are chosen: kept pages that are in their way go, before the plan is put together.

        Args:
            new: rows that are to get states.
            grants: rows that are to prefill, and how many tokens at most.
            decode, live: as of `launched`, but for the new ones.
        """
        if self._account is None:
            return
        if self._stale:
            self._need, _ = self._needs_of(self._trial)
        if ending := [row for row, tokens in grants if tokens >= row.remaining and self._early(row)]:
            need, rows = self._joined_now(new, ending, decode, live), len(self._live) + len(self._line)
            if rows <= 1 or need <= self._room(rows):
                self._need = max(self._need, need)
        self._told = self._need
        self._height = max(self._height, self._told)
        self._account.pages = self._pages.used if self._pages is not None else 0
        self._account.use(self._told)
        # The claim of who is next here, and of nobody behind: else two engines could wait for one another.
        self._account.wait(self._refused[0].timing.queued if self._refused else None)
        if self._refused and not self._live and not self._line:
            self._blocked_at = self._account.changes
        if self._pages is not None:
            left = max(0, self._account.room - self._told - self._account.others_pages)
            alone = len(self._live) + len(self._line) <= 1
            self._pages.bound(min(self._most_pages, left), pinned=alone)

    def bounded(
        self,
        new: Sequence[Row],
        grants: Sequence[tuple[Row, int]],
        decode: Sequence[int],
        live: Sequence[int],
    ) -> list[tuple[Row, int]]:
        """`grants`, but that rows stop short of their prompt's end where they would not fit.

        Rows were chosen as if all that prefill joined once the step is over. Those that join in it come
        before a block of others grows or is left, and maybe without the rest, which may take more: then the
        youngest wait, for a step that has its blocks as they are. Where nobody decodes, one that joins takes
        what its own caches did."""
        if self._account is None or len(self._live) + len(self._line) <= 1:
            return list(grants)
        ends = (row for row, tokens in grants if row.span_end(tokens) == len(row.known))
        ending = sorted(filter(self._early, ends), key=lambda row: row.arrival)
        held: list[Row] = []
        while ending and self._joined_now(new, ending, decode, live) > self._told:
            held.append(ending.pop())
        cut = [(row, row.remaining - 1 if row in held else tokens) for row, tokens in grants]
        return [(row, tokens) for row, tokens in cut if tokens]

    def _early(self, row: Row) -> bool:
        """It joins in the step in which its prompt ends."""
        return self._states.sizes.early or apart(row.request)

    def _joined_now(
        self, new: Sequence[Row], ending: Sequence[Row], decode: Sequence[int], live: Sequence[int]
    ) -> int:
        """Bytes of the coming step if the prompts of `ending` end in it."""
        trial, admitted = self._states.copy(), self._holdings(new)
        twice = trial.carry_out(admitted, decode, [name_of(row) for row in ending], {*live, *admitted})
        return trial.nbytes + twice

    def _holdings(self, admitted: Sequence[Row]) -> dict[int, Holding]:
        return {name_of(row): holding(self._states.sizes, row) for row in admitted}

    def launched(
        self, admitted: Sequence[Row], decode: Sequence[int], ending: Sequence[int], live: Collection[int]
    ) -> bool:
        """The plan is made. Whether it has to wait until the step before is computed: what that one still
        holds and what this one takes do not fit together.

        Args:
            admitted: rows that get states.
            decode: rows that feed a token.
            ending: rows whose prompt ends.
            live: rows whose states do not go with it.
        """
        if self._account is None or self.sizes is None:
            return False
        states, pages_before = self._states, self._account.pages
        self._account.pages = self._pages.used if self._pages is not None else 0
        pages = max(pages_before, self._account.pages)
        most = states.nbytes + self._told + pages  # as if nothing of the step before were kept
        before = states.parts() if most > self._account.room else None
        twice = states.carry_out(self._holdings(admitted), decode, ending, live)
        if before is None:
            return False
        after = states.parts()
        height = sum(max(before.get(key, 0), after.get(key, 0)) for key in before.keys() | after.keys())
        if height + twice + pages <= self._account.room:
            return False
        self.counts.settled += 1
        return True

    def shrink(self, size: int) -> int:
        """Have so many bytes of kept pages go, or what there is; says how many went."""
        if self._pages is None:
            return 0
        before = self._pages.used
        self._pages.bound(max(0, before - size), pinned=False)
        return before - self._pages.used

    def room_for(self, row: Row) -> int:
        """Tokens that a row's own caches are to have room for from the beginning; 0: as they grow."""
        if self.sizes is None or not self.sizes.shared:
            return 0
        return self._states.room_for(holding(self.sizes, row))
