"""A vision model's own preprocessing: from a conversation with images to token ids and arrays.

The processors are those of a model folder as mlx-vlm 0.7.10 builds them, which needs no torch; where it has
none of its own for a family, transformers' is used, which may. Runs on any thread; nothing here touches a
model.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from chairlift.engine.chat.control_tokens import ControlTokens, has_marks
from chairlift.engine.chat.conversation import Conversation, Message
from chairlift.engine.chat.template import ChatTemplate
from chairlift.engine.errors import InvalidParameter, ModelUnavailable
from chairlift.engine.media import ImageInput, PreparedMedia
from chairlift.engine.models.tokenizer import asked, no_template, special_tokens

logger = logging.getLogger("chairlift.engine")

_TOKEN_ARRAYS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""What processors return of the tokens themselves: a row has no padding, and its tokens are known."""
_COMMON_MARKERS = ("<image>", "<|image|>", "<start_of_image>", "[IMG]")
_SCRATCH = "<|placeholder|>"
"""Stands for an image token while Qwen's and other processors count; text that holds it becomes image
tokens."""
_PROBE = "probe"


def load_processor(folder: Path, chat_template: str | None = None) -> FolderProcessor:
    """The processor of a vision model's folder: its tokenizer, chat template and image preprocessing.

    Code in the folder is not run.

    Args:
        chat_template: in place of the folder's own; Jinja text.

    Raises:
        ModelUnavailable: files are missing or cannot be read, or the family's preprocessing cannot run here.
    """
    from mlx_vlm.models.base import BaseImageProcessor
    from mlx_vlm.utils import get_model_and_args
    from mlx_vlm.utils import load_processor as load

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        family, _ = get_model_and_args(config)  # importing a family registers its processor
        processor = load(str(folder), add_detokenizer=False, trust_remote_code=False)
        legacy = getattr(family, "ImageProcessor", None)
    except Exception as error:  # transformers and mlx-vlm raise whatever their parsers do
        reason = str(error).replace(str(folder), "the folder").partition("\n")[0] or type(error).__name__
        raise ModelUnavailable(f"The processor of {folder} cannot be loaded: {reason}") from error
    if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
        raise ModelUnavailable(f"{folder} has no processor that takes images.")
    if legacy is not None and issubclass(legacy, BaseImageProcessor):
        raise ModelUnavailable(f"Images are not supported for {config.get('model_type')}.")
    if chat_template is not None:
        processor.chat_template = chat_template
    return FolderProcessor(processor, config)


class FolderProcessor:
    """`chairlift.engine.media.MediaProcessor` over a processor of mlx-vlm or transformers; safe on any
    thread.

    Images of one request are prepared at a time, which bounds the memory it takes; a request without images
    does not wait for that.
    """

    def __init__(self, processor: Any, config: dict[str, Any]) -> None:
        self._tokenizer = _TurnTaking(processor.tokenizer)
        template = getattr(processor, "chat_template", None) or self._tokenizer.chat_template
        self._tokenizer.chat_template = template
        processor.tokenizer = self._tokenizer
        self._processor = processor
        self._imaging = threading.Lock()
        self._image_token_id = _image_token_id(processor, config)
        self._has_chat_template = template is not None
        self._template = ChatTemplate(template or "", special_tokens(self._tokenizer.own))
        self._control_tokens = ControlTokens(self._tokenizer.own, self._template.text)
        self._takes_strings = self._takes_parts = False
        self._marker = ""
        if self._has_chat_template:
            self._find_format()
        tokens = {self._marker, str(getattr(processor, "image_token", "")), _SCRATCH}
        self._reserved = tuple(sorted(tokens - {""}))

    def prepare(
        self,
        messages: list[dict[str, object]],
        images: Sequence[ImageInput],
        *,
        tools: list[dict[str, object]] | None = None,
        documents: Sequence[dict[str, object]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> tuple[list[int], PreparedMedia]:
        """See `MediaProcessor.prepare`. `kwargs` are variables for the template.

        Raises:
            InvalidParameter: `messages…`: the template refused the conversation, has no room for its images,
                or a text holds what stands for an image; an image's own `param`: its size does not suit the
                model.
        """
        if not self._has_chat_template:
            raise no_template()
        if images:
            self._check_texts(messages)
        conversation, marked = self._control_tokens.marked(
            asked(messages, tools, documents, add_generation_prompt, continue_final_message, kwargs)
        )
        rendered = self._template.render(
            conversation.having([self._readable(message) for message in conversation.messages])
        )
        if not images and marked:
            return self._tokenizer.marked_ids(rendered, self._control_tokens), PreparedMedia()
        if not images:
            return self._tokenizer.ids(rendered), PreparedMedia()
        room = rendered.count(self._marker) if self._marker else 0
        if room != len(images):
            raise InvalidParameter(
                "messages",
                f"The model's chat template has room for {room} of this conversation's {len(images)} images.",
            )
        found = self._expand(rendered, images)
        ids = _ids(found)
        tokens = self._tokens_of_each(ids, found, images)
        inputs = {name: _plain(value) for name, value in found.items() if name not in _TOKEN_ARRAYS}
        if "images" in inputs:  # as mlx-vlm renames it
            inputs["pixel_values"] = inputs.pop("images")
        return ids, PreparedMedia(inputs, tuple(image.digest for image in images), tokens)

    def _readable(self, message: Message) -> Message:
        return {**message, "content": self._content(message.get("content"))}

    def _content(self, content: object) -> object:
        """The content in the form that the template reads: a string, or a list of parts."""
        if isinstance(content, str):
            return content if self._takes_strings else [{"type": "text", "text": content}]
        if not isinstance(content, list):
            return content
        if self._takes_parts:
            return content
        return "".join(part["text"] if part["type"] == "text" else f"{self._marker}\n" for part in content)

    def _find_format(self) -> None:
        """Find out by rendering what the template makes of a string and of parts, and how it writes an
        image."""
        image: dict[str, object] = {"type": "image"}
        parts = [image, {"type": "text", "text": _PROBE}, image]
        self._takes_strings = _PROBE in self._try(_PROBE)
        rendered = self._try(parts)
        markers = [
            getattr(self._processor, "boi_token", None),
            getattr(self._processor, "image_token", None),
            *_COMMON_MARKERS,
        ]
        known = [marker for marker in markers if isinstance(marker, str) and marker]
        self._takes_parts = _PROBE in rendered and any(rendered.count(marker) == 2 for marker in known)
        if self._takes_parts:
            self._marker = next(marker for marker in known if rendered.count(marker) == 2)
        elif self._takes_strings:
            self._marker = known[0]
        else:  # it wants more than one message; the usual form of a vision model's, then
            self._takes_parts = True
            self._marker = known[0]

    def _try(self, content: object) -> str:
        try:
            return self._template.written(Conversation(({"role": "user", "content": content},)))
        except InvalidParameter:
            return ""

    def _check_texts(self, messages: list[dict[str, object]]) -> None:
        for index, message in enumerate(messages):
            content = message["content"]
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            for part in parts:
                for token in self._reserved:
                    if part["type"] == "text" and token in str(part["text"]):
                        raise InvalidParameter(
                            f"messages[{index}].content",
                            f"messages[{index}].content holds the text {token}, which stands for an image in "
                            "this model and cannot be told from one in a conversation with images.",
                        )

    def _expand(self, text: str, images: Sequence[ImageInput]) -> dict[str, Any]:
        """The processor's arrays for a rendered conversation."""
        try:
            return self._process(text, images)
        except Exception as error:
            logger.warning("images of a request cannot be prepared", exc_info=True)
            culprit, reason = self._culprit(images, error)
            where = culprit.param or "messages"
            raise InvalidParameter(where, f"{where}: the image does not suit the model: {reason}") from error

    def _process(self, text: str, images: Sequence[ImageInput]) -> dict[str, Any]:
        pictures = [Image.fromarray(image.pixels) for image in images]
        process = getattr(self._processor, "process", self._processor)
        with self._imaging:
            return dict(process(text=[text], images=pictures, return_tensors="np"))

    def _culprit(self, images: Sequence[ImageInput], error: Exception) -> tuple[ImageInput, str]:
        """The first image that cannot be prepared alone either, and why."""
        for image in images if len(images) > 1 else ():
            try:
                self._process(self._marker, [image])
            except Exception as its_own:
                return image, _line(its_own)
        return images[0], _line(error)

    def _tokens_of_each(
        self, ids: list[int], found: dict[str, Any], images: Sequence[ImageInput]
    ) -> tuple[int, ...]:
        """Positions of the prompt that stand for each image."""
        total = ids.count(self._image_token_id)
        if len(images) == 1:
            each: tuple[int, ...] = (total,)
        elif "image_grid_thw" in found:
            merged = int(getattr(self._processor.image_processor, "merge_size", 1)) ** 2
            each = tuple(int(np.prod(grid)) // merged for grid in np.asarray(found["image_grid_thw"]))
        else:
            each = tuple(self._tokens_alone(image) for image in images)
        if sum(each) != total or 0 in each:
            where = images[0].param or "messages"
            raise InvalidParameter(where, f"{where}: the images and the tokens for them do not match.")
        return each

    def _tokens_alone(self, image: ImageInput) -> int:
        return _ids(self._process(self._marker, [image])).count(self._image_token_id)


class _TurnTaking:
    """A transformers tokenizer for several threads, which adds special tokens where a template wrote none.

    As transformers' `ProcessorMixin.apply_chat_template` has it: a text that begins with the
    beginning-of-sequence token has the special tokens it is to have. Processors call their tokenizer
    themselves, so it is here that this is decided, and not at each of their calls, which differ.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.own = tokenizer
        self.turn = threading.Lock()
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True

    @property
    def chat_template(self) -> Any:
        return self.own.chat_template

    @chat_template.setter
    def chat_template(self, template: Any) -> None:
        self.own.chat_template = template

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __call__(self, text: Any = None, *arguments: Any, **options: Any) -> Any:
        first = str(text[0] if isinstance(text, list | tuple) and text else text)
        options["add_special_tokens"] = not self._begins(first)
        with self.turn:
            if has_marks(first):
                options.update(add_special_tokens=False, sanitize_control_tokens=True)
                before = "" if self._begins(first) else self._beginning()
                text = [before + first] if isinstance(text, list | tuple) else before + first
            return self.own(text, *arguments, **options)

    def ids(self, text: str) -> list[int]:
        return [int(token) for token in self(text)["input_ids"]]

    def marked_ids(self, text: str, control_tokens: ControlTokens) -> list[int]:
        with self.turn:
            before = "" if self._begins(text) else self._beginning()
            return control_tokens.encode(before + text)

    def _begins(self, text: str) -> bool:
        return self.own.bos_token is not None and text.startswith(self.own.bos_token)

    def _beginning(self) -> str:
        """What the tokenizer itself puts before a text."""
        special = [int(token) for token in self.own("")["input_ids"]]
        return str(self.own.bos_token) if special[:1] == [self.own.bos_token_id] else ""


def _image_token_id(processor: Any, config: dict[str, Any]) -> int:
    """The token that the model replaces by an image, by its configuration."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(config.get(name), int):
            return int(config[name])
    known = getattr(processor, "image_token_id", None)
    if known is None:
        known = processor.tokenizer.convert_tokens_to_ids(getattr(processor, "image_token", "<image>"))
    return int(known)


def _ids(found: dict[str, Any]) -> list[int]:
    return [int(token) for token in np.asarray(found["input_ids"]).reshape(-1)]


def _plain(value: Any) -> Any:
    """Arrays of mlx as numpy's, which any thread may read; mlx's bfloat16 is float32 in numpy."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "shape") and not isinstance(value, np.ndarray):
        import mlx.core as mx

        value = value.astype(mx.float32) if value.dtype == mx.bfloat16 else value
        return np.array(value)
    return value


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


__all__ = ["FolderProcessor", "load_processor"]
