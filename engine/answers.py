"""What requests in the engine are told: text, times, and exactly one end. On the event loop."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from chairlift.engine.config import EngineObserver
from chairlift.engine.errors import EngineError, StepFailed
from chairlift.engine.events import Failed, Finished, FinishReason, TokenLogprob, Usage
from chairlift.engine.handle import Mailbox
from chairlift.engine.plan import Sample, StepPlan
from chairlift.engine.row import Row
from chairlift.engine.text import AnswerText

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Answer:
    """What is held of a request beside its row."""

    text: AnswerText
    mailbox: Mailbox
    observed: bool


@dataclass(slots=True)
class Answers:
    """Those that have not ended.

    Args:
        observer: told about first tokens, intervals and ends.
        finish: what else is due when a row ends. Whatever it raises, the end is told.
    """

    observer: EngineObserver | None
    finish: Callable[[Row], None]
    prompt_tokens: int = 0
    """Of all ended requests that are observed, as are the next two."""
    generation_tokens: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    _open: dict[Row, _Answer] = field(default_factory=dict)
    _untold: list[tuple[Row, Sample, float]] = field(default_factory=list)
    """Tokens that end nothing, in order."""

    @property
    def rows(self) -> list[Row]:
        return list(self._open)

    def begin(self, row: Row, text: AnswerText, *, observed: bool) -> Mailbox:
        """Where the row's events go."""
        answer = self._open[row] = _Answer(text, Mailbox(), observed)
        return answer.mailbox

    def take(self, row: Row, sample: Sample, now: float) -> None:
        """One token of one row, which counts when the next step is planned: if the answer may end with it,
        at once; else its text and event can wait for `tell`."""
        answer = self._open[row]
        if row.drawn >= row.limit or answer.text.may_end(sample.token):
            self._tell(row, sample, now)
        else:
            self._untold.append((row, sample, now))

    def planned(self, plan: StepPlan) -> None:
        """This comes next: tell now where it builds nothing, or waits for the step before or for loads."""
        if not (plan.prefill or plan.decode) or plan.settle or plan.load:
            self.tell()

    def tell(self) -> None:
        """Text and events of the tokens taken so far."""
        untold, self._untold = self._untold, []
        for row, sample, now in untold:
            try:
                if row in self._open:
                    self._tell(row, sample, now)
            except Exception:  # its end has been told all the same
                log.exception("The end of request %s was not clean", row.request.request_id)

    def _tell(self, row: Row, sample: Sample, now: float) -> None:
        """Text, event, and whether the answer ends. Where no text comes of it, it ends with an error."""
        try:
            self._take(row, sample, now)
        except Exception:
            log.exception("A token of request %s could not be handled", row.request.request_id)
            self.fail(row, EngineError("The answer's text could not be made."))

    def _take(self, row: Row, sample: Sample, now: float) -> None:
        answer = self._open[row]
        self._time(row, answer, now)
        last = row.drawn >= row.limit
        if row.drawn == 1:
            answer.mailbox.prompt = tuple(map(_logprob, row.scores))
        text = answer.text.add(sample.token, last=last)
        asked = row.request.sampling.logprobs is not None and sample.logprob is not None
        answer.mailbox.put(sample.token, text, _logprob(sample) if asked else None)
        stop = answer.text.stop
        if stop is not None or last:
            self.end(row, FinishReason.LENGTH if stop is None else FinishReason.STOP, stop)

    def _time(self, row: Row, answer: _Answer, now: float) -> None:
        timing, before = row.timing, row.timing.last_token
        timing.last_token = now
        if before is None:
            timing.first_token = now
        if answer.observed and self.observer is not None:
            if before is None:
                self._observe(self.observer.on_first_token, row.request, timing, row.cached)
            else:
                self._observe(self.observer.on_token_interval, now - before)

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """A step came back after so long."""
        if self.observer is not None and not plan.idle:
            prompt = sum(len(span.tokens) for span in plan.prefill)
            self._observe(self.observer.on_step, prompt, len(plan.decode), seconds)

    def end(self, row: Row, reason: FinishReason, stop: str | int | None = None) -> None:
        """The answer ends, unless it has."""
        self._close(row, reason, lambda usage: Finished(reason, usage, stop))

    def fail(self, row: Row, error: EngineError) -> None:
        """The answer ends with this, unless it has ended."""
        self._close(row, FinishReason.ERROR, lambda usage: Failed(error, usage))

    def recover(self, error: Exception, rows: Iterable[Row]) -> None:
        """Something that must not raise has raised: these rows end."""
        log.error("A step raised; its requests end", exc_info=error)
        for row in rows:
            try:
                self.fail(row, StepFailed("The model step of this request failed."))
            except Exception:  # its end has been told all the same
                log.exception("The end of request %s was not clean", row.request.request_id)

    def _close(self, row: Row, reason: FinishReason, event: Callable[[Usage], Finished | Failed]) -> None:
        for token in [token for token in self._untold if token[0] is row]:
            self._untold.remove(token)
            self._tell(*token)
        answer = self._open.pop(row, None)
        if answer is None:
            return
        usage = Usage(len(row.request.prompt_token_ids), row.drawn, row.cached)
        try:
            self.finish(row)
        finally:  # whatever goes wrong, nobody waits for an end that does not come
            answer.mailbox.end(event(usage))
        if not answer.observed:
            return
        self.prompt_tokens += usage.prompt_tokens
        self.generation_tokens += usage.completion_tokens
        self.finished[reason] += 1
        if self.observer is not None:
            self._observe(self.observer.on_finished, row.request, row.timing, usage, reason)

    def _observe(self, report: Callable[..., None], *arguments: object) -> None:
        try:
            report(*arguments)
        except Exception:
            log.exception("An observer raised")


def _logprob(sample: Sample) -> TokenLogprob:
    assert sample.logprob is not None
    return TokenLogprob(sample.token, sample.logprob, sample.top)
