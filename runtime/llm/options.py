"""Arguments of an `LLM`: build options of a model's engine, vLLM's names for them, and the default drafter."""

import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from runtime.builder.engine_options import OTHER_NAMES, EngineOptions, value_of
from runtime.builder.profile import profile_for_model
from runtime.checkpoint.config import USUAL_MAX_DRAFT_LEN, check_arguments
from runtime.drafters.speculation import Speculation
from runtime.drafters.speculative_config import speculation_of_config
from runtime.engine.engine import KVCacheConfig
from runtime.util.errors import SpecDecError, UsageError
from runtime.util.words import nearest


class LLMOptions(EngineOptions, total=False):
    """Arguments of an `LLM` that an `AsyncLLM` has too."""

    tokenizer: str | Path | None
    kv_cache: KVCacheConfig | None
    max_num_tokens: int
    device_ids: Seq[int] | None
    seed: int | None
    speculative_config: Mapping[str, Any] | None
    profile: str | Path | None


_INSTEAD = {
    "disable_log_stats": "nothing: an output has its own `stats`",
    "enable_chunked_prefill": "`max_num_tokens`: prompts are always computed in parts",
    "enable_prefix_caching": "`kv_cache=KVCacheConfig(block_reuse={value})`; True is the default",
    "enforce_eager": '`compiler="none"`',
    "gpu_memory_utilization": "`kv_cache=KVCacheConfig(free_gpu_memory_fraction={value})`, a share of the free memory",
    "load_format": "nothing: the files of a model say what they are",
    "max_num_batched_tokens": "`max_num_tokens={value}`",
    "num_gpu_blocks_override": "`kv_cache=KVCacheConfig(max_tokens=N)`, which counts tokens",
    "pipeline_parallel_size": "`tensor_parallel_size={value}`",
    "skip_tokenizer_init": "an engine that was built without a tokenizer",
    "swap_space": "nothing: a preempted request is computed again",
    "trust_remote_code": "nothing: code that comes with a model is never run",
}
"""vLLM's arguments of an `LLM` that specdec lacks, and our replacement for each; `{value}` is the given value."""


def check_not_empty(options: Mapping[str, Any]) -> None:
    """UsageError for an empty text: as a path it would be the current directory."""
    for name, value in options.items():
        if value == "":
            raise UsageError(f"{name} has an empty value: ''", hint="leave it out")


def _instead_of(name: str, value: Any) -> str:
    if name in _INSTEAD:
        return f"use {_INSTEAD[name].format(value=value)}"
    near = nearest(name, LLMOptions.__annotations__)
    return f"perhaps `{near}`" if near else "docs/python.md lists the arguments"


def usual_speculation(
    config: Mapping[str, Any] | None, profile: str | Path | None, model: str | None
) -> Speculation | None:
    """Speculation of calls that name no drafter, by a config or by the profile of a `model`. None without either, and
    for an engine (`model` None), whose profile is read when the engine is open.
    """
    if config is not None and profile is not None:
        raise UsageError(
            f"speculative_config and profile both say how to draft: {profile}", hint="leave one of the two out"
        )
    if config is not None:
        return speculation_of_config(config, model)
    return None if profile is None or model is None else profile_for_model(Path(profile), model).speculation


def engine_options_for(speculation: Speculation, options: EngineOptions) -> EngineOptions:
    """The build options, and the settings that these drafters need from a model's engine where no option sets them."""
    needed: EngineOptions = {"max_draft_len": max(speculation.max_draft_len or 0, USUAL_MAX_DRAFT_LEN)}
    if speculation.needs_copy:
        needed["self_draft"] = "int4"
    if heads := speculation.read_heads():
        needed["head"] = heads[0].directory
    return needed | options


@contextmanager
def by_given_names(options: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, errors name an option as it was given: `max_model_len`, if it was not `max_seq_len`."""
    names = {OTHER_NAMES[name]: name for name in options if name in OTHER_NAMES}
    try:
        yield
    except SpecDecError as error:
        text, hint = error.message, error.hint
        for own, name in names.items():
            text = re.sub(rf"\b{own}\b", name, text)
            hint = hint and re.sub(rf"\b{own}\b", name, hint)
        if (text, hint) == (error.message, error.hint):
            raise
        raise type(error)(text, hint=hint, code=error.code, **error.values) from error


def own_names(options: Mapping[str, Any]) -> EngineOptions:
    """Options under our names. UsageError for an unknown name, a value that the option cannot have, an empty text, or
    an option given under both of its names.
    """
    check_not_empty(options)
    engine: dict[str, Any] = {}
    given: dict[str, str] = {}
    for name, value in options.items():
        if name not in EngineOptions.__annotations__:
            raise UsageError(f"LLM has no argument of this name: {name}", hint=_instead_of(name, value))
        own = OTHER_NAMES.get(name, name)
        if own in engine:
            raise UsageError(
                f"{given[own]} and {name} are two names of one option: {engine[own]}, {value}", hint="give one of them"
            )
        engine[own], given[own] = value_of(own, value), name
        check_arguments(EngineOptions, {name: engine[own]})  # by the name that was given
    return cast(EngineOptions, engine)
