"""Spellings of flags: hyphens or underscores, others' and former names, and flags without effect."""

from itertools import islice

# TensorRT-LLM's name, or one of before -> ours, after underscores have become hyphens.
_ALIASES = {
    "test-trt-llm": "test-engine",
    "prompt-lookup-config": "ngram-config",
    "tensorrt-llm-rouge1-threshold": "rouge1-threshold",
    "draft-len": "draft-len-mode",
    "spec-decode-nextn": "spec-decode-max-draft-len",
    "eagle-model-dir": "draft-model-dir",
    "prompt": "input-text",
    "max-tokens": "max-output-len",
    "max-new-tokens": "max-output-len",
    "truncate-prompt-tokens": "max-input-length",
    "num-draft-tokens": "spec-decode-max-draft-len",
    "draft-model": "draft-model-dir",
    "model": "model-dir",
    "max-num-seqs": "max-batch-size",
    "max-model-len": "max-seq-len",
    "awq-block-size": "group-size",
    "kv-cache-fraction": "kv-cache-free-gpu-memory-fraction",
}

# Flags of TensorRT-LLM's commands that mean nothing here, and whether a value follows.
_WITHOUT_EFFECT = {
    "gemm-plugin": True,
    "gpt-attention-plugin": True,
    "nccl-plugin": True,
    "context-fmha": True,
    "remove-input-padding": True,
    "kv-cache-type": True,
    "reduce-fusion": True,
    "multiple-profiles": True,
    "max-num-tokens": True,
    "opt-num-tokens": True,
    "profiling-verbosity": True,
    "workers": True,
    "load-model-on-cpu": False,
    "log-level": True,
    "cuda-graph-mode": False,
    "multi-block-mode": True,
    "enable-context-fmha-fp32-acc": False,
    "data-type": True,
    "hf-data-type": True,
    "hf-device-map-auto": False,
    "use-gpu-direct-storage": False,
    "fail-fast-on-attention-window-too-large": False,
}


# Flags whose value may be an empty text, or that say themselves what is wrong with one.
_OF_TEXT = frozenset({"input-text", "stop-words", "bad-words", "system"})

# What one command calls otherwise than the others.
_OF_COMMAND = {
    "summarize": {"max-output-len": "output-len"},
    "bench": {"max-output-len": "output-len", "model-dir": "model", "max-concurrency": "concurrency"},
}

# Flags that others' command lines give several values, one after the other.
_OF_SEVERAL = frozenset({"goodput"})


def normalize_name(name: str, command: str = "") -> str:
    """One spelling for every option of a command: hyphens, and our name where others have another."""
    name = name.replace("_", "-")
    name = _ALIASES.get(name, name)
    return _OF_COMMAND.get(command, {"output-len": "max-output-len"}).get(name, name)


def one_value_each(arguments: list[str], command: str) -> list[str]:
    """`--goodput ttft:200 tpot:50`, as vLLM's users write, is `--goodput ttft:200 --goodput tpot:50`."""
    repeated: list[str] = []
    current = ""
    for argument in arguments:
        name = normalize_name(argument.removeprefix("--"), command) if argument.startswith("--") else ""
        if name:
            current = argument if name in _OF_SEVERAL else ""
        elif current and repeated[-1] != current:
            repeated.append(current)
        repeated.append(argument)
    return repeated


def empty_value(arguments: list[str], options_with_value: frozenset[str], command: str) -> str | None:
    """The first flag whose value is empty, or "" for an argument that is: as a path it would be the current directory.

    `run`'s arguments are texts.
    """
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        name = normalize_name(flag.removeprefix("--"), command)
        if argument == "--" or (not argument and command == "run"):
            return None
        if not argument:
            return ""
        if not flag.startswith("--") or name not in options_with_value:
            continue
        if not (value if equals else next(rest, flag)) and name not in _OF_TEXT:
            return flag
    return None


def split_flags_without_effect(arguments: list[str], options_with_value: frozenset[str]) -> tuple[list[str], list[str]]:
    """The arguments that mean something, and the names of the flags that do not.

    A value is taken along: `--gemm_plugin=float16` and `--gemm_plugin float16` both disappear. Nothing after `--` is
    touched, and neither is one of the command's own `options_with_value` (normalized names) with its value: a prompt
    may be `--workers`.
    """
    kept: list[str] = []
    dropped: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return [*kept, argument, *rest], dropped
        flag, equals, _ = argument.partition("=")
        name = normalize_name(flag.removeprefix("--"))
        if not flag.startswith("--") or name not in _WITHOUT_EFFECT or name in options_with_value:
            kept.append(argument)
            if flag.startswith("--") and name in options_with_value and not equals:
                kept.extend(islice(rest, 1))
            continue
        dropped.append(flag)
        if _WITHOUT_EFFECT[name] and not equals:
            next(rest, None)
    return kept, dropped
