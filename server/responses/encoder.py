"""From the events of an answer to those of a response, and the response itself.

Source: OpenAI's API reference, Responses (the response object; streaming events).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from chairlift.engine.events import TokenLogprob, Usage
from chairlift.engine.output.events import (
    ContentDelta,
    EndReason,
    OutputEnd,
    OutputEvent,
    ReasoningDelta,
    RefusalDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from chairlift.server.logprobs import TokenTexts, chat_logprobs
from chairlift.server.payload import Payload
from chairlift.server.responses.items import new_id
from chairlift.server.sealing import seal

OUTPUT_TEXT, REFUSAL, REASONING, SUMMARY = "output_text", "refusal", "reasoning_text", "summary_text"
EVENTS = {
    OUTPUT_TEXT: "response.output_text",
    REFUSAL: "response.refusal",
    REASONING: "response.reasoning_text",
    SUMMARY: "response.reasoning_summary_text",
}
"""How the events of a part's text begin, by the part's type."""


@dataclass(slots=True)
class Part:
    """One text: of a message, a refusal, the reasoning, or its summary."""

    kind: str
    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Payload] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def place(self) -> Payload:
        return {"summary_index" if self.kind == SUMMARY else "content_index": self.index}

    def payload(self) -> Payload:
        payload: Payload = {"type": self.kind, "refusal" if self.kind == REFUSAL else "text": self.text}
        if self.kind == OUTPUT_TEXT:
            payload["annotations"] = []
            payload["logprobs"] = list(self.logprobs)
        return payload


@dataclass(slots=True)
class Item:
    """One item of the output, as far as it has come."""

    kind: str
    index: int
    id: str
    parts: list[Part] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    sealed: bool = False
    """Reasoning that is also given in `encrypted_content`."""

    @property
    def place(self) -> Payload:
        return {"item_id": self.id, "output_index": self.index}

    def payload(self, status: str) -> Payload:
        start: Payload = {"id": self.id, "type": self.kind, "status": status}
        parts = [part.payload() for part in self.parts]
        if self.kind == "message":
            return {**start, "role": "assistant", "content": parts}
        if self.kind == "function_call":
            arguments = "".join(self.arguments)
            return {**start, "call_id": self.call_id, "name": self.name, "arguments": arguments}
        item = {
            **start,
            "summary": [part for part in parts if part["type"] == SUMMARY],
            "content": [part for part in parts if part["type"] == REASONING],
        }
        if self.sealed:
            text = "".join(part.text for part in self.parts)
            item["encrypted_content"] = None if status == "in_progress" else seal(text)
        return item


def usage_payload(usage: Usage, reasoning_tokens: int) -> Payload:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponseEncoder:
    """Writes one response. Every method returns events that are whole: later ones leave them alone.

    Args:
        base: the response object without its output and what only its end can tell.
        texts: None unless log probabilities are asked for.
        summarize: the reasoning is given as a summary, not as the item's content.
        seal_reasoning: it is also given as `encrypted_content`.
    """

    def __init__(
        self,
        base: Payload,
        texts: TokenTexts | None,
        *,
        summarize: bool = False,
        seal_reasoning: bool = False,
    ) -> None:
        self._base = base
        self._texts = texts
        self._summarize = summarize
        self._seal_reasoning = seal_reasoning
        self._sequence = 0
        self._count = 0
        self._done: dict[int, Payload] = {}
        self._open: Item | None = None
        self._calls: dict[int, Item] = {}

    @property
    def output(self) -> list[Payload]:
        """The items that are done, in order."""
        return [self._done[index] for index in sorted(self._done)]

    def response(self, status: str, **more: object) -> Payload:
        """The response so far."""
        return {**self._base, "status": status, "output": self.output, **more}

    # -- events

    def opening(self) -> list[Payload]:
        created = self._event("response.created", response=self.response("in_progress"))
        return [created, self._event("response.in_progress", response=self.response("in_progress"))]

    def add(self, event: OutputEvent) -> list[Payload]:
        return list(self._events_of(event))

    def end(self, end: OutputEnd) -> list[Payload]:
        """Everything but the last event."""
        broken = end.reason is EndReason.LENGTH
        events = list(self.finish_items("incomplete" if broken else "completed"))
        if not self._done:  # an answer without text is a message all the same
            events += [*self._text("message", OUTPUT_TEXT, ""), *self.finish_items("completed")]
        return events

    def finish_items(self, status: str) -> Iterator[Payload]:
        """Close what is open, with this status. A call that broke off has no arguments to be done with."""
        if self._open is not None:
            yield from self._close(status)
        for index in list(self._calls):
            call = self._calls.pop(index)
            yield self._finish(call, "incomplete")

    def closing(self, response: Payload) -> Payload:
        """The last event. A response that was cancelled has none of its own in the API."""
        kind = {"completed": "completed", "failed": "failed"}.get(str(response["status"]), "incomplete")
        return {"type": f"response.{kind}", "sequence_number": self._sequence, "response": response}

    def _events_of(self, event: OutputEvent) -> Iterator[Payload]:
        match event:
            case ContentDelta():
                yield from self._text("message", OUTPUT_TEXT, event.text, event.logprobs)
            case RefusalDelta():
                yield from self._text("message", REFUSAL, event.text)
            case ReasoningDelta():
                yield from self._text("reasoning", SUMMARY if self._summarize else REASONING, event.text)
            case ToolCallStart():
                yield from self._close("completed")
                call = self._item("function_call", "fc", call_id=event.id, name=event.name)
                self._calls[event.index] = call
                yield self._added(call)
            case ToolCallArguments():
                call = self._calls[event.index]
                call.arguments.append(event.text)
                yield self._event("response.function_call_arguments.delta", **call.place, delta=event.text)
            case ToolCallEnd():
                call = self._calls.pop(event.index)
                arguments = "".join(call.arguments)
                yield self._event(
                    "response.function_call_arguments.done",
                    **call.place,
                    name=call.name,
                    arguments=arguments,
                )
                yield self._finish(call, "completed")

    def _text(
        self, item_kind: str, part_kind: str, text: str, tokens: tuple[TokenLogprob, ...] = ()
    ) -> Iterator[Payload]:
        if self._open is not None and self._open.kind != item_kind:
            yield from self._close("completed")
        item = self._open
        if item is None:
            item = self._open = self._item(item_kind, "rs" if item_kind == "reasoning" else "msg")
            yield self._added(item)
        part = item.parts[-1] if item.parts else None
        if part is None or part.kind != part_kind:
            if part is not None:
                yield from self._finish_part(item, part)
            part = Part(part_kind, len(item.parts))
            yield self._event(_part_event(part, "added"), **item.place, **part.place, part=part.payload())
            item.parts.append(part)
        logprobs = self._logprobs(tokens)
        part.pieces.append(text)
        part.logprobs.extend(logprobs)
        if text or logprobs:
            more = {"logprobs": logprobs} if part_kind == OUTPUT_TEXT else {}
            yield self._event(f"{EVENTS[part_kind]}.delta", **item.place, **part.place, delta=text, **more)

    def _logprobs(self, tokens: tuple[TokenLogprob, ...]) -> list[Payload]:
        if self._texts is None or not tokens:
            return []
        content = chat_logprobs(tokens, self._texts)["content"]
        assert isinstance(content, list)
        for entry in content:
            for each in (entry, *entry["top_logprobs"]):
                # Here `bytes` is always a list, empty where a token's cannot be told.
                each["bytes"] = each["bytes"] or []
        return content

    def _finish_part(self, item: Item, part: Part) -> Iterator[Payload]:
        text: Payload = {"refusal" if part.kind == REFUSAL else "text": part.text}
        if part.kind == OUTPUT_TEXT:
            text["logprobs"] = list(part.logprobs)
        yield self._event(f"{EVENTS[part.kind]}.done", **item.place, **part.place, **text)
        yield self._event(_part_event(part, "done"), **item.place, **part.place, part=part.payload())

    def _close(self, status: str) -> Iterator[Payload]:
        """The message or reasoning that is open, if one is."""
        item, self._open = self._open, None
        if item is not None:
            if item.parts:
                yield from self._finish_part(item, item.parts[-1])
            yield self._finish(item, status)

    def _item(self, kind: str, prefix: str, *, call_id: str = "", name: str = "") -> Item:
        item = Item(
            kind, self._count, new_id(prefix), call_id=call_id, name=name, sealed=self._seal_reasoning
        )
        self._count += 1
        return item

    def _added(self, item: Item) -> Payload:
        return self._event(
            "response.output_item.added", output_index=item.index, item=item.payload("in_progress")
        )

    def _finish(self, item: Item, status: str) -> Payload:
        self._done[item.index] = item.payload(status)
        return self._event("response.output_item.done", output_index=item.index, item=self._done[item.index])

    def _event(self, kind: str, **fields: object) -> Payload:
        event: Payload = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


def _part_event(part: Part, what: str) -> str:
    kind = "reasoning_summary_part" if part.kind == SUMMARY else "content_part"
    return f"response.{kind}.{what}"
