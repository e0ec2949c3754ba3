"""Images in chains of kept prefixes: named by all of their content, and taken over whole where need be."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from chairlift.engine.media import PreparedMedia
from chairlift.engine.plan import StepPlan, StepResult
from chairlift.engine.prefix.chain import Chain, digest, root_digest
from chairlift.engine.prefix.images import NamedPrompt, name_images
from chairlift.engine.prefix.index import PrefixIndex
from chairlift.engine.prefix.prefixes import Prefixes
from chairlift.engine.prefix.vocabulary import PrefixSpec
from chairlift.engine.request import Request, SamplingParams
from chairlift.engine.row import Row
from chairlift.engine.scheduler import Scheduler
from tests.engine.test_scheduler import result_of, spans

IMAGE = 99
PLAIN = PrefixSpec(4, 1, image_tokens=(IMAGE,))
CHECKPOINTED = PrefixSpec(4, 1, checkpoint_bytes=5, checkpoint_tokens=64, image_tokens=(IMAGE,))
WHOLE = replace(CHECKPOINTED, whole_images=True)
PROMPT = (1, 2, 3, IMAGE, IMAGE, 4, IMAGE, 5)


def media_of(*digests: str, tokens: tuple[int, ...] = (2, 1), **inputs: np.ndarray) -> PreparedMedia:
    return PreparedMedia(inputs, digests, tokens)


def named(media: PreparedMedia, prompt: tuple[int, ...] = PROMPT) -> NamedPrompt:
    found = name_images(prompt, media, (IMAGE,))
    assert found is not None
    return found


# Names


def test_only_tokens_of_images_are_named() -> None:
    found = named(media_of("a", "b"))
    assert [at for at, (new, old) in enumerate(zip(found.tokens, PROMPT, strict=True)) if new != old] == [
        *(3, 4, 6)
    ]
    assert found.tokens[3] == found.tokens[4] != found.tokens[6]
    assert min(found.tokens[at] for at in (3, 4, 6)) >= 2**32
    assert found.ends == (5, 7)
    assert [found.images_within(tokens) for tokens in (0, 4, 5, 6, 7, 99)] == [0, 0, 1, 1, 2, 2]
    assert (found.seen_to, NamedPrompt((1, 2)).seen_to) == (7, 0)


def test_a_name_takes_in_all_of_the_content_and_the_sizes() -> None:
    """vllm-mlx #197: pictures whose first thousand characters are the same; #718: the other one's answer."""
    same = "f" * 1000
    grids = np.array([[1, 2, 4], [1, 2, 2]])
    pixels = np.zeros((2, 40))
    base = named(media_of(same + "1", "b", image_grid_thw=grids, pixel_values=pixels))
    for other in (
        media_of(same + "2", "b", image_grid_thw=grids, pixel_values=pixels),
        media_of(same + "1", "b", image_grid_thw=grids[:, ::-1], pixel_values=pixels),
        media_of(same + "1", "b", image_grid_thw=grids.astype(np.int32), pixel_values=pixels),
    ):
        assert named(other).tokens[3] != base.tokens[3]
    assert named(media_of(same + "1", "c", image_grid_thw=grids)).tokens[3] == base.tokens[3]
    assert (
        named(media_of("b", same + "1", tokens=(1, 2)), (IMAGE, 7, IMAGE, IMAGE)).tokens[2]
        != (base.tokens[3])
    )


@pytest.mark.parametrize(
    ("media", "prompt"),
    [
        (media_of("a", "b"), (1, IMAGE, 2)),
        (media_of("a", tokens=(0,)), (1, IMAGE)),
        (media_of("a"), PROMPT),
        (media_of("a", "b", tokens=()), PROMPT),
        (media_of("a", tokens=()), (1, 2)),
    ],
)
def test_images_that_cannot_be_told_apart_are_not_named(
    media: PreparedMedia, prompt: tuple[int, ...]
) -> None:
    assert name_images(prompt, media, (IMAGE,)) is None


def test_all_tokens_are_the_only_image_s_and_no_model_without_images_names_any() -> None:
    assert named(media_of("a", tokens=()), (1, IMAGE, IMAGE)).ends == (3,)
    assert name_images(PROMPT, media_of("a", "b"), ()) is None


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6),
    st.lists(st.integers(0, 2**300), min_size=1, max_size=6),
)
def test_digests_differ_where_tokens_or_names_do(tokens: list[int], names: list[int]) -> None:
    root = root_digest("")
    assert (digest(root, tokens) == digest(root, names)) == (tokens == names)
    mixed = [*tokens, 2**32 + tokens[0]]
    assert digest(root, mixed) == digest(root, tuple(mixed)) != digest(root, [*tokens, tokens[0]])


def test_chains_part_where_another_image_begins() -> None:
    text = tuple(range(10))
    prompt = (*text, *[IMAGE] * 6, *text)
    one, two = (
        Chain(root_digest(""), 4, named(media_of(name, tokens=(6,)), prompt).tokens) for name in ("a", "b")
    )
    assert one.shared_blocks(two) == 2
    assert one.shared_blocks(Chain(root_digest(""), 4, prompt)) == 2
    assert one.shared_blocks(Chain(root_digest(""), 4, one.tokens)) == 6


# Rows


class Seats:
    """A scheduler whose runner does as it is told."""

    def __init__(self, spec: PrefixSpec, budget: int = 512) -> None:
        self.scheduler = Scheduler(
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_waiting=9,
            context_length=2000,
            clock=lambda: 0.0,
            prefixes=Prefixes(PrefixIndex(spec, 100_000), lambda: 0.0),
        )
        self.plans: list[StepPlan] = []

    def add(self, *parts: int | str, limit: int = 2) -> Row:
        """Args: parts: so many tokens of text, or an image of three tokens by its digest."""
        prompt: list[int] = []
        for part in parts:
            prompt += [IMAGE] * 3 if isinstance(part, str) else [len(prompt) % 90] * part
        images = tuple(part for part in parts if isinstance(part, str))
        media = PreparedMedia({}, images, (3,) * len(images)) if images else None
        sampling = SamplingParams(max_tokens=limit)
        return self.scheduler.add(Request("r", tuple(prompt), sampling, media=media), 0)

    def run(self) -> None:
        while self.scheduler.busy:
            plan = self.scheduler.schedule()
            self.plans.append(plan)
            result = result_of(plan)
            committed = self.scheduler.commit(StepResult(plan.number, result.samples))
            for row, _ in committed.drawn:
                if row.drawn >= row.limit:
                    self.scheduler.finish(row)

    def asked(self, *parts: int | str) -> tuple[int, int, int]:
        """(tokens taken over, steps that encoded an image, images told of) of one more row."""
        self.plans.clear()
        row = self.add(*parts)
        self.run()
        (new,) = [new for plan in self.plans for new in plan.admit]
        told = len(new.media.digests) if new.media is not None else 0
        return row.cached, sum(len(plan.encode) for plan in self.plans), told


def test_images_that_are_taken_over_are_not_encoded_and_still_told_of() -> None:
    seats = Seats(PLAIN)
    assert seats.asked(30, "a", 20) == (0, 1, 1)
    assert seats.asked(30, "a", 20) == (52, 0, 1)
    assert seats.asked(30, "b", 20) == (30, 1, 1)
    assert seats.asked(30, "a", 20, "c", 5) == (53, 1, 2)
    assert seats.asked(30, "a", 20, "c", "a", 5)[1:] == (1, 3)
    assert seats.asked(30, "b", 20, "c", 5) == (53, 1, 2)
    assert seats.asked(33, 20)[1:] == (0, 0)


def test_rows_with_images_wait_for_what_another_computes() -> None:
    seats = Seats(PLAIN, budget=32)
    seats.add(100, "a", 20)
    second, other = seats.add(100, "a", 40), seats.add(100, "b", 20)
    seats.run()
    assert (second.cached // 4, other.cached) == (120 // 4, 100)
    encoded = [row for plan in seats.plans for row in plan.encode]
    assert len(encoded) == 2


def test_nothing_is_kept_of_a_model_that_does_not_say_how() -> None:
    seats = Seats(replace(PLAIN, image_tokens=()))
    assert seats.asked(30, "a", 20) == seats.asked(30, "a", 20) == (0, 1, 1)
    assert seats.asked(30, 20)[0] == 0
    assert seats.asked(30, 20)[0] == 49


def test_a_hybrid_goes_back_to_a_checkpoint_inside_an_image() -> None:
    seats = Seats(CHECKPOINTED)
    assert seats.asked(190, "a", 2) == (0, 1, 1)
    assert seats.asked(190, "a", 90) == (192, 1, 1), "the image is cut, so that it is encoded"
    assert seats.asked(190, "a", 90) == (280, 0, 1)


def test_images_of_one_piece_are_taken_over_whole_or_not_at_all() -> None:
    seats = Seats(WHOLE)
    assert seats.asked(200, "a", 20) == (0, 1, 1)
    saved = [page.start for plan in seats.plans for save in plan.save for page in save.pages]
    assert saved and all(spans(plan) for plan in seats.plans if plan.save)
    assert seats.asked(200, "a", 90) == (220, 0, 1)
    assert seats.asked(200, "b", 20) == (0, 1, 1)
    assert seats.asked(200, "a", 20, "b", 9) == (0, 2, 2)
    assert seats.asked(200, 30) == (0, 0, 0)


def test_nothing_is_left_of_a_prompt_that_is_still_held_back() -> None:
    seats = Seats(WHOLE, budget=64)
    seats.add(200, "a", 80)
    for _ in range(3):
        plan = seats.scheduler.schedule()
        seats.plans.append(plan)
        seats.scheduler.commit(result_of(plan))
    seats.run()
    ends = []
    for plan in seats.plans:
        for save in plan.save:
            pages = [*save.pages, *([save.checkpoint] if save.checkpoint else [])]
            (end,) = [span.start + len(span.tokens) for span in plan.prefill if span.row == save.row]
            ends.append(end)
            assert all(page.start + page.tokens <= end for page in pages)
    assert ends and min(ends) >= 203
