"""How a checkpoint's or an engine's weights are rounded, and what that changed, in a line each."""

from runtime.config import Quality, Quantization


def described(found: Quantization) -> str:
    """Such as `W4A16 weights in groups of 64`."""
    pieces = []
    if found.quant_algo is not None:
        zeros = ", with zero points" if found.has_zero_point else ""
        groups = "" if found.group_size is None else f" in groups of {found.group_size}"
        source = "" if found.source == "rounded" else f" from {found.source}"
        pieces.append(f"{found.quant_algo} weights{groups}{zeros}{source}")
    if found.kv_cache_quant_algo is not None:
        pieces.append(f"{found.kv_cache_quant_algo} K/V")
    return " and ".join(pieces)


def described_quality(quality: Quality) -> str:
    return (
        f"KL divergence {quality.mean_kl:.2g}, the same first token at {quality.top1_agreement:.2%} of "
        f"{quality.num_tokens:,} tokens of {quality.text}, from {quality.unrounded} unrounded"
    )
