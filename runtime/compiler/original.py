"""A model as it was before it was converted: transformers' own, of its directory or of the numbers of a GGUF file."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from runtime.checkpoint import read_numbers
from runtime.compiler.pretrained import model_class, parse_pretrained_config
from runtime.gguf import is_gguf
from runtime.locks import MODEL_INIT_LOCK


def load_original(model_dir: Path, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """The model in `dtype`, with transformers' default attention unless one is named.

    A GGUF file's weights are the numbers that they mean: transformers reads them by a package that need not be there,
    and not those of all files. Raises whatever transformers raises.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if is_gguf(model_dir):
        config, weights = read_numbers(model_dir, dtype)
        pretrained = parse_pretrained_config(config, str(model_dir))
        with MODEL_INIT_LOCK:
            made: PreTrainedModel = model_class(pretrained).from_pretrained(
                None, config=pretrained, state_dict=weights, dtype=dtype, attn_implementation=attention
            )
        return made
    with MODEL_INIT_LOCK:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation=attention, local_files_only=True, trust_remote_code=False
        )
    return loaded
