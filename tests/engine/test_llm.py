"""The engine without HTTP: results in order, errors with their index, interrupts, threads, closing."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable

import pytest

from chairlift.engine.errors import (
    ContextLengthExceeded,
    EngineError,
    InvalidParameter,
    ModelUnavailable,
    StepFailed,
)
from chairlift.engine.events import FinishReason, TokenLogprob
from chairlift.engine.llm import LLM, PromptError, RequestOutput
from chairlift.engine.plan import LoadedModel, StepPlan
from chairlift.engine.request import SamplingParams
from tests.engine.driving import request, solo
from tests.fake_tokenizer import EOS, FakeTokenizer
from tests.fakes import FakeRunner, Fault, answering, fake_model, first_row

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def load(runner: FakeRunner | None = None, tokenizer: FakeTokenizer | None = None, *, seqs: int = 4) -> LLM:
    return LLM(max_num_seqs=seqs, _factory=fake_model(runner, tokenizer))


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("chairlift")}


class TestGenerate:
    def test_results_are_in_order_and_equal_solo_runs(self) -> None:
        prompts = [f"{'long ' * (index % 7)}prompt {index}" for index in range(40)]
        with load() as llm:
            outputs = llm.generate(prompts, GREEDY, progress=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = tuple(solo(request(prompt), 8))
            assert output == RequestOutput(
                tuple(prompt.encode()), tokens, bytes(tokens).decode(), FinishReason.LENGTH
            )

    def test_strings_and_token_ids_are_the_same(self) -> None:
        with load() as llm:
            (text,) = llm.generate("prompt", GREEDY, progress=False)
            ids = llm.generate([list(b"prompt"), tuple(b"other")], GREEDY, progress=False)
        assert text == ids[0] and ids[1].prompt_token_ids == tuple(b"other")

    def test_one_sampling_for_each(self) -> None:
        with load(FakeRunner(answering("abcdef"))) as llm:
            sampling = [SamplingParams(max_tokens=2), SamplingParams(stop=("d",)), SamplingParams(logprobs=0)]
            outputs = llm.generate(["one", "two", "three"], sampling, progress=False)
            with pytest.raises(InvalidParameter, match="2 prompts and 3 sampling_params"):
                llm.generate(["one", "two"], sampling, progress=False)
        assert [output.text for output in outputs] == ["ab", "abc", "abcdef"]
        assert [output.finish_reason for output in outputs] == ["length", "stop", "stop"]
        assert [output.stop for output in outputs] == [None, "d", EOS]
        assert outputs[0].logprobs is None
        assert outputs[2].logprobs == tuple(TokenLogprob(token, -0.5) for token in (*b"abcdef", EOS))

    def test_no_prompts_no_outputs(self) -> None:
        with load() as llm:
            assert llm.generate([], progress=False) == []

    def test_many_prompts_stay_within_the_rows(self) -> None:
        runner = FakeRunner()
        with load(runner, seqs=3) as llm:
            llm.generate(["x"] * 50, GREEDY, progress=False)
        assert max(len(plan.decode) for plan in runner.plans) == 3
        assert runner.violations == []

    def test_the_progress_bar_counts_prompts_and_tokens(self, capsys: pytest.CaptureFixture[str]) -> None:
        with load() as llm:
            llm.generate(["one", "two"], GREEDY)
            assert "2/2 16 tokens" in capsys.readouterr().err
            llm.generate(["one", "two"], GREEDY, progress=False)
            assert capsys.readouterr().err == ""

    def test_from_several_threads(self) -> None:
        found: dict[int, list[RequestOutput]] = {}
        with load() as llm:

            def work(index: int) -> None:
                found[index] = llm.generate([f"{index} a", f"{index} b"], GREEDY, progress=False)

            workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        for index in range(4):
            expected = [tuple(solo(request(f"{index} {letter}"), 8)) for letter in "ab"]
            assert [output.token_ids for output in found[index]] == expected

    async def test_inside_a_running_event_loop(self) -> None:
        with load() as llm:
            assert llm.generate("prompt", GREEDY, progress=False)[0].token_ids == tuple(solo(request(), 8))


class TestErrors:
    def test_a_prompt_that_does_not_fit_is_named_before_anything_is_started(self) -> None:
        runner = FakeRunner()
        with load(runner) as llm:
            llm.generate("x", GREEDY, progress=False)
            admitted = sum(len(plan.admit) for plan in runner.plans)
            with pytest.raises(PromptError, match="^Prompt 1: The prompt has 5000 tokens") as refused:
                llm.generate(["x", "y" * 5000], GREEDY, progress=False)
            assert refused.value.index == 1
            assert isinstance(refused.value.__cause__, ContextLengthExceeded)
            assert sum(len(plan.admit) for plan in runner.plans) == admitted

    @pytest.mark.parametrize("prompt", [5, ["x", "y"], [1.5], None, [True]])
    def test_a_prompt_of_the_wrong_kind(self, prompt: object) -> None:
        with load() as llm, pytest.raises(PromptError, match="Prompt 1: .*string or a list of token ids"):
            llm.generate(["x", prompt], GREEDY, progress=False)  # type: ignore[list-item]

    def test_an_empty_prompt(self) -> None:
        with load() as llm, pytest.raises(PromptError, match="Prompt 0: The prompt is empty"):
            llm.generate([[]], GREEDY, progress=False)

    def test_a_row_that_fails_names_its_prompt_and_cancels_the_others(self) -> None:
        def fault(plan: StepPlan) -> Fault | None:
            return Fault(fail=first_row) if len(plan.decode) == 3 else None

        runner = FakeRunner(fault=fault)
        with load(runner) as llm:
            sampling = [SamplingParams(max_tokens=count, temperature=0) for count in (1, 4000, 4000, 4000)]
            with pytest.raises(PromptError, match="Prompt 1: The fake failed this row.") as failed:
                llm.generate(["a", "b", "c", "d"], sampling, progress=False)
            assert isinstance(failed.value.__cause__, StepFailed)
            runner.fault = lambda plan: None
            assert llm.generate("prompt", GREEDY, progress=False)[0].token_ids == tuple(solo(request(), 8))
        assert runner.rows == {} and runner.violations == []

    def test_a_model_that_cannot_be_loaded(self) -> None:
        def factory() -> LoadedModel:
            raise ModelUnavailable("There is no such model.")

        with pytest.raises(ModelUnavailable, match="no such model"):
            LLM(_factory=factory)
        assert threads() == set()

    def test_after_closing(self) -> None:
        llm = load()
        llm.close()
        llm.close()
        with pytest.raises(EngineError, match="closed"):
            llm.generate("x", progress=False)


class TestInterrupt:
    def test_an_interrupt_cancels_the_prompts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As Ctrl-C does: the wait for the result is broken off by a KeyboardInterrupt."""
        runner = FakeRunner()
        with load(runner) as llm:
            reached = threading.Event()
            runner.draw = lambda row: reached.set() or 97  # type: ignore[func-returns-value]
            submit = asyncio.run_coroutine_threadsafe

            def interrupted(*arguments: object) -> object:
                future = submit(*arguments)  # type: ignore[arg-type]

                def result() -> None:
                    assert reached.wait(10)
                    raise KeyboardInterrupt

                monkeypatch.setattr(future, "result", result)
                return future

            with monkeypatch.context() as patch:
                patch.setattr("chairlift.engine.llm.asyncio.run_coroutine_threadsafe", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    llm.generate(["x", "y"], SamplingParams(max_tokens=4000), progress=False)
            assert llm.generate("x", GREEDY, progress=False)[0].text == "a" * 8
            finished = llm._background.engine.stats().finished
            assert finished == {FinishReason.ABORT: 2, FinishReason.LENGTH: 1}
        assert runner.rows == {}


class TestChat:
    def test_the_template_renders_each_conversation(self) -> None:
        tokenizer = FakeTokenizer()
        with load(FakeRunner(answering("Paris")), tokenizer) as llm:
            message = {"role": "user", "content": "capital?"}
            (single,) = llm.chat([message], progress=False)
            several = llm.chat(
                [[message], [message, {"role": "assistant", "content": "x"}]],
                GREEDY,
                chat_template_kwargs={"enable_thinking": False},
                progress=False,
            )
        assert single.text == "Paris" and [output.text for output in several] == ["Paris", "Paris"]
        assert single.prompt_token_ids == several[0].prompt_token_ids
        assert FakeTokenizer().decode(list(single.prompt_token_ids)) == (
            "<|im_start|>user\ncapital?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert tokenizer.template_arguments[1] == {"tools": None, "enable_thinking": False}

    def test_the_last_message_is_gone_on_with(self) -> None:
        said = [{"role": "user", "content": "capital?"}, {"role": "assistant", "content": "It is "}]
        with load(FakeRunner(answering("Paris"))) as llm:
            (output,) = llm.chat(said, continue_final_message=True, progress=False)
        assert output.text == "Paris"
        assert FakeTokenizer().decode(list(output.prompt_token_ids)).endswith("<|im_start|>assistant\nIt is ")

    def test_a_refusal_names_its_conversation(self) -> None:
        tokenizer = FakeTokenizer(refuse="Roles must alternate.")
        with (
            load(None, tokenizer) as llm,
            pytest.raises(PromptError, match="Prompt 0: Roles must alternate."),
        ):
            llm.chat([{"role": "user", "content": "x"}], progress=False)

    def test_a_mixture_is_refused(self) -> None:
        message = {"role": "user", "content": "x"}
        with load() as llm, pytest.raises(InvalidParameter, match="one conversation or a list"):
            llm.chat([message, [message]], progress=False)  # type: ignore[list-item]


class TestClosing:
    @pytest.mark.parametrize("how", [LLM.close, lambda llm: llm.__exit__(None, None, None)])
    def test_the_model_and_both_threads_are_gone(self, how: Callable[[LLM], None]) -> None:
        runner = FakeRunner()
        llm = load(runner)
        assert threads() == {"chairlift-loop", "chairlift-mlx"}
        how(llm)
        assert runner.closed and threads() == set()

    def test_dropping_it_closes_it(self) -> None:
        runner = FakeRunner()
        llm = load(runner)
        llm.generate("x", GREEDY, progress=False)
        del llm
        gc.collect()
        assert runner.closed and threads() == set()
