"""One object per request that is in the engine, and what may be asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from chairlift.engine.plan import NewRow, PromptPart, Sample
from chairlift.engine.prefix.row import RowPrefix
from chairlift.engine.prefix.vocabulary import Restore
from chairlift.engine.request import Request


class RowState(Enum):
    WAITING = "waiting"
    """Holds no model state: not yet admitted, or preempted."""
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class RequestTiming:
    """When things happened to a request, in seconds of the monotonic clock; None until they did."""

    queued: float
    admitted: float | None = None
    """Of the first admission; a preempted row keeps it."""
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None


@dataclass(slots=True, eq=False)
class Row:
    """A request on its way through the engine. Only the scheduler changes it (the engine its timing).

    Invariants: `prefilled <= len(known)`; `drawn <= launched <= limit`.
    """

    request: Request
    seed: int
    """0 .. 2**64-1."""
    limit: int
    """Most tokens of the answer: `max_tokens`, clamped to the room the prompt leaves in the context."""
    arrival: int
    """Order of arrival; unique."""
    timing: RequestTiming
    id: int | None = None
    """The runner's name for this row's state: a new one each time it is admitted, so that what is still in
    flight for a state that has gone is never taken for the present one. None while no state is held."""
    output: list[int] = field(default_factory=list)
    """Tokens that have reached the host."""
    known: tuple[int, ...] = ()
    """What is prefilled in this admission: the prompt, and after a preemption the output so far."""
    prefilled: int = 0
    """Known tokens launched in spans, from position 0."""
    looked: int = 0
    """Images whose encoding was launched in this admission, or that are behind what it began with."""
    launched: int = 0
    """Draws launched, those on the host included."""
    losses: int = 0
    """Times its state was lost since it last drew a token."""
    prefix: RowPrefix | None = None
    """What it has to do with the kept prefixes; None where it has nothing."""
    cached: int = 0
    """Tokens of the prompt that were taken over from a kept prefix when the row was first admitted."""
    kept: bool = False
    """What it holds at its end is planned to be saved."""
    leaving: bool = False
    """Its last draw is launched, and its state goes with a plan that is made."""
    overtaken: int = 0
    """Younger rows admitted before it while it waits."""
    scores: list[Sample] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as they are known; for a row that asks for them."""
    preempted: int = 0
    """Times that it gave its state up for want of memory."""
    finished: bool = False

    def score(self, parts: Sequence[PromptPart]) -> None:
        """Take in what came of its prompt; a row that starts again has it twice."""
        for part in parts:
            self.scores[part.start - 1 :] = part.samples

    @property
    def state(self) -> RowState:
        if self.finished:
            return RowState.FINISHED
        if self.id is None:
            return RowState.WAITING
        return RowState.PREFILLING if self.prefilled < len(self.known) else RowState.RUNNING

    @property
    def drawn(self) -> int:
        return len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens still to prefill; before admission those that it would take."""
        if self.id is None:
            tokens = len(self.request.prompt_token_ids) + len(self.output)
            return tokens - (self.prefix.available if self.prefix is not None else 0)
        return len(self.known) - self.prefilled

    def span_end(self, tokens: int) -> int:
        """Where its next span of at most so many tokens ends; for a row with a state."""
        end = min(self.prefilled + tokens, len(self.known))
        return end if self.prefix is None else self.prefix.span_end(self.prefilled, end)

    @property
    def unseen(self) -> int:
        """Images still to encode before its prefill; before admission those that it would have to."""
        if not self.images:
            return 0
        if self.id is None and self.prefix is not None:
            return self.images - self.prefix.images_within(self.prefix.available)
        return self.images - self.looked

    @property
    def images(self) -> int:
        """Of its prompt."""
        return len(self.request.media.digests) if self.request.media is not None else 0

    @property
    def held(self) -> int:
        """Tokens that its state holds once all that is launched has run; for a row that runs."""
        return len(self.request.prompt_token_ids) + self.launched - 1

    @property
    def decodable(self) -> bool:
        """Its last span is launched, and another draw would be part of the answer."""
        return self.state is RowState.RUNNING and self.launched < self.limit

    def admission(self, id: int, restore: Restore | None, room: int) -> NewRow:
        """What the runner has to know of it, to hold its state under this number."""
        media = self.request.media if self.images else None
        prompt = self.request.prompt_token_ids if media is not None else ()
        constraint, thinking = self.request.constraint, self.request.thinking
        follows = constraint is not None or thinking is not None
        known = self.known if self.request.sampling.reads_prompt or follows else ()
        return NewRow(
            id,
            self.request.sampling,
            self.seed,
            self.drawn,
            media,
            prompt,
            known,
            restore,
            constraint,
            thinking,
            room,
        )
