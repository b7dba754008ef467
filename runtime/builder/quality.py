"""Quantization error of weights and K/V: the quantized model's probabilities against the unquantized model's."""

import dataclasses
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from runtime.builder.reference import QUANTIZED_KV, Quantized, QuantizeKV, load_original
from runtime.checkpoint.bundle import weights_files
from runtime.checkpoint.checkpoint_dir import open_checkpoint
from runtime.checkpoint.checksums import CONFIG, write_config
from runtime.checkpoint.config import CheckpointConfig, EngineConfig, Quality
from runtime.checkpoint.resolve import read_model_config, resolve_model
from runtime.core.kv_cache import kv_dtype
from runtime.model.model import ModelKind, load_whole_model, split_config
from runtime.model.pretrained import num_positions, parse_pretrained_config
from runtime.text.text import encode_text, load_tokenizer
from runtime.util.errors import SpecDecError
from runtime.util.reading import read_utf8

_NUM_TOKENS = 2000
_WINDOW = 500  # tokens that are computed at once; tokens of other windows are not seen
DEMO_TEXT = "the demo's articles"


def quality_text(checkpoint: CheckpointConfig, file: Path | None) -> tuple[str, str] | None:
    """The text for the comparison, and its name: the file's, or for the demo a text of its own. None if there is no
    text, or no unquantized model to compare with. SpecDecError for a file that cannot be used.
    """
    unquantized = None if checkpoint.quantization is None else checkpoint.quantization.unrounded
    if file is not None:
        text = read_utf8(file)
        if unquantized is None:
            raise SpecDecError(
                "the checkpoint does not say which model it was quantized from, so there is nothing to compare it with",
                hint="leave the text out: the model was quantized before it was converted, or not at all",
                code="no_unquantized_model",
            )
        return text, file.name
    if unquantized is None or Path(unquantized) != resolve_model("demo").resolve():
        return None
    return demo_text(), DEMO_TEXT


def demo_text() -> str:
    articles = Path(str(files("runtime") / "demo" / "articles.jsonl")).read_text(encoding="utf-8").splitlines()
    return "\n\n".join(json.loads(line)["article"] for line in articles)


def measure_quality(checkpoint_dir: Path, text: str, name: str) -> Quality:
    """Run both models on the first 2,000 tokens of a text, by transformers in float32, so that only quantization
    differs: of weights, of keys and values, and of activations. SpecDecError if the unquantized model has been moved or
    its config changed, or if the text has fewer than two tokens.
    """
    checkpoint = open_checkpoint(checkpoint_dir)
    assert checkpoint.quantization is not None and checkpoint.quantization.unrounded is not None
    unquantized_dir = Path(checkpoint.quantization.unrounded)
    if not unquantized_dir.exists() or read_model_config(unquantized_dir) != checkpoint.pretrained_config:
        raise SpecDecError(
            f"the model that the checkpoint was quantized from is no longer there: {unquantized_dir}",
            hint="convert it again, or leave the text out",
            code="no_unquantized_model",
        )
    pretrained = parse_pretrained_config(checkpoint.pretrained_config, str(checkpoint_dir / CONFIG))
    tokens = encode_text(load_tokenizer(checkpoint_dir, checkpoint.pretrained_config), text)[:_NUM_TOKENS]
    if len(tokens) < 2:
        raise SpecDecError(f"the text has too few tokens for a comparison: {len(tokens)}", hint="give a longer text")
    algorithm = checkpoint.quantization.kv_cache_quant_algo
    attention = "eager" if algorithm is None else QUANTIZED_KV
    ranks = [checkpoint_dir / name for name in weights_files(checkpoint.mapping)]
    splitting = split_config(pretrained, checkpoint.mapping.tp_size)
    kind = ModelKind(pretrained, torch.float32, attention, checkpoint.quantization, splitting)
    quantized = load_whole_model(kind, ranks)
    quantization = {} if algorithm is None else {"quantize_kv": Quantized(kv_dtype(checkpoint.dtype, algorithm))}
    unquantized = load_original(unquantized_dir, torch.float32, "eager")
    window = min(_WINDOW, num_positions(pretrained) or _WINDOW)
    divergence, num_same = 0.0, 0
    pairs = zip(
        _log_probs(quantized, tokens, window, **quantization), _log_probs(unquantized, tokens, window), strict=True
    )
    for ours, theirs in pairs:
        divergence += float((theirs.exp() * (theirs - ours)).sum())
        num_same += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
    return Quality(len(tokens), divergence / len(tokens), num_same / len(tokens), _shown(unquantized_dir), name)


def _shown(unquantized_dir: Path) -> str:
    return "demo" if unquantized_dir == resolve_model("demo").resolve() else str(unquantized_dir)


def _log_probs(model: PreTrainedModel, tokens: list[int], window: int, **quantization: QuantizeKV) -> Iterator[Tensor]:
    """Log-probabilities float32 [window, vocab], one window after another."""
    for start in range(0, len(tokens), window):
        with torch.inference_mode():
            ids = torch.tensor([tokens[start : start + window]])
            logits = model(input_ids=ids, use_cache=False, **quantization).logits[0]
        yield logits.float().log_softmax(-1)


def record_quality(engine_dir: Path, config: EngineConfig, quality: Quality) -> EngineConfig:
    """Write the quantization error of its checkpoint into an engine's `config.json`."""
    return write_config(engine_dir, dataclasses.replace(config, quality=quality))
