"""How a checkpoint's or an engine's weights are rounded, and what that changed, in a line each."""

from typing import Any

from runtime.config import Quantization


def described(found: Quantization) -> str:
    """Such as `W4A16 weights in groups of 64, activations int8`."""
    pieces = []
    if found.quant_algo is not None:
        zeros = ", with zero points" if found.has_zero_point else ""
        groups = "" if found.group_size is None else f" in groups of {found.group_size}"
        source = "" if found.source == "rounded" else f" from {found.source}"
        pieces.append(f"{found.quant_algo} weights{groups}{zeros}{source}, activations {found.activations}")
    if found.kv_cache_quant_algo is not None:
        pieces.append(f"{found.kv_cache_quant_algo} K/V")
    return " and ".join(pieces)


def described_quality(quality: dict[str, Any]) -> str:
    """Of its JSON."""
    return (
        f"KL divergence {quality['mean_kl']:.2g} from {quality['unrounded']} unrounded, the same most probable token "
        f"at {quality['top1_agreement']:.2%} of {quality['num_tokens']:,} tokens of {quality['text']}"
    )
