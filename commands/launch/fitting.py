"""Flags of a server for an agent: a context and a K/V cache that fit the model and the memory, drafts, tools."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from commands.options.foreign import flag_name
from runtime.checkpoint.resolve import files_of_model, read_model_config, resolve_model
from runtime.text.chat import check_chat_template
from runtime.text.chat_templates import chat_templates
from runtime.util.control_groups import free_memory
from runtime.util.files import read_json

AGENT_CONTEXT = 32_768
"""Tokens of a prompt and its answer together: prompts of agents have 10,000 to 30,000."""
_LEAST_CONTEXT = 4_096
_BATCH_SIZE = 4
"""Answers at once, as `serve` has by default: agents ask for a title or a summary beside the answer."""
_ITEM_BYTES = {"float32": 4}
_DRAFTING = ("spec-decode-algo", "profile", "speculative-config", "drafter")


def flags_given(flags: Sequence[str]) -> set[str]:
    """Names of the flags that are given, in our spelling, without hyphens and values."""
    return {flag_name(flag, "serve") for flag in flags if flag.startswith("-")}


def is_engine(model: str) -> bool:
    """True for an engine directory, whose limits were fixed at its build."""
    return _build_config(model) is not None


def engine_context(model: str) -> int | None:
    """Tokens that a prompt and its answer may have together in an engine; None for a model."""
    build = _build_config(model)
    return None if build is None else int(build["max_seq_len"]) - int(build["max_draft_len"])


def _build_config(model: str) -> Any:
    config = Path(model).expanduser() / "config.json"
    return read_json(config).get("build_config") if config.is_file() else None


def fitting_flags(model: str, given: set[str]) -> Iterator[str]:
    """Flags and values for the model, without the flags that are given already. SpecDecError for a model that is not
    there, or that has no chat template.
    """
    build = _build_config(model)
    takes_drafts = not isinstance(build, dict) or build.get("max_draft_len") != 0
    if takes_drafts and not any(name in _DRAFTING or name.endswith("-config") for name in given):
        yield from ("--spec-decode-algo", "AUTO")
    if "any-model" not in given:
        yield "--any-model"
    if build is not None:
        return
    model_dir = resolve_model(model)
    config = read_model_config(model_dir)
    if "max-seq-len" not in given:
        context, num_kept = _sizes(config, model_dir, 1)
        if num_kept is not None and num_kept <= context and "kv-cache-dtype" not in given:
            context, num_kept = _sizes(config, model_dir, 2)
            yield from ("--kv-cache-dtype", "int8")
        yield from ("--max-seq-len", str(context))
        if num_kept is not None and "max-tokens-in-paged-kv-cache" not in given:
            yield from ("--max-tokens-in-paged-kv-cache", str(num_kept))
    if "tokenizer-dir" not in given:
        check_chat_template(model_dir, model)
        templates = [text for text in chat_templates(model_dir).values() if isinstance(text, str)]
        if not any("tools" in text for text in templates) and "tool-call-parser" not in given:
            yield from ("--tool-call-parser", "hermes")  # tools are written into the system message


def _sizes(config: dict[str, Any], model_dir: Path, divisor: int) -> tuple[int, int | None]:
    """Tokens of the context, and of the K/V cache if memory bounds it, else None. A key's or value's number takes the
    config's bytes / `divisor`: 2 for INT8 instead of bfloat16. The cache may take half of the memory that the weights
    leave: 4 GB hold 131,072 tokens of 32 KB.
    """
    of_text = config.get("text_config")
    inner: dict[str, Any] = of_text if isinstance(of_text, dict) else config
    context = min(AGENT_CONTEXT, _positions(inner))
    token_bytes = _token_bytes(inner)
    if token_bytes is None or Path("/dev/nvidia0").exists():  # a GPU's cache is a share of its own memory
        return context, None
    weights = sum(file.stat().st_size for file in files_of_model(model_dir))
    num_kept = max((free_memory() - weights) // 2 * divisor // token_bytes, _LEAST_CONTEXT)
    if num_kept >= context * _BATCH_SIZE:
        return context, None
    return min(context, num_kept // 256 * 256), num_kept // 256 * 256


def _positions(config: dict[str, Any]) -> int:
    """Positions of a model; if its rotary factors change at a length (`longrope`), the positions up to there."""
    rope = config.get("rope_scaling") or {}
    limits = [config.get("max_position_embeddings")]
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        limits += [rope.get("original_max_position_embeddings"), config.get("original_max_position_embeddings")]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 1), default=AGENT_CONTEXT)


def _token_bytes(config: dict[str, Any]) -> int | None:
    """Most bytes that a token's keys and values take in all layers; None if the config does not say."""
    num_layers, num_heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if not (isinstance(num_layers, int) and isinstance(num_heads, int) and num_heads):
        return None
    head_dim = config.get("head_dim") or (config.get("hidden_size") or 0) // num_heads
    item_bytes = _ITEM_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    return 2 * num_layers * int(config.get("num_key_value_heads") or num_heads) * int(head_dim) * item_bytes or None
