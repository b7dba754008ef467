"""Files that are none, such as a named pipe or a link to /dev/zero: told at once, by name, wherever a file is read."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from sentences import Said
from waiting import ends

from commands.batch.lines import look_through
from commands.chat.tools import open_toolbox
from commands.inputs.dataset import load_samples
from commands.inputs.prompts import read_prompts
from runtime.builder.artefacts import check_directory
from runtime.builder.convert import plan_conversion
from runtime.builder.profile import read_profile
from runtime.checkpoint.config import QuantConfig
from runtime.checkpoint.resolve import resolve_model
from runtime.drafters.heads.head_config import read_head
from runtime.text.chat_templates import chat_templates
from runtime.text.corpus import Corpus, is_corpus
from runtime.text.text import load_tokenizer
from runtime.text.trace_lines import check_trace_lines
from runtime.util.errors import SpecDecError
from runtime.util.files import check_model_files
from runtime.util.reading import read_utf8
from specdec_cli import LLM

MODEL_FILES = [
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "model.safetensors", "model.safetensors.index.json", "adapter_config.json"),
    *("quant_config.json", "added_tokens.json", "tokenizer.model", "additional_chat_templates/tool_use.jinja"),
]


def refused(path: Path, call: Callable[[], object]) -> SpecDecError:
    with ends(), pytest.raises(SpecDecError) as error:
        call()
    assert str(path) in error.value.message
    return error.value


def samples_of(path: Path) -> object:
    return load_samples(str(path), eval_task="summarize", dataset_dir=None, max_samples=1, seed=0)


def pipe_in(directory: Path, name: str) -> Path:
    """A named pipe in the place of a file."""
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("name", MODEL_FILES)
def test_pipe_among_a_model_s_files_is_told(name: str, llama_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(llama_dir, model)
    path = pipe_in(model, name)
    for call in (
        lambda: resolve_model(str(model)),
        lambda: plan_conversion(model, None, QuantConfig()),
        lambda: load_tokenizer(model, None),
        lambda: check_directory(model),
    ):
        assert refused(path, call).message.startswith("not a file, but a named pipe")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.gguf", lambda path: resolve_model(str(path))),
        ("head/config.json", lambda path: read_head(path.parent)),
        ("prompts.txt", lambda path: read_prompts([], path)),
        ("prompts.csv", lambda path: read_prompts([], path)),
        ("prompts.jsonl", lambda path: read_prompts([], path)),
        ("prompts.npy", lambda path: read_prompts([], path)),
        ("rows.csv", lambda path: samples_of(path)),
        ("rows.parquet", lambda path: samples_of(path)),
        ("requests.jsonl", lambda path: look_through(path, "job")),
        ("traces.jsonl", check_trace_lines),
        ("profile.json", read_profile),
        ("text.corpus", Corpus.open),
        ("text.corpus", is_corpus),
        ("tools.py", open_toolbox),
        ("chat_template.jinja", lambda path: chat_templates(path.parent)),
        ("tokenizer_config.json", lambda path: chat_templates(path.parent)),
    ],
)
def test_pipe_is_told_by_whatever_reads_a_file(name: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    path = pipe_in(tmp_path, name)
    assert refused(path, lambda: read(path)).message.startswith("not a file, but a named pipe")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "vocab.txt", "chat_template.jinja"])
def test_text_of_a_model_that_no_memory_holds_is_not_read(name: str, tmp_path: Path, said: Said) -> None:
    """A terabyte of nothing takes no space on the disk."""
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 10**12)
    said(refused(tmp_path / name, lambda: check_model_files(tmp_path)), f"{10**12:,}")


def test_weights_that_are_longer_than_their_header_says_are_not_read(
    llama_dir: Path, tmp_path: Path, said: Said
) -> None:
    """Neither is their digest taken, which names an engine in the cache."""
    shutil.copytree(llama_dir, tmp_path / "model")
    os.truncate(tmp_path / "model" / "model.safetensors", 10**12)
    with pytest.raises(SpecDecError) as error:
        LLM(tmp_path / "model")
    said(error, f"{10**12:,}", str(tmp_path / "model" / "model.safetensors"))


def test_text_that_another_command_writes_into_a_shell_s_pipe_is_read() -> None:
    """`<(command)` is such a pipe, without a name of its own."""
    read, write = os.pipe()
    os.write(write, b"hello")
    os.close(write)
    assert read_utf8(Path(f"/dev/fd/{read}")) == "hello"
    os.close(read)
