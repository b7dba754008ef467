"""The agents that `launch` knows: the command, the installation, and the settings that name a server.

An agent takes the server from variables of its environment, or from its config file, which gets the keys of `File.keys`
beside its own. A new agent is one entry in `TOOLS`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

NO_KEY = "none"
"""Key that is sent to a server that asks for no key: clients insist on sending one."""
KEY_VARIABLE = "SPECDEC_API_KEY"


@dataclass(frozen=True)
class Connection:
    """The address and model of a server, for an agent's settings. `context` is the number of tokens that a prompt and
    its answer may have together.
    """

    url: str
    model: str
    key: str
    context: int

    @property
    def base_url(self) -> str:
        """The server's URL for OpenAI's clients, with `/v1` at its end; Anthropic's clients take `url`."""
        return f"{self.url}/v1"

    @property
    def has_key(self) -> bool:
        return self.key != NO_KEY

    @property
    def max_output_len(self) -> int:
        """Limit on an answer's tokens, for agents that ask for it: a quarter of the context."""
        return self.context // 4


@dataclass(frozen=True)
class File:
    """Config file of an agent: its path, its format, and the keys that name the server."""

    path: Callable[[], Path]
    format: Literal["toml", "yaml", "json"]
    keys: Callable[[Connection], dict[str, Any]]


@dataclass(frozen=True)
class Tool:
    """An agent. `prompt_len` is the rough number of tokens of its first prompt, most of which describe its tools."""

    name: str
    title: str
    executable: str
    install: str
    prompt_len: int
    environment: Callable[[Connection], dict[str, str]] = lambda server: {}
    file: File | None = None


def _claude(server: Connection) -> dict[str, str]:
    """Variables for Claude Code. Its small requests, such as titles, would name other models of Anthropic's: all names
    are set to the server's model.
    """
    models = (
        "ANTHROPIC_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    )
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_API_KEY": "",  # Claude Code would ask about a key of Anthropic's, and send it here
        **dict.fromkeys(models, server.model),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.max_output_len),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _aider(server: Connection) -> dict[str, str]:
    return {
        "OPENAI_API_BASE": server.base_url,
        "OPENAI_API_KEY": server.key,
        "AIDER_MODEL": f"openai/{server.model}",
        "AIDER_SHOW_MODEL_WARNINGS": "false",  # aider warns that it has no prices for this model
    }


def _key_alone(server: Connection) -> dict[str, str]:
    """A variable with the key, to which the config file refers; none if the server asks for no key."""
    return {KEY_VARIABLE: server.key} if server.has_key else {}


def _codex(server: Connection) -> dict[str, Any]:
    provider = {"name": "specdec", "base_url": server.base_url, "wire_api": "responses"}
    key = {"env_key": KEY_VARIABLE} if server.has_key else {}
    return {
        "model": server.model,
        "model_provider": "specdec",
        "model_context_window": server.context,
        "model_providers": {"specdec": provider | key},
    }


def _continue(server: Connection) -> dict[str, Any]:
    model = {
        "name": "specdec",
        "provider": "openai",
        "model": server.model,
        "apiBase": server.base_url,
        "apiKey": server.key,
        "roles": ["chat", "edit", "apply"],
        "defaultCompletionOptions": {"contextLength": server.context, "maxTokens": server.max_output_len},
    }
    return {"name": "local", "version": "0.0.1", "schema": "v1", "models": [model]}


def _opencode(server: Connection) -> dict[str, Any]:
    limit = {"context": server.context, "output": server.max_output_len}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "specdec",
        "options": {
            "baseURL": server.base_url,
            "apiKey": f"{{env:{KEY_VARIABLE}}}" if server.has_key else NO_KEY,
        },
        "models": {server.model: {"name": server.model, "tool_call": True, "limit": limit}},
    }
    model = f"specdec/{server.model}"
    return {
        "$schema": "https://opencode.ai/config.json",
        "model": model,
        "small_model": model,
        "provider": {"specdec": provider},
    }


def _in(variable: str, default: str, name: str) -> Callable[[], Path]:
    """The file `name` in the directory that a variable names, or else in the directory `default` of the home
    directory.
    """
    return lambda: Path(os.environ.get(variable) or Path.home() / default) / name


TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "claude",
            "Claude Code",
            "claude",
            "npm install -g @anthropic-ai/claude-code",
            19_600,
            environment=_claude,
        ),
        Tool(
            "codex",
            "Codex",
            "codex",
            "npm install -g @openai/codex",
            6_400,
            environment=_key_alone,
            file=File(_in("CODEX_HOME", ".codex", "config.toml"), "toml", _codex),
        ),
        Tool("aider", "aider", "aider", "pip install aider-chat", 3_000, environment=_aider),
        Tool(
            "continue",
            "Continue",
            "cn",
            "npm install -g @continuedev/cli",
            5_000,
            file=File(_in("CONTINUE_GLOBAL_DIR", ".continue", "config.yaml"), "yaml", _continue),
        ),
        Tool(
            "opencode",
            "opencode",
            "opencode",
            "npm install -g opencode-ai",
            10_000,
            environment=_key_alone,
            file=File(_in("XDG_CONFIG_HOME", ".config", "opencode/opencode.json"), "json", _opencode),
        ),
    )
}
