"""Models to draft with, made from a target, and how their engines are built."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

WITHOUT_DRAFTS = {"max_draft_len": 0, "speculative_decoding_mode": "none", "max_seq_len": 160}
WITH_DRAFTS = {"max_draft_len": 10, "speculative_decoding_mode": "draft_tokens_external", "max_seq_len": 170}
MakeDraftEngineDir = Callable[..., Path]


def with_noise(model: PreTrainedModel, scale: float) -> PreTrainedModel:
    """The model a little off, so that it agrees with itself often and not always."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def padded(model: PreTrainedModel, num_ids: int) -> PreTrainedModel:
    """The model with ids beyond its tokenizer's that it generates as often as any other."""
    size = model.config.vocab_size
    model.resize_token_embeddings(size + num_ids, mean_resizing=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight[size:] = 0.3 * torch.randn(num_ids, module.weight.shape[1], generator=generator)
    return model
