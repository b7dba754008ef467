"""Rotary positions: transformers' parameters from the metadata and the tensors of a GGUF file."""

import math
import struct
from math import prod
from pathlib import Path
from typing import Any

from runtime.checkpoint.gguf.metadata import Metadata
from runtime.checkpoint.gguf.reader import ORIGINAL, GGUFTensor, damaged
from runtime.util.errors import SpecDecError

ORIGINAL_CONTEXT, ATTENTION_FACTOR = "rope.scaling.original_context_length", "rope.scaling.attn_factor"
ROPE_FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
LONGROPE = {LONG, SHORT}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary parameters that all models with factors share, Llama 3.1 and later; files do not have them."""


def rope_of(model: Metadata, *, has_yarn: bool = True) -> dict[str, Any]:
    """Rotary parameters. As in llama.cpp, a factor without a type is linear, and may be under an older key.

    SpecDecError for a type or a factor that is not supported; yarn is not, unless `has_yarn`.
    """
    theta, kind = model.get("rope.freq_base", 10000.0), model.find("rope.scaling.type") or "linear"
    factor = model.get("rope.scaling.factor", 0) or model.get("rope.scale_linear", 0) or 1
    factors = model.header.tensors.get(ROPE_FACTORS)
    if kind == "yarn" and factors is None and has_yarn:
        if model.find(ORIGINAL_CONTEXT) == 0:
            model.refuse(ORIGINAL_CONTEXT)
        return _yarn_rope(model, theta, float(model.get("rope.scaling.factor")))
    if kind not in ("none", "linear"):
        model.refuse("rope.scaling.type")
    if factors is not None:
        if kind == "linear" and factor != 1:
            model.refuse("rope.scaling.factor" if model.find("rope.scaling.factor") else "rope.scale_linear")
        return _llama3_rope(factors, theta, model)
    if kind == "none" or factor == 1:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "linear", "rope_theta": theta, "factor": float(factor)}


def _yarn_rope(model: Metadata, theta: float, factor: float) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": model.get(ORIGINAL_CONTEXT, model.get("context_length")),
        "beta_fast": model.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": model.get("rope.scaling.yarn_beta_slow", 1.0),
    }


def own_factors(path: Path) -> SpecDecError:
    return SpecDecError(f"GGUF models with rotary factors of their own are not read: {path}", hint=ORIGINAL)


def numbers_of(factors: GGUFTensor, path: Path) -> list[float]:
    if factors.type.name != "F32" or not factors.num_bytes:
        raise own_factors(path)
    with factors.path.open("rb") as file:
        file.seek(factors.offset)
        return list(struct.unpack(f"<{prod(factors.shape)}f", file.read(factors.num_bytes)))


def _llama3_rope(factors: GGUFTensor, theta: float, model: Metadata) -> dict[str, Any]:
    """Parameters that give the file's factors. A file of Llama 3.1 or later has a factor for each pair of a head's
    numbers, and not the parameters from which the factors were computed. SpecDecError if no such parameters do.
    """
    found, path = numbers_of(factors, model.path), model.path
    num_pairs = model.get("rope.dimension_count", model.head_dim) // 2
    if len(found) != num_pairs or min(found) <= 0:
        raise damaged(
            f"`{ROPE_FACTORS}` has {len(found)} factors, the smallest {min(found):g}, and the model needs "
            f"{num_pairs} factors above 0: {path}"
        )
    wanted = [_llama3_factor(theta ** (i / len(found)) * 2 * math.pi, max(found)) for i in range(len(found))]
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, wanted, strict=True)):
        raise own_factors(path)
    return {"rope_type": "llama3", "rope_theta": theta, "factor": max(found), **_LLAMA3}


def _llama3_factor(wavelength: float, factor: float) -> float:
    """Factor by which a wavelength is stretched: 1 if short, `factor` if long, interpolated in between."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / wavelength
    if turns > high or turns < low:
        return 1.0 if turns > high else factor
    share = (turns - low) / (high - low)
    return 1 / ((1 - share) / factor + share)
