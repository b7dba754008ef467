"""A model's directory may bring Python code (`auto_map`). It is never run, whatever is on standard input."""

import io
import shutil
from pathlib import Path

import pytest
import torch
from sentences import Said
from shared import edit_json
from tiny import run_convert

from runtime.core.params import SamplingParams
from runtime.llm import LLM
from runtime.measure.evaluation.hugging_face import HuggingFace
from runtime.measure.evaluation.systems import Question
from runtime.model.model import ModelKind, load_model
from runtime.model.pretrained import parse_pretrained_config
from runtime.text.text import load_tokenizer, open_tokenizer
from runtime.util.errors import SpecDecError

CODE = """
from pathlib import Path
Path({marker!r}).write_text("it ran")
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
class Own(LlamaForCausalLM): pass
class OwnTokenizer(PreTrainedTokenizerFast): pass
"""


@pytest.fixture
def model_dir(llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that has code for everything, and somebody who says yes to all questions."""
    directory = tmp_path / "model"
    shutil.copytree(llama_dir, directory)
    (directory / "own.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    edit_json(directory / "config.json", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    tokenizer = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    edit_json(directory / "tokenizer_config.json", **tokenizer)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return directory


@pytest.mark.parametrize("model_type", ["llama", None])
def test_tokenizers_code_is_refused_in_our_words(
    model_type: str | None, model_dir: Path, tmp_path: Path, said: Said
) -> None:
    with pytest.raises(SpecDecError) as raised:
        load_tokenizer(model_dir, {"model_type": model_type} if model_type else None)
    said(raised, model_dir)
    with pytest.raises(SpecDecError) as raised:
        open_tokenizer(model_dir)
    said(raised)
    assert not (tmp_path / "ran").exists()


def test_models_code_is_not_run_where_transformers_has_its_own(model_dir: Path, tmp_path: Path) -> None:
    checkpoint = run_convert(model_dir, tmp_path / "checkpoint")
    config = parse_pretrained_config(checkpoint.pretrained_config, "config.json")
    model = load_model(ModelKind(config, torch.float32, "eager"), tmp_path / "checkpoint" / "rank0.safetensors")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()


def test_comparison_with_transformers_runs_no_code(
    model_dir: Path, tmp_path: Path, llama_engine_dir: Path, said: Said
) -> None:
    edit_json(model_dir / "config.json", model_type="alien")
    with LLM(llama_engine_dir) as llm:
        question = Question(llm, llm.request_of(SamplingParams()))
        with pytest.raises(SpecDecError) as error:
            HuggingFace.load(model_dir, question)
        said(error, "`auto_map`")
    assert not (tmp_path / "ran").exists()


def test_comparison_with_transformers_reads_no_pickle(
    llama_dir: Path, tmp_path: Path, llama_engine_dir: Path, said: Said
) -> None:
    """And does not pass on how one would have it read."""
    shutil.copytree(llama_dir, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"weight": print}, tmp_path / "model" / "pytorch_model.bin")
    with LLM(llama_engine_dir) as llm:
        question = Question(llm, llm.request_of(SamplingParams()))
        with pytest.raises(SpecDecError) as error:
            HuggingFace.load(tmp_path / "model", question)
        said(error, "safetensors")
