"""Random Llamas, on which benchmarks measure times."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA_101M = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 16000,
    "max_position_embeddings": 4096,
}


def save_random_llama(directory: Path, dtype: str, shape: dict[str, int]) -> None:
    """Save a Llama with random weights, the same on every call; `shape` holds fields of its Hugging Face config."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape)).to(getattr(torch, dtype)).save_pretrained(directory)
