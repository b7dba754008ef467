"""Differences between a draft model and its target that harm drafts but pass all checks."""

from pathlib import Path
from typing import Any

from runtime.bundle import Bundle
from runtime.chat import ChatTemplate, Message, has_chat_template
from runtime.diagnosis.observations import DraftModelPair
from runtime.drafters.compatibility import TargetIdentity
from runtime.errors import SpecDecError, draft_engine_errors
from runtime.text import encode_text, tokenizer_of_engine

_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def area(width, height):\n    return width * height  # in square metres\n",
    "In 1969, 3.14159 and 1,000,000 were numbers; so is -42e-7.",
    "naïve café, straße, 東京, Привет, مرحبا, 👍🏽",
    "  two  spaces,\ttabs\n\nand lines ...!?",
    '{"key": ["value", null, true], "other": "it\'s"}',
)
_CONVERSATION: tuple[Message, ...] = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
)
_SCALED_TYPES = ("linear", "dynamic", "yarn", "longrope")
"""Rope types with a factor: models of one family are trained with the same factor. Llama 3's differ by size."""


def compare_draft_model(draft: Bundle, target: TargetIdentity) -> DraftModelPair:
    with draft_engine_errors():
        tokenizer = tokenizer_of_engine(draft)
    num_texts, num_otherwise, can_draft = 0, 0, True
    if tokenizer is not None and target.tokenizer is not None:
        num_texts = len(_TEXTS)
        num_otherwise = sum(encode_text(tokenizer, text) != encode_text(target.tokenizer, text) for text in _TEXTS)
        if tokenizer.get_vocab() != target.tokenizer.get_vocab():
            num_otherwise, can_draft = num_texts, False
    return DraftModelPair(
        num_texts,
        num_otherwise,
        can_draft,
        _conversations(draft, target),
        _rope_differences(draft.config.pretrained_config, target.bundle.config.pretrained_config),
        draft.config.weights_digest == target.bundle.config.weights_digest,
    )


def _conversations(draft: Bundle, target: TargetIdentity) -> tuple[str, str] | None:
    if not has_chat_template(draft.directory) or not has_chat_template(target.tokenizer_dir):
        return None
    pretrained = target.bundle.config.pretrained_config
    return _rendered(draft.directory, draft.config.pretrained_config), _rendered(target.tokenizer_dir, pretrained)


def _rendered(directory: Path, pretrained_config: dict[str, Any]) -> str:
    """Text rendered by the chat template, or its error."""
    try:
        return ChatTemplate(directory, pretrained_config).render(_CONVERSATION)
    except SpecDecError as error:
        return error.message


def _rope_differences(draft: dict[str, Any], target: dict[str, Any]) -> tuple[str, ...] | None:
    ours, theirs = _rope_settings(draft), _rope_settings(target)
    if not ours or not theirs:
        return None
    names = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    return tuple(f"{name} {ours[name]} beside {theirs[name]}" for name in names)


def _rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Settings that determine rotary angles, by transformers' current and former names; with a factor if it scales."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = {f"{name} ": value for name, value in given.items() if isinstance(value, dict)} or {"": given}
    settings: dict[str, Any] = {}
    for prefix, values in kinds.items():
        theta = values.get("rope_theta", config.get("rope_theta"))
        if theta is None:
            continue
        kind = values.get("rope_type", values.get("type", "default"))
        settings |= {f"{prefix}rope_theta": float(theta), f"{prefix}rope_type": kind}
        if kind in _SCALED_TYPES:
            settings[f"{prefix}factor"] = values.get("factor")
    return settings
