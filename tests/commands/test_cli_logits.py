"""`--output-generation-logits` and `--output-logits-npy`: the target's logits of every generated token."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import NGRAM, PROMPTS, Result, assert_valid, draft_model, each, tree
from tiny import eager_logits
from transformers import PreTrainedModel

Run = Callable[..., Result]


@pytest.mark.parametrize("flags", [["--temperature", 0.8], ["--repetition-penalty", 1.5, "--ngram-config", NGRAM]])
def test_logits_are_hugging_faces_and_nan_after_the_end(
    run: Run, llama: PreTrainedModel, draft_engine_dir: Path, flags: list[object], tmp_path: Path
) -> None:
    """Logits are the model's, before penalties and temperature. A draft model drafts unless a lookup is named."""
    drafter = [] if "--ngram-config" in flags else draft_model(draft_engine_dir, "[4,[0],[0],True]")
    arguments = [*each("--input-text", PROMPTS[:3]), *flags, *drafter, "--max-output-len", 20, "--json"]
    free = run(*arguments).document["requests"]
    end_id = free[1]["output_ids"][6]  # or all outputs would be of one length
    path = tmp_path / "x.npy"
    requests = run(*arguments, "--end-id", end_id, "--output-logits-npy", path).document["requests"]
    lengths = [len(request["output_ids"]) for request in requests]
    assert len(set(lengths)) > 1
    assert tree(tmp_path) == ["x_generation.npy"]
    logits = np.load(tmp_path / "x_generation.npy", allow_pickle=False)
    assert logits.dtype == np.float32
    assert logits.shape == (3, max(lengths), 300)
    for row, request, length in zip(logits, requests, lengths, strict=True):
        expected = eager_logits(llama, request["prompt_ids"] + request["output_ids"])[-1 - length : -1]
        torch.testing.assert_close(torch.from_numpy(row[:length]), expected, atol=1e-4, rtol=1e-4)
        assert np.isnan(row[length:]).all()


def test_logprobs_are_those_of_the_logits(run: Run, draft_engine_dir: Path, tmp_path: Path) -> None:
    """The logarithm of the softmax of what `--output-logits-npy` writes, in a document that its schema allows."""
    path = tmp_path / "x.npy"
    arguments = ["--max-output-len", 9, "--temperature", 0.8, "--logprobs", 2, "--output-logits-npy", path, "--json"]
    document = run(*draft_model(draft_engine_dir, "[4,[0],[0],True]"), *arguments).document
    assert_valid("run", document)
    (request,) = document["requests"]
    all_logprobs = torch.log_softmax(torch.from_numpy(np.load(tmp_path / "x_generation.npy"))[0], dim=-1)
    assert [one["token"] for one in request["logprobs"]] == request["output_ids"]
    for row, one in zip(all_logprobs, request["logprobs"], strict=False):
        assert one["logprob"] == pytest.approx(float(row[one["token"]]), abs=1e-5)
        assert [token for token, _ in one["top"]] == row.topk(2).indices.tolist()
