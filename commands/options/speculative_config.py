"""`--speculative-config` of vLLM and `speculative_config` of TensorRT-LLM: their keys become our flags.

`{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}` says as much as
`--spec-decode-algo NGRAM --spec-decode-max-draft-len 5 --max-matching-ngram-size 4`.
"""

import json
from collections.abc import Mapping
from typing import Any

from commands.options.speculation_flags import algorithms
from runtime.util.errors import UsageError

_METHODS = {
    "ngram": "NGRAM",
    "suffix": "SUFFIX",
    "draft_model": "DRAFT_TARGET",
    "draft_target": "DRAFT_TARGET",
    "drafttarget": "DRAFT_TARGET",
    "eagle": "EAGLE3",
    "eagle3": "EAGLE3",
    "mtp": "MTP",
    "dflash": "DFLASH",
    "pard": "PARD",
    "auto": "AUTO",
}
_METHOD_KEYS = ("method", "decoding_type", "algorithm")
_FLAGS = {
    "num_speculative_tokens": "spec_decode_max_draft_len",
    "max_draft_len": "spec_decode_max_draft_len",
    "num_nextn_predict_layers": "spec_decode_max_draft_len",
    "prompt_lookup_max": "max_matching_ngram_size",
    "max_matching_ngram_size": "max_matching_ngram_size",
    "model": "draft_model_dir",
    "speculative_model": "draft_model_dir",
    "speculative_model_dir": "draft_model_dir",
}
_SAID_ANYWAY = {
    "draft_tensor_parallel_size": (1,),
    "prompt_lookup_min": (1,),
    "is_keep_all": (True,),
    "is_use_oldest": (True, False),
    "is_public_pool": (True, False),
    "disable_padded_drafter_batch": (True, False),
    "parallel_drafting": (True, False),
}
"""Keys with the values that change no output here."""
_EXAMPLE = """`--speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'`"""


def parse_speculative_config(text: str) -> dict[str, Any]:
    """Flags by their Python names, of which `spec_decode_algo` chooses the drafter. UsageError for what has no flag."""
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict) or not config:
        raise UsageError(f"`--speculative-config` is no JSON object: {text}", hint=f"{_EXAMPLE} is one")
    return flags_of_config(config)


def flags_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`parse_speculative_config` of an object that was read already."""
    flags: dict[str, Any] = {}
    for key, value in config.items():
        if key in _METHOD_KEYS:
            flags["spec_decode_algo"] = _algorithm(value)
        elif key in _FLAGS:
            flags[_FLAGS[key]] = _checked(key, value)
        elif value not in _SAID_ANYWAY.get(key, ()):
            raise UsageError(
                f"`--speculative-config` has a key that has no meaning here: {key}: {value}",
                hint=f"there are {', '.join((*_METHOD_KEYS[:2], *_FLAGS))}; other settings have flags of their own",
            )
    if config.get("parallel_drafting") is True and flags.get("spec_decode_algo") == "DRAFT_TARGET":
        flags["spec_decode_algo"] = "PARD"  # vLLM's name; heads say by their config that they draft in parallel
    if flags.get("draft_model_dir") in ("ngram", "[ngram]"):  # as vLLM once had it
        del flags["draft_model_dir"]
        flags["spec_decode_algo"] = "NGRAM"
    if not {"spec_decode_algo", "draft_model_dir"} & flags.keys():
        raise UsageError("`--speculative-config` names no method", hint=f"{_EXAMPLE} names one")
    return flags


def _algorithm(method: Any) -> str:
    name = str(method).lower().replace("-", "_")
    found = _METHODS.get(name) or ("MTP" if name.endswith("_mtp") else name.upper())
    if found not in (*algorithms(), "AUTO"):
        raise UsageError(
            f"`--speculative-config` names no method of specdec's: {method}",
            hint=f"there are {', '.join(sorted({*_METHODS} - {'drafttarget', 'eagle'}))}",
        )
    return found


def _checked(key: str, value: Any) -> Any:
    is_model = _FLAGS[key] == "draft_model_dir"
    is_right = isinstance(value, str) if is_model else isinstance(value, int) and not isinstance(value, bool)
    if not is_right or (not is_model and value < 1):
        wanted = "a model's name or directory" if is_model else "a whole number from 1 up"
        raise UsageError(f"`--speculative-config` needs {wanted}: {key}: {value!r}", hint=f"{_EXAMPLE} is one")
    return value
