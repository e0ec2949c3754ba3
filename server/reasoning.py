"""Whether and how hard a model thinks, in the words of its template.

Templates know `enable_thinking` (Qwen, GLM and others), `thinking` (DeepSeek, Granite) or `reasoning_effort`
(gpt-oss); what a template does not know it cannot do, and is refused unless it asks for nothing.
"""

from __future__ import annotations

from chairlift.engine.output.formats import OutputFormat
from chairlift.engine.plan import Tokenizer
from chairlift.engine.thinking import ThinkingBudget
from chairlift.server.errors import invalid, unsupported
from chairlift.server.wire.chat import ChatRequest

SWITCHES = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
BUDGET = "thinking_token_budget"
OFF = ("none", "minimal")
"""Efforts that turn the thinking off, where it can only be on or off."""
NEAREST = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that a template may not know, and those that every template with efforts knows."""


def asked_to_think(wire: ChatRequest) -> bool | None:
    """Whether the model is to think; None where nothing says so.

    Raises: APIError: 400, where two parameters differ.
    """
    variables = wire.chat_template_kwargs or {}
    thinks = wire.enable_thinking
    if thinks is None:
        thinks = bool(variables["enable_thinking"]) if "enable_thinking" in variables else None
    elif variables.get("enable_thinking", thinks) != thinks:
        raise invalid(
            "enable_thinking and chat_template_kwargs.enable_thinking differ; send one of them.",
            "enable_thinking",
            "invalid_value",
        )
    if thinks and wire.reasoning_effort == "none":
        raise invalid(
            "reasoning_effort is none, and enable_thinking is true; send one of them.",
            "reasoning_effort",
            "invalid_value",
        )
    return thinks


def template_variables(wire: ChatRequest, tokenizer: Tokenizer, output: OutputFormat) -> dict[str, object]:
    """`chat_template_kwargs`, and what `enable_thinking` and `reasoning_effort` come to.

    Raises:
        APIError: 400.
    """
    variables = dict(wire.chat_template_kwargs or {})
    switch = next((name for name in SWITCHES if tokenizer.template_mentions(name)), None)
    thinks = asked_to_think(wire)
    if wire.enable_thinking is not None and switch is None and thinks != output.reasons:
        raise unsupported("enable_thinking", _cannot("enable_thinking", output))
    if wire.reasoning_effort is not None and EFFORT not in variables:
        if tokenizer.template_mentions(EFFORT):
            variables[EFFORT], thinks = _effort(wire.reasoning_effort, switch, thinks, tokenizer)
            if variables[EFFORT] is None:
                del variables[EFFORT]
        elif switch is not None:
            thinks = wire.reasoning_effort not in OFF if thinks is None else thinks
        elif wire.reasoning_effort != "medium" and (output.reasons or wire.reasoning_effort not in OFF):
            raise unsupported(EFFORT, _cannot(f"{EFFORT} {wire.reasoning_effort}", output))
    if thinks is not None and switch is not None:
        variables.setdefault(switch, thinks)
    return variables


def _effort(
    effort: str, switch: str | None, thinks: bool | None, tokenizer: Tokenizer
) -> tuple[str | None, bool | None]:
    """The template's own word for the effort, and whether to think at all."""
    known = any(f"{quote}{effort}{quote}" in text for text in tokenizer.chat_templates for quote in "\"'")
    if known or effort in ("low", "medium", "high"):
        return effort, thinks
    if effort == "none":
        if switch is None:
            raise unsupported(EFFORT, "reasoning_effort none is not supported: this model always thinks.")
        return None, False if thinks is None else thinks
    return NEAREST[effort], thinks


def thinking_budget(
    wire: ChatRequest, tokenizer: Tokenizer, output: OutputFormat, prefix: str, prompt_end: str
) -> ThinkingBudget | None:
    """What `thinking_token_budget` comes to: None without it, or where the prompt says not to think.

    Args:
        prefix: what the prompt holds of the answer already.
        prompt_end: text of its last tokens, special ones included.

    Raises:
        APIError: 400, for a model whose thinking does not end with one token.
    """
    most = wire.thinking_token_budget
    if most is None:
        return None
    if not output.reasons:
        raise unsupported(BUDGET, _cannot(BUDGET, output))
    thinking = output.thinking
    if output.closes(prompt_end):
        return None
    end = None if thinking is None else tokenizer.token_id(thinking.end)
    start = None if thinking is None or prefix else tokenizer.token_id(thinking.start)
    if end is None or (start is None and not prefix):
        raise unsupported(BUDGET, f"{BUDGET} is not supported: this model's marks of thinking are no tokens.")
    return ThinkingBudget(most, end, start)


def _cannot(asked: str, output: OutputFormat) -> str:
    model = "its thinking cannot be set" if output.reasons else "it does not think"
    return f"{asked} is not supported by this model: {model}."
