"""`run` with a draft model: the text is Hugging Face's whatever the draft model says, and the JSON tells what ran."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import PROMPTS, Result, Specdec, draft_model, each, ids_of
from draft_models import WITH_DRAFTS, MakeDraftEngineDir, padded
from sentences import Said
from tiny import hf_greedy, make_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

Run = Callable[..., Result]


def test_document_names_the_draft_model_and_its_settings(run: Run, draft_engine_dir: Path) -> None:
    document = run(*draft_model(draft_engine_dir, "[4,[0],[0],True]"), "--max-output-len", 6, "--json").document
    assert document["settings"]["draft_target_model_config"] == {
        "max_draft_len": 4,
        "draft_device_id": 0,
        "draft_device_ids": [0],
        "device_id": 0,
        "device_ids": [0],
        "use_logits": True,
        "draft_engine_dir": str(draft_engine_dir),
    }
    assert document["settings"]["ngram_config"] is None and document["settings"]["drafter"] is None
    built = json.loads((draft_engine_dir / "config.json").read_text())
    assert document["draft_engine"]["engine_dir"] == str(draft_engine_dir)
    assert document["draft_engine"]["build_config"] == built["build_config"]
    assert document["engine"]["engine_dir"] != document["draft_engine"]["engine_dir"]
    plain = run("--max-output-len", 6, "--json").document
    assert plain["draft_engine"] is None and plain["settings"]["draft_target_model_config"] is None


def test_target_as_its_own_draft_model_works_with_a_warning(
    run: Run, llama_engine_dir: Path, tmp_path: Path, said: Said
) -> None:
    plain = run("--max-output-len", 12, "--json").document
    (tmp_path / "link").symlink_to(llama_engine_dir)
    for draft_engine_dir in (llama_engine_dir, tmp_path / "link"):
        result = run(*draft_model(draft_engine_dir), "--max-output-len", 12, "--json")
        assert ids_of(result.document) == ids_of(plain)
        said(result)
        assert result.stderr.count("\n") == 1


@pytest.fixture(scope="session")
def padded_engine_dir(make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A target with 20 ids that its tokenizer lacks, and that it generates."""
    model = padded(make_model("llama", vocab_size=len(tokenizer)), 20)
    return make_draft_engine_dir(model, **WITH_DRAFTS)


def test_padded_target_is_followed_to_its_first_id_of_padding(
    specdec: Specdec, padded_engine_dir: Path, equal_draft_engine_dir: Path
) -> None:
    """The draft model, which cannot read that id, proposes nothing from there on."""
    arguments = ["--engine-dir", padded_engine_dir, *each("--input-text", PROMPTS[:3]), "--end-id", 0]
    arguments += ["--max-output-len", 40, "--json"]
    document = specdec("run", *arguments, *draft_model(equal_draft_engine_dir)).document
    model = AutoModelForCausalLM.from_pretrained(padded_engine_dir.parent / "model", attn_implementation="eager")
    for request in document["requests"]:
        expected = hf_greedy(model, request["prompt_ids"], 40, eos_token_id=0)
        assert request["output_ids"] == expected
        num_readable = next(i for i, token in enumerate(expected) if token >= 300)
        assert request["stats"]["num_spec_steps"] <= num_readable + 1
    assert document["total"]["num_accepted_draft_tokens"] > 0


def test_draft_model_without_a_tokenizer_is_taken_at_its_vocabularys_size(
    run: Run, bare_draft_engine_dir: Path, said: Said
) -> None:
    result = run(*draft_model(bare_draft_engine_dir), "--max-output-len", 12, "--json")
    assert ids_of(result.document) == ids_of(run("--max-output-len", 12, "--json").document)
    assert result.document["total"]["draft_acceptance_rate"] == 1
    said(result)
