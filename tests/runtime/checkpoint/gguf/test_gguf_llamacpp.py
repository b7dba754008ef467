"""A GGUF file's linear rotary scaling is computed as llama.cpp computes it."""

import json
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from quantized import GGUF_FAMILIES, Q, save_gguf, write_tokenizer
from transformers import PreTrainedTokenizerFast

from runtime.builder.reference import load_original

FACTOR = 4.0


def log_probs_of_llamacpp(path: Path, tokens: list[int], vocab_size: int) -> torch.Tensor:
    """(vocab,): of the token after these."""
    xllamacpp: Any = pytest.importorskip("xllamacpp", reason="xllamacpp, which is llama.cpp in a wheel, is absent")
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 256, 1, False, 0
    params.port, params.cpuparams.n_threads = 0, 1
    server = xllamacpp.Server(params)
    asked = {"prompt": tokens, "n_predict": 8, "n_probs": vocab_size, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.listening_address}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        found = json.loads(answer.read())["completion_probabilities"][0]["top_logprobs"]
    result = torch.full((vocab_size,), torch.nan)
    for one in found:
        result[one["id"]] = one["logprob"]
    return result


def write(writer: gguf.GGUFWriter, *, tokenizer: PreTrainedTokenizerFast, is_scaled: bool) -> None:
    write_tokenizer(writer, tokenizer)
    if is_scaled:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(FACTOR)


def test_linear_scaling_is_llamacpps(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Likelihoods as near as without scaling, and far from the model without it. llama.cpp rounds activations
    of the last layer to 8 bits. (Its server leaves out tokens of half a character: here none is most probable.)"""
    tokens, ours, theirs = [5 + i * 13 % 250 for i in range(120)], {}, {}
    for is_scaled in (True, False):
        path = tmp_path / f"{is_scaled}.gguf"
        save_gguf(path, Q.F32, vocab_size=len(tokenizer), edit=partial(write, tokenizer=tokenizer, is_scaled=is_scaled))
        theirs[is_scaled] = log_probs_of_llamacpp(path, tokens, len(tokenizer))
        with torch.inference_mode():
            logits = load_original(path, torch.float32)(torch.tensor([tokens])).logits[0, -1]
        ours[is_scaled] = logits.log_softmax(-1)
    for is_scaled in (True, False):
        torch.testing.assert_close(ours[is_scaled], theirs[is_scaled], atol=0.05, rtol=0)
        assert float((ours[is_scaled] - theirs[not is_scaled]).abs().max()) > 1


def write_yarn(writer: gguf.GGUFWriter, *, tokenizer: PreTrainedTokenizerFast) -> None:
    write_tokenizer(writer, tokenizer)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(FACTOR)
    writer.add_rope_scaling_orig_ctx_len(64)


YARN = [
    pytest.param(name, True, marks=pytest.mark.slow) for name in ("smollm3", "olmo2", "ernie4_5", "glm4", "mixtral")
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("architecture", "has_yarn"), [*((name, False) for name in GGUF_FAMILIES), ("qwen3", True), ("llama", True), *YARN]
)
def test_families_are_llamacpps(
    architecture: str, has_yarn: bool, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Past the windows, where the most probable token is a whole character; after another token they are far away."""
    path, tokens = tmp_path / "model.gguf", [5 + i * 13 % 250 for i in range(130)]
    write = partial(write_yarn if has_yarn else write_tokenizer, tokenizer=tokenizer)
    save_gguf(path, Q.F32, architecture=architecture, vocab_size=len(tokenizer), edit=write)
    with torch.inference_mode():
        ours = load_original(path, torch.float32)(torch.tensor([tokens])).logits[0].log_softmax(-1)
    best = tokenizer.batch_decode(ours.argmax(-1)[:, None])
    last = next(i for i in range(110, 130) if "\ufffd" not in best[i])
    theirs = log_probs_of_llamacpp(path, tokens[: last + 1], len(tokenizer))
    torch.testing.assert_close(ours[last], theirs, atol=0.2 if has_yarn else 0.1, rtol=0)  # yarn enlarges the scores
    assert float((ours[last - 1] - theirs).abs().max()) > 1
