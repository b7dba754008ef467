"""The spellings TensorRT-LLM's users have in their fingers, and the commands of its documents, pasted."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import NGRAM_RECORD, PROMPT, Result, Specdec, ids_of
from sentences import Said
from shared import once
from tiny import hf_greedy, make_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast

# Prompt-Lookup, before and after its move into one document, and NGram: convert, build, run, summarize.
WITH_SPACES = """
python3 examples/models/core/llama/convert_checkpoint.py \\
    --model_dir ./model \\
    --output_dir ./ckpt-target \\
    --dtype float16

trtllm-build \\
    --checkpoint_dir ./ckpt-target \\
    --output_dir ./target-engine \\
    --gemm_plugin float16 \\
    --use_paged_context_fmha enable \\
    --speculative_decoding_mode draft_tokens_external \\
    --max_draft_len 10 \\
    --max_batch_size 4 \\
    --max_input_len 3200 \\
    --max_seq_len 4800

python3 examples/run.py \\
    --tokenizer_dir ./model \\
    --engine_dir ./target-engine \\
    --ngram_config "[10,2,[0]]" \\
    --max_output_len 32 \\
    --kv_cache_enable_block_reuse \\
    --input_text "How does Draft-Sampling work?"

python examples/summarize.py \\
    --test_hf \\
    --test_trt_llm \\
    --check_accuracy \\
    --hf_model_dir ./model \\
    --engine_dir ./target-engine \\
    --batch_size 1 \\
    --ngram_config "[10,2,[0]]" \\
    --kv_cache_enable_block_reuse
"""
WITH_EQUALS = re.sub(r"(--[a-z_]+) (?=[^ \\])", r"\1=", WITH_SPACES)
# Draft-Target-Model: the target comes from the commands above; the draft engine has no draft length.
DRAFT_ENGINE = """
python3 convert_checkpoint.py \\
    --model_dir=./model \\
    --output_dir=./ckpt-draft \\
    --dtype=float16

trtllm-build \\
    --checkpoint_dir ./ckpt-draft \\
    --output_dir=./draft-engine \\
    --gemm_plugin=float16 \\
    --use_paged_context_fmha=enable \\
    --max_batch_size=4 \\
    --max_input_len=3200 \\
    --max_seq_len=4800
"""
DRAFT_TARGET_MODEL = """
python3 ../run.py \\
    --tokenizer_dir ./model \\
    --draft_engine_dir ./draft-engine \\
    --engine_dir ./target-engine \\
    --draft_target_model_config="[4,[0],[1],True]" \\
    --max_output_len=32 \\
    --kv_cache_enable_block_reuse \\
    --kv_cache_free_gpu_memory_fraction=0.4 \\
    --output_generation_logits \\
    --input_text="How does Draft-Sampling work?"
"""
LEADER_MODE = (
    "python3 examples/llm-api/quickstart_advanced.py --max_matching_ngram_size=2 --spec_decode_nextn=4",
    "python3 examples/llm-api/quickstart_advanced.py \\\n    --spec_decode_max_draft_len 4 \\\n"
    "    --max_matching_ngram_size 2 \\\n    --disable_overlap_scheduler \\\n    --disable_kv_cache_reuse",
)
PROGRAMS = {
    "convert_checkpoint.py": "convert", "trtllm-build": "build", "run.py": "run", "summarize.py": "summarize",
    "quickstart_advanced.py": "run",
}  # fmt: skip
# What keeps a test short: no compilation, little output, and a threshold that random weights reach.
SHORTER = {
    "convert": [],
    "build": ["--compiler", "none"],
    "run": [],
    "summarize": ["--max_ite", "2", "--output_len=8", "--tensorrt_llm_rouge1_threshold", "0"],
}


def pasted(document: str) -> list[list[str]]:
    """A document's commands with the programs replaced, as arguments of `specdec`."""
    commands = []
    for lines in document.replace("\\\n", " ").splitlines():
        if words := shlex.split(lines):
            program = next(i for i, word in enumerate(words) if Path(word).name in PROGRAMS)
            commands.append([PROGRAMS[Path(words[program]).name], *words[program + 1 :]])
    return commands


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A tiny model with the positions that the documents' engines have."""
    directory = tmp_path_factory.mktemp("documents") / "model"
    make_model("llama", vocab_size=len(tokenizer), max_position_embeddings=8192).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> Path:
    (tmp_path / "model").symlink_to(model_dir)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands_of_the_ngram_documents_run(specdec: Specdec, in_directory: Path) -> None:
    results: dict[str, Result] = {}
    for command, *arguments in pasted(WITH_SPACES):
        results[command] = specdec(command, *arguments, *SHORTER[command])
        assert results[command].exit_code == 0, results[command].stderr
    assert list(results) == ["convert", "build", "run", "summarize"]
    assert results["build"].stderr.count("--gemm_plugin") == 1
    config = json.loads((in_directory / "target-engine" / "config.json").read_text())
    assert config["dtype"] == "float16"
    assert config["build_config"]["max_seq_len"] == 4810
    assert 'Input [Text 0]: "How does Draft-Sampling work?"' in results["run"].stdout
    assert "accuracy check passed" in results["summarize"].stdout
    assert "Hugging Face" in results["summarize"].stdout


@pytest.fixture
def with_engines(specdec: Specdec, in_directory: Path, shared: Path) -> Path:
    """The directory after the commands that come before `run.py` in the draft model's document."""

    def make(directory: Path) -> None:
        for command, *arguments in [*pasted(WITH_EQUALS)[:2], *pasted(DRAFT_ENGINE)]:
            assert specdec(command, *arguments, *SHORTER[command]).exit_code == 0
        there = {path.name for path in in_directory.iterdir() if path.is_symlink()}
        shutil.copytree(in_directory, directory, ignore=lambda _, names: there.intersection(names))

    shutil.copytree(once(shared / "documents", make), in_directory, dirs_exist_ok=True)
    return in_directory


ON_ONE_DEVICE = DRAFT_TARGET_MODEL.replace("[0],[1]", "[0],[0]")


def test_command_of_the_draft_model_document_runs(specdec: Specdec, with_engines: Path) -> None:
    config = json.loads((with_engines / "draft-engine" / "config.json").read_text())
    assert config["build_config"]["max_draft_len"] == 10
    ((command, *arguments),) = pasted(ON_ONE_DEVICE)
    result = specdec(command, *arguments)
    assert result.exit_code == 0, result.stderr
    assert 'Input [Text 0]: "How does Draft-Sampling work?"' in result.stdout
    assert result.stderr == ""
    logits = np.load(with_engines / "logits_generation.npy")
    assert logits.dtype == np.float32 and logits.shape[::2] == (1, 300)


def test_second_device_of_the_draft_model_document_is_named_where_there_is_one_device(
    specdec: Specdec, with_engines: Path, said: Said
) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("this machine has several GPUs")
    ((command, *arguments),) = pasted(DRAFT_TARGET_MODEL)
    result = specdec(command, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert ": 1\n" in result.stderr
    said(result)
    assert not (with_engines / "logits_generation.npy").exists()


@pytest.mark.parametrize("document", LEADER_MODE)
def test_leader_mode_commands_run_as_pasted(
    specdec: Specdec, document: str, llama_engine_dir: Path, llama: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast, said: Said,
) -> None:  # fmt: skip
    """The documents name neither a model nor a prompt, nor the algorithm that they are about."""
    ((command, *arguments),) = pasted(document)
    more = ["--engine_dir", llama_engine_dir, "--prompt", PROMPT, "--max_tokens", 6, "--end-id", 299, "--json"]
    result = specdec(command, *arguments, *more)
    document_json = result.document
    assert ids_of(document_json) == [hf_greedy(llama, tokenizer(PROMPT)["input_ids"], 6, 299)]
    assert document_json["settings"]["mode"] == "leader"
    assert document_json["settings"]["ngram_config"] == NGRAM_RECORD
    assert "no effect" not in result.stderr
    said(result, "NGRAM")
