"""Vocabularies in GGUF files, texts, and the tokens that llama.cpp makes of them (`data/llamacpp_tokens.json`).

`14d0ecb4:scripts/tools/llamacpp_tokens.py` made the data. The small vocabularies were learned from the texts
without splitting them, so that hardly a split is without a trace in the tokens.
"""

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from runtime.checkpoint.gguf.tokenizer import merges_by_score

DATA = Path(__file__).parent / "data" / "llamacpp_tokens.json"
REAL = Path(os.environ.get("SPECDEC_REAL_DIR", "~/.cache/specdec-real")).expanduser()
Edit = Callable[[gguf.GGUFWriter], None]


@cache
def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def write_file(path: Path, num_tokens: int, edit: Edit) -> Path:
    """A model of one layer, as llama.cpp wants one before it reads a vocabulary."""
    writer, width = gguf.GGUFWriter(path, "llama"), 32
    writer.add_block_count(1)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width)
    edit(writer)
    writer.add_tensor("token_embd.weight", np.zeros((num_tokens, width), np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((width, width), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_byte_level(path: Path, pre: str, edit: Edit = lambda writer: None) -> Path:
    """The small vocabulary, split as the pre-tokenizer of that name splits."""
    vocabulary = data()["byte_level"]

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(vocabulary["tokens"])
        writer.add_token_types(vocabulary["types"])
        writer.add_token_merges(vocabulary["merges"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        edit(writer)

    return write_file(path, len(vocabulary["tokens"]), write)


def write_sentencepiece(path: Path, *, add_space_prefix: bool | None, edit: Edit = lambda writer: None) -> Path:
    vocabulary = data()["sentencepiece"]

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(vocabulary["tokens"])
        writer.add_token_types(vocabulary["types"])
        writer.add_token_scores([-float(i) for i in range(len(vocabulary["tokens"]))])
        if add_space_prefix is not None:
            writer.add_add_space_prefix(add_space_prefix)
        edit(writer)

    return write_file(path, len(vocabulary["tokens"]), write)


def write_gemma_4(path: Path) -> Path:
    """The same vocabulary, with its merges, as Gemma 4's files have theirs."""
    vocabulary = data()["sentencepiece"]
    scores = [-float(i) for i in range(len(vocabulary["tokens"]))]

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(vocabulary["tokens"])
        writer.add_token_types(vocabulary["types"])
        writer.add_token_scores(scores)
        writer.add_token_merges([" ".join(pair) for pair in merges_by_score(vocabulary["tokens"], scores)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(True)

    return write_file(path, len(vocabulary["tokens"]), write)
