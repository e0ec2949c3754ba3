"""What `context_management` takes out of a conversation before the model reads it.

Source: Anthropic's API reference, Context editing.
"""

from __future__ import annotations

from chairlift.server.wire.messages import ClearThinking, ClearToolUses, CountTokensRequest, InputTokens

CLEARED = "[cleared to save context]"
"""Stands where a tool's result was."""


def thinking_to_keep(wire: CountTokensRequest) -> int | None:
    """So many of the last exchanges with thinking keep it; None: all."""
    turns: int | None = None
    for edit in edits(wire):
        if not isinstance(edit, ClearThinking) or edit.keep == "all":
            continue
        keep = edit.keep
        assert not isinstance(keep, str)
        if keep is not None and keep.type == "all":
            continue
        # One turn is Anthropic's default.
        kept = 1 if keep is None or keep.value is None else keep.value
        turns = kept if turns is None else min(turns, kept)
    return turns


def results_to_clear(wire: CountTokensRequest) -> ClearToolUses | None:
    """The last edit of the kind: one knows the whole conversation, so a second has nothing to add."""
    return next((edit for edit in reversed(edits(wire)) if isinstance(edit, ClearToolUses)), None)


def is_due(edit: ClearToolUses, prompt_tokens: int, results: int) -> bool:
    size = prompt_tokens if isinstance(edit.trigger, InputTokens) else results
    return size > edit.trigger.value


def is_worth(edit: ClearToolUses, cleared_tokens: int) -> bool:
    least = 0 if edit.clear_at_least is None else edit.clear_at_least.value
    return cleared_tokens >= max(least, 1)


def clears_inputs(edit: ClearToolUses, tool: str) -> bool:
    inputs = edit.clear_tool_inputs
    return tool in inputs if isinstance(inputs, list) else bool(inputs)


def edits(wire: CountTokensRequest) -> list[ClearThinking | ClearToolUses]:
    management = wire.context_management
    return [] if management is None else list(management.edits or ())
