"""Prompts in the forms that Python users give them: texts, token ids, and dicts with a `cache_salt`."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NotRequired, TypedDict

from runtime.util.errors import UsageError


class TextPrompt(TypedDict):
    """A text, as vLLM writes a prompt of this kind. Prompts with a `cache_salt` find K/V of the same salt alone."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids, as vLLM writes a prompt of this kind."""

    prompt_token_ids: Seq[int]
    cache_salt: NotRequired[str]


Prompt = str | Seq[int] | TextPrompt | TokensPrompt
"""A prompt: a text or its token ids, either alone or in a dict as in vLLM."""


def prompts_of(prompts: Prompt | Seq[Prompt]) -> list[tuple[Any, str | None]]:
    """The texts or ids of the prompts, each with its `cache_salt`. A single prompt becomes a list of one; a list of ids
    is a single prompt. UsageError for bytes, for a value that is no list, and for a dict in another form.
    """
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise UsageError(
            f"prompts must be a text, a list of token ids, or a list of several prompts: {str(prompts)[:100]}",
            hint="give a text, or a list",
        )
    if isinstance(prompts, str | Mapping):
        return [_content_of(prompts)]
    found: list[Any] = list(prompts)  # a generator can be read only once
    is_one = bool(found) and all(isinstance(one, int) for one in found)
    return [(found, None)] if is_one else [_content_of(one) for one in found]


def _content_of(prompt: Any) -> tuple[Any, str | None]:
    """The text or ids of a prompt given as a dict, and its `cache_salt`; any other prompt unchanged."""
    if not isinstance(prompt, Mapping):
        return prompt, None
    contents = {name: value for name, value in prompt.items() if name != "cache_salt"}
    if len(contents) != 1 or not contents.keys() <= {"prompt", "prompt_token_ids"}:
        raise UsageError(
            f"a prompt in a dict has `prompt` or `prompt_token_ids`, and nothing else but `cache_salt`: "
            f"{str(dict(prompt))[:100]}",
            hint='write `{"prompt": "def area("}`',
        )
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise UsageError(f"`cache_salt` is a text with at least one letter: {salt!r:.100}", hint="leave it out")
    return next(iter(contents.values())), salt
