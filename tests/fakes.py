"""A runner without a model: exact, deterministic, and told when to go wrong.

`FakeRunner` follows the `Runner` protocol, one step of look-ahead included, checks every plan against it, and
draws tokens by a pure function of the row's tokens so far.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from chairlift.engine.constraints import Compiler
from chairlift.engine.constraints.matcher import Matcher
from chairlift.engine.media import MediaProcessor
from chairlift.engine.memory.states import StateSizes
from chairlift.engine.memory.vocabulary import Device
from chairlift.engine.plan import (
    LoadedModel,
    ModelInfo,
    NewRow,
    PromptPart,
    RunnerStats,
    Sample,
    Span,
    StepPlan,
    StepResult,
)
from chairlift.engine.prefix.vocabulary import Page, PageData, PageSink, PrefixSpec, Restore, Save
from chairlift.engine.thinking import ThinkingCount
from tests.fake_tokenizer import EOS, FakeTokenizer
from tests.gate import Gate
from tests.vocabularies import allowed, trial

KV_BYTES_PER_TOKEN = 4


@dataclass
class FakeRow:
    """What the fake holds of a row."""

    new: NewRow
    tokens: list[int] = field(default_factory=list)
    """Prompt and everything drawn."""
    drawn: int = 0
    prefilled: bool = False
    matcher: Matcher | None = field(init=False)
    thinking: ThinkingCount | None = field(init=False)

    def __post_init__(self) -> None:
        constraint, budget = self.new.constraint, self.new.thinking
        self.matcher = constraint.compiled.matcher() if constraint is not None else None
        self.thinking = ThinkingCount(budget) if budget is not None else None
        for token in self.new.known[len(self.new.known) - self.new.drawn :]:
            self._advance(token)

    def following(self, token: int) -> int:
        """The token if the row's constraint and its bound on thinking allow it, else one that soon ends the
        answer."""
        if self.thinking is not None and self.thinking.forced is not None:
            token = self.thinking.forced
        if self.matcher is not None:
            may = allowed(self.matcher)
            if token not in may:
                token = next((token for token in (EOS, *b'"}]0') if token in may), min(may))
        self._advance(token)
        return token

    def _advance(self, token: int) -> None:
        if self.thinking is not None:
            self.thinking.advance(token)
        if self.matcher is not None:
            self.matcher.advance(token)
            assert self.matcher.fault is None


Draw = Callable[[FakeRow], int]


def letters(row: FakeRow) -> int:
    """A small letter or a space: a hash of the last tokens, and of the seed unless greedy."""
    return letter(row.tokens, *(() if row.new.sampling.greedy else (row.new.seed, row.drawn)))


def letter(tokens: Sequence[int], *more: int) -> int:
    known = [*tokens[-8:], len(tokens), *more]
    return b"abcdefghijklmnopqrstuvwxyz "[zlib.crc32(repr(known).encode()) % 27]


def answering(answer: str | Sequence[int]) -> Draw:
    """Every row answers these bytes or tokens, then the end-of-sequence token."""
    tokens = [*(answer.encode() if isinstance(answer, str) else answer), EOS]
    return lambda row: tokens[min(row.drawn, len(tokens) - 1)]


@dataclass(frozen=True)
class Fault:
    """What goes wrong in one step.

    Args:
        error: `Runner.step` raises it. The plan is not carried out, the result in flight is lost.
        fail: rows reported as failed. A set of row ids, or a function of the plan.
        lose: the same for lost rows.
        silent: rows of which the result says nothing, though it should.
    """

    error: BaseException | None = None
    fail: Collection[int] | Callable[[StepPlan], Collection[int]] = ()
    lose: Collection[int] | Callable[[StepPlan], Collection[int]] = ()
    silent: Collection[int] | Callable[[StepPlan], Collection[int]] = ()


def all_rows(plan: StepPlan) -> Collection[int]:
    return plan.rows


def first_row(plan: StepPlan) -> Collection[int]:
    return plan.rows[:1]


class FakeRunner:
    """Args: draw: the next token of a row. fault: asked before each plan that is not idle; see `Fault`."""

    def __init__(
        self, draw: Draw = letters, *, fault: Callable[[StepPlan], Fault | None] = lambda plan: None
    ) -> None:
        self.draw = draw
        self.fault = fault
        self.plans: list[StepPlan] = []
        """Every plan stepped, idle ones included."""
        self.threads: set[str] = set()
        """Names of the threads that called."""
        self.rows: dict[int, FakeRow] = {}
        self.released: list[int] = []
        self.violations: list[str] = []
        """Plans that broke the protocol. Tests assert that there are none."""
        self.wasted = 0
        """Draws that were not fetched yet when their row was released; a last one is wanted all the same."""
        self.most_tokens = 0
        """Of one step, decode and prefill together."""
        self.closed = False
        self.pages: dict[int, tuple[int, ...]] = {}
        """The tokens of every page and checkpoint, by id; a checkpoint's from the beginning."""
        self.sink: PageSink | None = None
        self._saved: tuple[Save, ...] = ()  # in the step in flight
        self._lent: set[int] = set()
        self._spoiled: set[int] = set()
        self._faults: list[Fault] = []
        self._in_flight: StepResult | None = None
        self._built: Callable[[], None] = lambda: None
        self._gate = Gate()

    # -- what tests do

    def fail_next(self, fault: Fault) -> None:
        """The next plan that is not idle goes wrong (one after the other if called again)."""
        self._faults.append(fault)

    def close_gate(self) -> None:
        """From now on `step` blocks at its start until it is let through."""
        self._gate.close()

    def open_gate(self) -> None:
        self._gate.open()

    async def at_gate(self) -> None:
        """Wait until the MLX thread stands at the closed gate."""
        assert await asyncio.to_thread(self._gate.wait), "no step came to the gate"

    async def let_through(self, steps: int = 1) -> None:
        """Let so many steps through a closed gate and wait until the next one stands at it."""
        for _ in range(steps):
            self._gate.let_one_through()
            await self.at_gate()

    # -- Runner

    def step(self, plan: StepPlan) -> StepResult | None:
        self._gate.go()
        self.threads.add(threading.current_thread().name)
        self.plans.append(plan)
        for id in plan.drop:
            self.pages.pop(id, None)
        for save in plan.keep:
            self._save(save)
        for load in plan.load:
            self._check(load.page.id not in self.pages, f"page {load.page.id} loaded twice")
            self._check(load.page.id not in plan.drop, f"page {load.page.id} dropped and loaded")
            self.pages[load.page.id] = tuple(array("I", bytes(load.data.data)))
        for id in plan.release:
            if self.rows.pop(id, None) is not None:
                self.released.append(id)
                self.wasted += self._in_flight is not None and id in self._in_flight.samples
        fault = self._next_fault(plan)
        if fault.error is not None:
            self._in_flight, self._saved = None, ()
            raise fault.error
        before, self._in_flight = self._in_flight, self._launch(plan, fault)
        if not plan.idle:
            self._built()
        if before is not None:
            self._offer(save for save in self._saved if save.row not in (*before.failed, *before.lost))
        self._saved = (*plan.keep, *plan.save)
        if plan.idle:
            self._offer(plan.keep)
        return before

    def when_built(self, call: Callable[[], None]) -> None:
        self._built = call

    def spill(self, sink: PageSink) -> None:
        self.sink = sink

    def _offer(self, saves: Iterable[Save]) -> None:
        if self.sink is None:
            return
        for id in self.sink.returned():
            self._check(id in self._lent, f"page {id} came back twice")
            self._lent.discard(id)
        kept = (page for save in saves for page in _pages(save) if page.id in self.pages)
        for page in (page for page in kept if page.digest):
            data = memoryview(array("I", self.pages[page.id]).tobytes())
            if self.sink.wants(page, data.nbytes):
                self._lent.add(page.id)
                self.sink.offer(page, data.nbytes, partial(PageData, data))

    def stats(self) -> RunnerStats:
        tokens = sum(len(row.tokens) for row in self.rows.values()) * KV_BYTES_PER_TOKEN
        return RunnerStats(rows=len(self.rows), kv_bytes=tokens, kv_tokens_bytes=tokens)

    def close(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.rows.clear()
        self.closed = True

    # -- how

    def _next_fault(self, plan: StepPlan) -> Fault:
        if plan.idle:
            return Fault()
        return self._faults.pop(0) if self._faults else self.fault(plan) or Fault()

    def _launch(self, plan: StepPlan, fault: Fault) -> StepResult | None:
        for new in plan.admit:
            self._check(
                new.row not in self.rows and new.row not in self.released, f"{new.row} admitted twice"
            )
            tokens = self._restored(new.restore) if new.restore is not None else []
            if tokens is not None:
                self.rows[new.row] = FakeRow(new, tokens, drawn=new.drawn)
        if plan.idle:
            return None
        self._check(len(set(plan.rows)) == len(plan.rows), "a row stands twice in a plan")
        self.most_tokens = max(self.most_tokens, len(plan.decode) + sum(len(s.tokens) for s in plan.prefill))
        samples: dict[int, Sample] = {}
        scored: dict[int, tuple[PromptPart, ...]] = {}
        for span in plan.prefill:
            if (row := self.rows.get(span.row)) is None:
                self._check(self._knows(span.row), f"{span.row} prefilled before it was admitted")
                continue
            self._check(
                span.start == len(row.tokens) and not row.prefilled and bool(span.tokens), f"gap: {span}"
            )
            row.tokens += span.tokens
            if row.new.sampling.prompt_logprobs is not None:
                self._check(row.new.restore is None, "a prompt that is to be scored began with a kept prefix")
                scored[span.row] = (self._score(row, span),)
            row.prefilled = span.last
            if span.last:
                samples[span.row] = self._sample(row)
        for id in plan.decode:
            if (row := self.rows.get(id)) is None:
                self._check(self._knows(id), f"{id} decoded before it was admitted")
                continue
            self._check(row.prefilled, f"{id} decoded before its prefill ended")
            samples[id] = self._sample(row)
        for save in plan.save:
            self._save(save)
        return replace(self._spoil(plan, samples, fault), scored=scored)

    def _score(self, row: FakeRow, span: Span) -> PromptPart:
        """As a runner does: of the tokens behind those of the span; the last token is fed later."""
        known = row.new.known
        self._check(len(known) > 0, f"{span.row} is to be scored and does not know its prompt")
        prompt = known[: len(known) - row.new.drawn]
        targets = prompt[span.start + 1 : len(row.tokens) + (not span.last)]
        count = row.new.sampling.prompt_logprobs or 0
        told = [
            Sample(token, -1.0 - at, tuple(((token + rank) % 256, -0.5 - at - rank) for rank in range(count)))
            for at, token in enumerate(targets, span.start + 1)
        ]
        return PromptPart(span.start + 1, tuple(told))

    def _spoil(self, plan: StepPlan, samples: dict[int, Sample], fault: Fault) -> StepResult:
        failed, lost, silent = (
            [id for id in (which(plan) if callable(which) else which) if id in plan.rows]
            for which in (fault.fail, fault.lose, fault.silent)
        )
        lost += [id for id in plan.rows if id not in self.rows and id not in (*failed, *lost)]
        for id in (*failed, *lost):
            self.rows.pop(id, None)
        for save in plan.save:
            if save.row in (*failed, *lost):
                for page in _pages(save):
                    self.pages.pop(page.id, None)
                    self._spoiled.add(page.id)
        spoiled = frozenset(self._spoiled)
        self._spoiled.clear()
        for id in (*failed, *lost, *silent):
            samples.pop(id, None)
        return StepResult(
            plan.number,
            samples,
            failed=dict.fromkeys(failed, "The fake failed this row."),
            lost=dict.fromkeys(lost, "The fake lost this row."),
            spoiled=spoiled,
        )

    def _save(self, save: Save) -> None:
        row = self.rows.get(save.row)
        if row is None:
            self._check(self._knows(save.row), f"{save.row} saved before it was admitted")
            self._spoiled.update(page.id for page in _pages(save))
            return
        held = row.tokens[:-1] if row.prefilled else row.tokens
        for page in save.pages:
            self._check(page.id not in self.pages, f"page {page.id} saved twice")
            self._check(page.start + page.tokens <= len(held), f"page {page} reaches beyond the row")
            self.pages[page.id] = tuple(held[page.start : page.start + page.tokens])
        if save.checkpoint is not None:
            self._check(save.checkpoint.start == len(held), f"checkpoint {save.checkpoint} at {len(held)}")
            self.pages[save.checkpoint.id] = tuple(held)

    def _restored(self, restore: Restore) -> list[int] | None:
        """The tokens taken over; None where a page is not there."""
        missing = {page.id for page in _pages(restore)} - self.pages.keys()
        if missing:
            self._spoiled |= missing
            return None
        tokens: list[int] = []
        for page in restore.pages:
            self._check(page.start == len(tokens), f"page {page} does not fit")
            tokens += self.pages[page.id]
        self._check(len(tokens) >= restore.tokens > 0, f"too few pages: {restore}")
        tokens = tokens[: restore.tokens]
        if restore.checkpoint is not None:
            right = self.pages[restore.checkpoint.id] == tuple(tokens)
            self._check(right, f"{restore.checkpoint} of another sequence")
        return tokens

    def _sample(self, row: FakeRow) -> Sample:
        token = row.following(self.draw(row))
        row.tokens.append(token)
        row.drawn += 1
        count = row.new.sampling.logprobs
        if count is None:
            return Sample(token)
        return Sample(token, -0.5, tuple(((token + rank) % 256, -0.5 - rank) for rank in range(count)))

    def _knows(self, id: int) -> bool:
        """The row was admitted once (and went in a fault the scheduler has not yet seen)."""
        return any(new.row == id for plan in self.plans for new in plan.admit)

    def _check(self, right: bool, message: str) -> None:
        if not right:
            self.violations.append(message)


def _pages(part: Save | Restore) -> list[Page]:
    return [page for page in (*part.pages, part.checkpoint) if page is not None]


def fake_model(
    runner: FakeRunner | None = None,
    tokenizer: FakeTokenizer | None = None,
    *,
    name: str = "fake",
    context_length: int = 4096,
    processor: MediaProcessor | None = None,
    prefix: PrefixSpec | None = None,
    states: StateSizes | None = None,
    device: Device | None = None,
    weight_bytes: int = 0,
) -> Callable[[], LoadedModel]:
    """A factory as `Engine` takes it."""
    tokenizer = tokenizer or FakeTokenizer()
    loaded = LoadedModel(
        ModelInfo(
            name=name,
            context_length=context_length,
            created=1_700_000_000,
            architecture="fake",
            batching="flat",
            device="cpu",
            dtype="float32",
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            vision=processor is not None,
            weight_bytes=weight_bytes,
        ),
        tokenizer,
        runner or FakeRunner(),
        processor,
        prefix=prefix,
        constraints=Compiler(tokenizer.grammar_vocabulary, trial()),
        identity=lambda: f"{0:032x}",
        states=states,
        device=device,
    )
    return lambda: loaded
