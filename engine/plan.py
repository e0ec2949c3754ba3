"""The words between the scheduler, which decides, and the runner, which computes.

All plain Python values: a plan or a result may cross threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from chairlift.engine.constraints import Compiler, Constraint
from chairlift.engine.media import MediaProcessor, PreparedMedia
from chairlift.engine.memory.states import StateSizes
from chairlift.engine.memory.vocabulary import Device
from chairlift.engine.prefix.vocabulary import Load, PageSink, PrefixSpec, Restore, Save
from chairlift.engine.request import SamplingParams
from chairlift.engine.thinking import ThinkingBudget


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row that gets model state in this step (first admission, or resumption after preemption)."""

    row: int
    sampling: SamplingParams
    seed: int
    """0 .. 2**64-1. The client's seed, or one drawn for the request: every row is seeded."""
    drawn: int = 0
    """Tokens this row has drawn before (above 0 after preemption); the counter of its random keys."""
    media: PreparedMedia | None = None
    """Images of the prompt; their tokens are among the prompt's."""
    prompt: tuple[int, ...] = ()
    """The prompt, where it has images: they are encoded before all of it has come in spans."""
    known: tuple[int, ...] = ()
    """Prompt and tokens drawn before, where sampling counts or scores them or a constraint follows them."""
    restore: Restore | None = None
    """The row's first span starts behind these tokens."""
    constraint: Constraint | None = None
    """What its answer must follow, from the first token drawn on."""
    thinking: ThinkingBudget | None = None
    room: int = 0
    """Tokens that its own caches are to have room for from the beginning; 0: they grow as they are filled."""


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk of a row's known tokens to prefill: positions [start, start + len(tokens))."""

    row: int
    start: int
    tokens: tuple[int, ...]
    last: bool
    """The last known token is in this chunk: the row draws its next token in this step, and from the next
    plan on it may stand in `decode`."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Order of effects: drop, keep, release, load, admit (and restore), one forward over `prefill`
    and `decode`, save."""

    number: int
    release: tuple[int, ...] = ()
    """Rows whose state is dropped first. Unknown ids are ignored."""
    admit: tuple[NewRow, ...] = ()
    prefill: tuple[Span, ...] = ()
    decode: tuple[int, ...] = ()
    """Rows that feed their pending token (drawn in the step before, maybe not yet seen by the host) and
    draw one more."""
    encode: tuple[int, ...] = ()
    """Rows that encode one more of their images, a piece of work of its own beside the others' tokens. A span
    of a row whose images are not all encoded encodes the rest first."""
    save: tuple[Save, ...] = ()
    """Of rows in `prefill`; what they hold after this step."""
    drop: tuple[int, ...] = ()
    """Pages, by id, that are kept no longer."""
    keep: tuple[Save, ...] = ()
    """Of rows that end; what they hold before this step."""
    load: tuple[Load, ...] = ()
    """Pages and checkpoints that rows may be restored from, from this plan on."""
    tidy: bool = False
    """Give unused memory back to the system after that."""
    settle: bool = False
    """Wait until the step before is computed, so that what it held is free before this one takes any."""

    @property
    def idle(self) -> bool:
        """Nothing to compute (it may still release rows)."""
        return not (self.prefill or self.decode or self.encode)

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(span.row for span in self.prefill) + self.decode + self.encode


@dataclass(frozen=True, slots=True)
class Sample:
    """One drawn token, on the host."""

    token: int
    logprob: float | None = None
    """Of the drawn token, under the unfiltered distribution at temperature 1; None unless asked for."""
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Log probabilities of a prompt's tokens from position `start` on, as if they had been drawn."""

    start: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of one plan that was not idle."""

    number: int
    samples: Mapping[int, Sample] = field(default_factory=dict)
    """By row id: every decode row, and every prefill row whose span was its last."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Rows at fault, with one line for the client. Their state is already gone."""
    lost: Mapping[int, str] = field(default_factory=dict)
    """Rows whose state went down with a step that was not their fault; their tokens are kept by the
    scheduler, which starts them again (`NewRow` with `drawn`) or fails them."""
    encoded: frozenset[int] = frozenset()
    """Rows of the plan's `encode` all of whose images are encoded by now."""
    spoiled: frozenset[int] = frozenset()
    """Pages, by id, that could not be saved, in this step or before. A row that was to be restored from pages
    which are not there is lost, and they are among these."""
    scored: Mapping[int, tuple[PromptPart, ...]] = field(default_factory=dict)
    """Parts of prompts that were prefilled, of rows that ask for their log probabilities."""


@dataclass(frozen=True, slots=True)
class RunnerStats:
    """Memory as the runner sees it, in bytes, and what it counts."""

    rows: int = 0
    kv_bytes: int = 0
    """Allocated for all rows' states, padding included."""
    kv_tokens_bytes: int = 0
    """What the rows' tokens need of it: kv_bytes less padding."""
    prefix_bytes: int = 0
    """Of the pages kept for later rows."""
    recent_prefix_bytes: int = 0
    """Most of these since the last reading."""
    active_bytes: int = 0
    cache_bytes: int = 0
    peak_bytes: int = 0
    recent_peak_bytes: int = 0
    """Most that was in use since the last reading."""
    buffers: int = 0
    """Arrays of weights, rows and pages. Each is a buffer of the device's, whatever its size."""
    buffers_limit: int = 0
    """Most buffers that the device lets a process have; 0: it has no such bound."""
    step_compilations: int = 0
    """How often a decode step was compiled so far."""
    compiled_steps: int = 0
    """Decode steps that were computed as compiled so far."""


class Runner(Protocol):
    """Computes plans. Every method is called on the one MLX thread, and blocks."""

    def step(self, plan: StepPlan) -> StepResult | None:
        """Launch `plan`; return the result of the plan launched before it, or None if none was in flight.

        One step of look-ahead: the host handles step n while the device computes step n + 1. An idle plan
        is not put in flight, so stepping an idle plan fetches the last result. Never raises: a fault
        comes back as `failed` or `lost` in the result of its own plan.
        """
        ...

    def when_built(self, call: Callable[[], None]) -> None:
        """From now on, call this in each step that computes something, once it is built and about to be
        handed to the device: the thread needs no Python for that."""
        ...

    def spill(self, sink: PageSink) -> None:
        """From now on, offer every page and checkpoint that is kept to `sink`, once it is computed."""
        ...

    def stats(self) -> RunnerStats: ...

    def close(self) -> None:
        """Drop all rows, the model, and give memory back to the system."""
        ...


class Tokenizer(Protocol):
    """What the engine and the surfaces need of a tokenizer. Safe to call from any thread."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text of the tokens; bytes that are no whole character give U+FFFD."""
        ...

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """Each token as the vocabulary writes it."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Tokens that `skip_special_tokens` leaves out, by their text."""
        ...

    def token_id(self, text: str) -> int | None:
        """The token that is this text, special or not, where there is one."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def chat_templates(self) -> tuple[str, ...]:
        """Texts of the templates; empty where there are none or they are no text."""
        ...

    def template_mentions(self, variable: str) -> bool:
        """Whether the chat template may read this variable."""
        ...

    @property
    def tool_parser(self) -> str | None:
        """What mlx-lm calls the format of this model's tool calls, or else that of its template."""
        ...

    def apply_chat_template(
        self,
        messages: list[dict[str, object]],
        *,
        tools: list[dict[str, object]] | None = None,
        documents: Sequence[dict[str, object]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> list[int]:
        """Token ids of the rendered conversation, special tokens as the template writes them.

        Args:
            continue_final_message: the prompt ends with the last message's text.

        Raises:
            InvalidParameter: the template refused the conversation, in its own words, or has no place for a
                part of it.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served."""

    name: str
    """As clients spell it in `model`."""
    context_length: int
    """Most tokens of prompt and answer together."""
    created: int
    """Unix seconds."""
    architecture: str = ""
    """`model_type` of the configuration."""
    batching: str = ""
    """How the family shares a batch: flat, hybrid, dense or solo (docs/models.md)."""
    device: str = ""
    dtype: str = ""
    parameters: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    kv_dtype: str = ""
    """Type of the keys and values: that of the numbers, or int8 or int4."""
    step_tokens: int = 512
    """Token budget of a step that suits the device, where the operator names none."""
    vision: bool = False
    """Takes images."""
    scores_prompts: bool = True
    """Log probabilities of prompts can be had: they come in chunks."""
    memory_bytes: int = 0
    """Of the device, as much as may be used; 0: not known."""
    vocab_size: int = 0
    """Rows of the embedding; 0: not known."""
    activation_bytes: int = 0
    """What a step of `step_tokens` prompt tokens takes beside weights and rows, as measured."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to step: what the engine's factory returns, on the MLX thread."""

    info: ModelInfo
    tokenizer: Tokenizer
    runner: Runner
    processor: MediaProcessor | None = None
    """None for a model that takes text only."""
    prefix: PrefixSpec | None = None
    """What its prefixes are kept as; None where they cannot be."""
    constraints: Compiler | None = None
    """Compiles what answers must follow; None where they cannot be constrained."""
    identity: Callable[[], str] | None = None
    """Names everything that makes keys and values what they are, across processes; may be called on any
    thread. None where that is not known, and nothing can be kept on a disk."""
    states: StateSizes | None = None
    """What its rows' states take; None where that is not known, and they are not bounded."""
    device: Device | None = None
    """Whose memory all this takes; None likewise."""
