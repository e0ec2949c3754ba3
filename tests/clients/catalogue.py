"""The clients, and the versions that were tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Client:
    """One client: where it comes from, and the script that repeats its exchange."""

    name: str
    registry: Literal["pip", "npm"]
    packages: tuple[str, ...]
    script: str


CLIENTS = (
    Client("openai-js", "npm", ("openai@6.49.0",), "openai_js.mjs"),
    Client("anthropic-js", "npm", ("@anthropic-ai/sdk@1.14.0",), "anthropic_js.mjs"),
    Client(
        "langchain-openai",
        "pip",
        ("langchain==1.5.2", "langchain-openai==1.7.4"),
        "langchain_openai_agent.py",
    ),
    Client("openai-agents", "pip", ("openai-agents==0.24.0",), "openai_agents.py"),
    Client("instructor", "pip", ("instructor==1.17.0",), "instructor_models.py"),
    Client("pydantic-ai", "pip", ("pydantic-ai-slim[openai]==2.68.0",), "pydantic_ai_agent.py"),
    Client("llm", "pip", ("llm==0.36",), "llm_command.py"),
    Client("litellm", "pip", ("litellm==1.110.2",), "litellm_calls.py"),
    Client("claude-code", "npm", ("@anthropic-ai/claude-code@2.1.197",), "claude_code.py"),
    Client("codex", "npm", ("@openai/codex@0.171.0",), "codex.py"),
    Client("opencode", "npm", ("opencode-ai@1.18.33",), "opencode.py"),
)
