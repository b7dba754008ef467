"""The worker of Hugging Face: `generate`, uncompiled, with its default attention and cache.

Denormals are flushed to zero as in the other systems: random weights produce them, and they are computed slowly.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from scripts.bench.workers.worker import Job, Variant, serve


class StepStreamer(BaseStreamer):
    """Calls `arrived` once per step. What `generate` puts first is the prompt."""

    def __init__(self, arrived: Any) -> None:
        self._arrived = arrived
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self._arrived()
        self._has_prompt = True

    def end(self) -> None:
        pass


def load_model(model: str, dtype: str) -> Any:
    """Load a directory, or a GGUF file, whose weights are then of the dtype."""
    path = Path(model)
    source, file = (path.parent, path.name) if path.is_file() else (path, None)
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), gguf_file=file)
    loaded.generation_config = GenerationConfig(pad_token_id=0)  # jobs say how tokens are chosen, and what ends them
    return loaded.eval()


def load(settings: dict[str, Any]) -> tuple[dict[str, Variant], str]:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(settings["num_threads"])
    torch.set_flush_denormal(True)
    model = load_model(settings["model_dir"], settings["dtype"])

    def generate(job: Job, arrived: Any) -> list[int]:
        ids = torch.tensor([job.prompt])
        torch.manual_seed(job.seed)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=job.max_new_tokens,
            eos_token_id=list(job.end_ids) or None,
            streamer=StepStreamer(arrived),
            do_sample=job.sampling is not None,
            **(asdict(job.sampling) if job.sampling else {}),
        )
        return list(output[0, len(job.prompt) :].tolist())

    return {"none": generate}, f"uncompiled, {model.config._attn_implementation} attention, denormals flushed"


if __name__ == "__main__":
    serve(load)
