"""Random Llamas, and calls that take turns: what the comparison with peers shares with its workers."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

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


def alternate(calls: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Median milliseconds of each call; the calls take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(runs + 3):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if run >= 3:
                times[name].append(time.perf_counter() - start)
    return {name: median(values) * 1e3 for name, values in times.items()}
