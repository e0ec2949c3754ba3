"""The engine without HTTP, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from chairlift.engine.engine import Engine, EngineConfig
from chairlift.engine.errors import EngineError, InvalidParameter
from chairlift.engine.events import Failed, FinishReason, TextDelta, TokenLogprob
from chairlift.engine.plan import LoadedModel, ModelInfo, Tokenizer
from chairlift.engine.request import Request, SamplingParams

T = TypeVar("T")
Message = Mapping[str, object]

NO_BOUND = 1_000_000
"""Requests that may wait: `generate` itself bounds how many it has in the engine."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One answer."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Every token drawn, an end-of-sequence or stop token included where the answer ended on one."""
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of `token_ids`; None unless `SamplingParams.logprobs` asked for them."""
    stop: str | int | None = None
    """The stop string or token that ended the answer."""


class PromptError(EngineError):
    """One of the prompts could not be answered: `index` says which, `__cause__` why."""

    def __init__(self, index: int, cause: EngineError) -> None:
        super().__init__(f"Prompt {index}: {cause.message}")
        self.index = index


class LLM:
    """A model that answers prompts, as many at once as it can batch.

        with LLM() as llm:
            for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
                print(output.text)

    Works in scripts and in notebooks (its event loop has a thread of its own). Methods may be called from
    several threads at once; their prompts share the batch. Interrupting a call cancels its prompts.

    Args:
        model: a folder, a GGUF file or a hub name; None is the embedded model.
        dtype: "float32", "float16" or "bfloat16" for unquantized weights; None chooses by device.
        max_model_len: tokens of prompt and answer together, at most the model's own context.
        max_num_seqs: prompts answered at once.
        max_num_batched_tokens: token budget of a step; None suits the device.
        kv_cache_dtype: of keys and values: "auto" (the model's own), "int8" or "int4" (docs/kv-cache.md).

    Raises:
        ModelUnavailable: no such model, or it cannot be loaded, or not with such keys and values.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        kv_cache_dtype: str = "auto",
        _factory: Callable[[], LoadedModel] | None = None,
    ) -> None:
        factory = _factory or _model_factory(model, dtype, max_model_len, kv_cache_dtype)
        config = EngineConfig(max_num_seqs, max_num_batched_tokens, max_waiting=NO_BOUND)
        self._at_once = 2 * max_num_seqs
        self._numbers = itertools.count()
        self._background = _Background(factory, config)
        self._close = weakref.finalize(self, self._background.close)
        try:
            self._background.run(self._background.engine.start())
        except BaseException:
            self._close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        return self._background.engine.tokenizer

    @property
    def info(self) -> ModelInfo:
        return self._background.engine.info

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer each prompt; outputs are in the order of the prompts.

        Args:
            prompts: one string, or a list of strings or of lists of token ids.
            sampling_params: for all prompts, or a list with one for each.
            progress: show a progress bar on stderr.

        Raises:
            PromptError: the first prompt that cannot be answered; the others are cancelled. What is wrong
                with a prompt itself is found before any is started.
            InvalidParameter: prompts and sampling_params do not match.
        """
        listed: Sequence[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        return self._answer([partial(self._encode, prompt) for prompt in listed], sampling_params, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, rendered by the model's own chat template.

        Args:
            continue_final_message: the last message is gone on with; no new one begins.

        Raises:
            As `generate`; a template's refusal is a `PromptError` with the template's message.
        """
        render = partial(
            self._render,
            tools=None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            arguments=dict(chat_template_kwargs or {}),
        )
        conversations = _conversations(messages)
        return self._answer([partial(render, each) for each in conversations], sampling_params, progress)

    def close(self) -> None:
        """Cancel what runs and give the model's memory back. Idempotent."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- prompts

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, list | tuple) and all(type(token) is int for token in prompt):
            return prompt
        raise InvalidParameter("prompts", "A prompt must be a string or a list of token ids.")

    def _render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, object]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        arguments: dict[str, object],
    ) -> Sequence[int]:
        return self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=tools,
            documents=(),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **arguments,
        )

    # -- answers

    def _answer(
        self,
        encoders: Sequence[Callable[[], Sequence[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
    ) -> list[RequestOutput]:
        if not self._close.alive:
            raise EngineError("The model is closed.")
        sampling = _one_each(sampling_params, len(encoders))
        requests = []
        for index, (encode, params) in enumerate(zip(encoders, sampling, strict=True)):
            try:
                request = Request(f"prompt-{next(self._numbers)}", tuple(encode()), params)
                self._background.engine.check(request)
            except EngineError as error:
                raise PromptError(index, error) from error
            requests.append(request)
        if not requests:
            return []
        with _progress(len(requests), shown=progress) as advance:
            work = _answer_all(self._background.engine, requests, self._at_once, advance)
            return self._background.run(work)


class _Background:
    """An engine and the event loop it runs on, in a thread of its own."""

    def __init__(self, factory: Callable[[], LoadedModel], config: EngineConfig) -> None:
        self.engine = Engine(factory, config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="chairlift-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it on the loop and wait; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        # The collector may call this on any thread, the loop's own included.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def _stop(self) -> None:
        try:
            await self.engine.stop()
        finally:
            self._loop.stop()

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


async def _answer_all(
    engine: Engine, requests: Sequence[Request], at_once: int, advance: Callable[[int], None]
) -> list[RequestOutput]:
    outputs: dict[int, RequestOutput] = {}
    todo = iter(enumerate(requests))

    async def work() -> None:
        for index, request in todo:
            try:
                outputs[index] = await _answer_one(engine, request)
            except EngineError as error:
                raise PromptError(index, error) from error
            advance(len(outputs[index].token_ids))

    failed: list[PromptError] = []
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(requests))):
                group.create_task(work())
    except* PromptError as errors:
        failed += [error for error in errors.exceptions if isinstance(error, PromptError)]
    if failed:
        first = min(failed, key=lambda error: error.index)
        raise first from first.__cause__
    return [outputs[index] for index in range(len(requests))]


async def _answer_one(engine: Engine, request: Request) -> RequestOutput:
    tokens: list[int] = []
    texts: list[str] = []
    logprobs: list[TokenLogprob] = []
    async with engine.submit(request) as handle:
        async for event in handle:
            if isinstance(event, TextDelta):
                tokens += event.token_ids
                texts.append(event.text)
                logprobs += event.logprobs
            elif isinstance(event, Failed):
                raise event.error
            else:
                return RequestOutput(
                    request.prompt_token_ids,
                    tuple(tokens),
                    "".join(texts),
                    event.reason,
                    tuple(logprobs) if request.sampling.logprobs is not None else None,
                    event.stop,
                )
    raise EngineError("The answer ended without a reason.")


def _model_factory(
    model: str | Path | None, dtype: str | None, length: int | None, kv_cache_dtype: str
) -> Callable[[], LoadedModel]:
    # Imported here so that the engine, whatever its runner, needs mlx only where a model is loaded.
    from chairlift.engine.models.loader import load_model
    from chairlift.engine.models.resolve import resolve_model

    source = resolve_model(None if model is None else str(model), dtype=dtype)
    return partial(
        load_model,
        source.folder,
        source.served_name,
        dtype=dtype,
        max_model_len=length,
        kv_cache_dtype=kv_cache_dtype,
    )


def _one_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise InvalidParameter(
            "sampling_params", f"There are {count} prompts and {len(sampling)} sampling_params."
        )
    return sampling


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    conversations: list[list[Message]] = []
    single: list[Message] = []
    for item in messages:
        if isinstance(item, Mapping):
            single.append(item)
        else:
            conversations.append(list(item))
    if single and conversations:
        raise InvalidParameter("messages", "messages must be one conversation or a list of conversations.")
    return [single] if single else conversations


@contextmanager
def _progress(count: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar over prompts; what it yields is called with the tokens of each answer, on any thread."""
    columns = (
        TextColumn("Prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("prompts", total=count, tokens=0)

        def advance(tokens: int) -> None:
            bar.update(task, advance=1, tokens=bar.tasks[0].fields["tokens"] + tokens)

        yield advance
