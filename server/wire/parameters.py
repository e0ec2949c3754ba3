"""Parameters that have no field in a wire model: not built, so refused by name, unless they ask for nothing.

A client library sends many parameters at their defaults. A value listed here, or null, means what the server
does anyway and is let pass; any other is refused. docs/api.md holds the same table for users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

Neutral = Mapping[str, tuple[object, ...]]

_BOTH: Neutral = {
    # vLLM
    "add_special_tokens": (),
    "bad_words": ([],),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "request_id": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

_CHAT: Neutral = {
    # OpenAI
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "best_of": (1,),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}

_COMPLETIONS: Neutral = {
    "logprobs": (False,),
    "suffix": ("",),
}

_RESPONSES: Neutral = {
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "service_tier": ("auto", "default"),
}


_COUNT_TOKENS: Neutral = {
    # Anthropic
    "billing_policy": (),
    "compaction": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
}

_MESSAGES: Neutral = {
    **_COUNT_TOKENS,
    "container": (),
    "diagnostics": ({}, {"previous_message_id": None}),
    "fallback_credit_token": (),
    "fallbacks": ([], "default"),
    "inference_geo": (),
    "thread": (),
}


@dataclass(frozen=True, slots=True)
class Surface:
    """An endpoint's parameters beside the fields of its wire model."""

    neutral: Neutral

    def is_known(self, name: str) -> bool:
        return name in self.neutral

    def is_neutral(self, name: str, value: object) -> bool:
        """Whether `value` asks for nothing beyond what is done without it."""
        if name not in self.neutral:
            return False
        return value is None or any(_same(value, neutral) for neutral in self.neutral[name])


def _same(value: object, neutral: object) -> bool:
    # True == 1 in Python and is another value in JSON; 0 and 0.0 are the same number in both.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


CHAT = Surface(MappingProxyType({**_BOTH, **_CHAT}))
COMPLETIONS = Surface(MappingProxyType({**_BOTH, **_COMPLETIONS}))
COUNT_TOKENS = Surface(MappingProxyType(_COUNT_TOKENS))
MESSAGES = Surface(MappingProxyType(_MESSAGES))
INPUT_TOKENS = Surface(MappingProxyType({**_RESPONSES, "personality": ()}))
RESPONSES = Surface(MappingProxyType(_RESPONSES))
