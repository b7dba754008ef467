"""`speculative_config` of vLLM and TensorRT-LLM: its keys become our settings (by the names of the commands' flags), or
drafters.

`{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}` is n-gram lookup with drafts of up to 5
tokens and n-grams of up to 4.
"""

from collections.abc import Mapping
from typing import Any

from runtime.drafters.spec import DrafterSpec
from runtime.drafters.specs import DRAFTERS
from runtime.drafters.speculation import Speculation, head_drafter, model_drafter
from runtime.util.errors import UsageError
from runtime.util.words import nearest

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
"""Keys that name no flag, each with the values that are accepted."""
_EXAMPLE = """`{"method": "ngram", "num_speculative_tokens": 5}`"""
_ALGORITHMS = {spec.description.algorithm: spec for spec in DRAFTERS.values() if spec.description.algorithm}
_AUTO = "AUTO"
_OTHER_WORDS = {"drafttarget": "DRAFT_TARGET", "eagle": "EAGLE3"}
_METHODS = {algorithm.lower(): algorithm for algorithm in (*_ALGORITHMS, _AUTO)} | {"draft_model": "DRAFT_TARGET"}


def flags_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flags by their Python names; `spec_decode_algo` chooses the drafter. UsageError for an unknown key."""
    flags: dict[str, Any] = {}
    for key, value in config.items():
        if key in _METHOD_KEYS:
            flags["spec_decode_algo"] = _algorithm(value)
        elif key in _FLAGS:
            flags[_FLAGS[key]] = _checked(key, value)
        elif value not in _SAID_ANYWAY.get(key, ()):
            keys = (*_METHOD_KEYS[:2], *_FLAGS)
            near = nearest(str(key), keys)
            raise UsageError(
                f"speculative_config has a key that has no meaning here: {key}: {value}",
                hint=("" if near is None else f"perhaps `{near}`; ")
                + f"there are {', '.join(keys)}; other settings have flags of their own",
            )
    if config.get("parallel_drafting") is True and flags.get("spec_decode_algo") == "DRAFT_TARGET":
        flags["spec_decode_algo"] = "PARD"  # vLLM's name; heads say by their config that they draft in parallel
    if flags.get("draft_model_dir") in ("ngram", "[ngram]"):  # as vLLM once had it
        del flags["draft_model_dir"]
        flags["spec_decode_algo"] = "NGRAM"
    if not {"spec_decode_algo", "draft_model_dir"} & flags.keys():
        raise UsageError("speculative_config names no method", hint=f"{_EXAMPLE} names one")
    return flags


def speculation_of_config(config: Mapping[str, Any], model: str | None) -> Speculation:
    """Drafters for an `LLM` of this model; `model` is None for an engine. UsageError as in `flags_of_config`."""
    if not isinstance(config, Mapping) or not config:
        raise UsageError(f"speculative_config is no dict with keys: {config!r:.100}", hint=f"{_EXAMPLE} is an example")
    values = flags_of_config(config)
    algorithm, draft_model = values.pop("spec_decode_algo", None), values.pop("draft_model_dir", None)
    if algorithm == _AUTO:
        specs = [spec for spec in DRAFTERS.values() if spec.is_in_auto]
        trained = model_drafter(draft_model) if draft_model else head_drafter(model) if model else None
        specs += [] if trained is None else [type(trained)]
        return Speculation(tuple(_made(spec, values, draft_model, model) for spec in specs))
    spec = type(model_drafter(draft_model)) if algorithm is None else _ALGORITHMS[algorithm]
    return Speculation((_made(spec, values, draft_model, model),))


def _made(
    spec: type[DrafterSpec], values: Mapping[str, Any], draft_model: str | None, model: str | None
) -> DrafterSpec:
    settings = spec.settings()
    given: dict[str, Any] = {}
    for name, setting in settings.items():
        value = values.get(setting.leader_flag or "", setting.leader_default)
        if name in spec.models():
            value = draft_model or (model if spec.is_in_model(model) else None)
            if value is None:
                title = spec.description.title
                raise UsageError(f"speculative_config names no model: {title}", hint='`"model": DIRECTORY` names one')
        if value is not None:
            given[name] = value
    known = {setting.leader_flag for setting in settings.values()}
    for flag, value in values.items():
        if flag not in known:
            title = spec.description.title
            raise UsageError(
                f"speculative_config has a setting that {title} has no use for, {flag}: {value}", hint="leave it out"
            )
    return spec(**given)


def _algorithm(method: Any) -> str:
    name = str(method).lower().replace("-", "_")
    found = (_METHODS | _OTHER_WORDS).get(name) or ("MTP" if name.endswith("_mtp") else None)
    if found is None:
        near = nearest(name, _METHODS)
        raise UsageError(
            f"speculative_config names no method of specdec's: {method}",
            hint=("" if near is None else f"perhaps `{near}`; ") + f"there are {', '.join(sorted(_METHODS))}",
        )
    return found


def _checked(key: str, value: Any) -> Any:
    is_model = _FLAGS[key] == "draft_model_dir"
    is_right = isinstance(value, str) if is_model else isinstance(value, int) and not isinstance(value, bool)
    if not is_right or (not is_model and value < 1):
        wanted = "a model's name or directory" if is_model else "a whole number from 1 up"
        example = f'`"{key}": "demo-draft"`' if is_model else f'`"{key}": 5`'
        raise UsageError(f"speculative_config needs {wanted}: {key}: {value!r}", hint=f"{example} is an example")
    return value
