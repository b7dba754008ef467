"""End tokens of a GGUF file's vocabulary: llama.cpp's rules, family by family."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
from llamacpp_tokens import REAL, write_file

from runtime.checkpoint.gguf.ends import end_ids_of
from runtime.checkpoint.gguf.reader import read_gguf
from runtime.checkpoint.gguf.tokenizer import check_gguf_tokenizer
from runtime.util.errors import SpecDecError

WORD, CONTROL, USER = 1, 3, 4
FAMILIES: list[tuple[str, Mapping[str, int], Mapping[str, str], set[str]]] = [
    ("llama-2", {"</s>": CONTROL, "<s>": CONTROL}, {"eos": "</s>"}, {"</s>"}),
    (
        "llama-3",
        dict.fromkeys(("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|start_header_id|>"), CONTROL),
        {"eos": "<|eot_id|>"},
        {"<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"},
    ),
    ("an early llama-3", {"<|eot_id|>": WORD, "<|end_of_text|>": CONTROL}, {}, {"<|eot_id|>", "<|end_of_text|>"}),
    (
        "qwen",
        {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<|fim_prefix|>": USER}
        | dict.fromkeys(("<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"), USER)
        | {"</s>": WORD},
        {"eos": "<|im_end|>", "padding": "<|endoftext|>"},
        {"<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"},
    ),
    (
        "a code model that names its tokens",
        {"<s>": CONTROL, "</s>": CONTROL, "x_pad": CONTROL, "x_rep": CONTROL, "x_sep": CONTROL, "<PAD>": CONTROL},
        {"eos": "</s>", "fim_pad": "x_pad", "fim_rep": "x_rep", "fim_sep": "x_sep"},
        {"</s>", "x_pad", "x_rep", "x_sep"},
    ),
    (
        "a chat model whose turns end as text",
        {"<|im_start|>": USER, "<|im_end|>": USER, "</s>": CONTROL},
        {"eos": "</s>"},
        {"</s>", "<|im_end|>"},
    ),
    ("granite", {"<|end_of_text|>": CONTROL, "<fim_pad>": CONTROL, "<reponame>": CONTROL}, {}, set()),
    ("gemma-2", {"<eos>": CONTROL, "<end_of_turn>": CONTROL, "</s>": USER}, {"eos": "<eos>"}, set()),
    (
        "gemma-4",
        {"<eos>": CONTROL, "<turn|>": CONTROL, "<|tool_response>": USER, "</s>": CONTROL},
        {"eos": "<turn|>"},
        {"<eos>", "<turn|>", "<|tool_response>"},
    ),
    (
        "gpt-oss",
        dict.fromkeys(("<|endoftext|>", "<|return|>", "<|channel|>", "<|end|>", "<|message|>", "<|call|>"), CONTROL),
        {"eos": "<|return|>"},
        {"<|endoftext|>", "<|return|>", "<|call|>"},
    ),
    (
        "gpt-oss that names all",
        dict.fromkeys(("<|return|>", "<|end|>", "<|call|>"), CONTROL),
        {"eos": "<|return|>", "eot": "<|end|>"},
        {"<|return|>", "<|call|>"},
    ),
    (
        "solar-open",
        dict.fromkeys(("<|flush|>", "<|calls|>", "<|end|>", "<|endoftext|>"), CONTROL),
        {"eos": "<|flush|>"},
        {"<|flush|>", "<|calls|>", "<|endoftext|>"},
    ),
    ("phi-3", {"<|end|>": CONTROL, "<|endoftext|>": CONTROL, "</s>": CONTROL}, {"eos": "<|endoftext|>"}, set()),
    ("phi-4, which calls functions", {"<|end|>": CONTROL, "<|call|>": CONTROL}, {"eos": "<|end|>"}, set()),
    ("deepseek", {"<｜end▁of▁sentence｜>": CONTROL}, {"eos": "<｜end▁of▁sentence｜>"}, set()),
    ("kimi", {"[EOS]": CONTROL, "[EOT]": CONTROL, "[PAD]": CONTROL}, {"eos": "[EOS]"}, set()),
    ("minimax", {"[e~[": CONTROL}, {}, set()),
    ("smoldocling", {"<end_of_utterance>": CONTROL, "<fim-pad>": CONTROL, "<fim-repo>": CONTROL}, {}, set()),
    ("code llama", {"<EOT>": CONTROL, "_<EOT>": CONTROL, "<PAD>": CONTROL, "<REPO>": CONTROL}, {}, set()),
    ("an end of its own", {"<stop>": CONTROL, "<also>": CONTROL}, {"eos": "<stop>", "eom": "<also>"}, set()),
]
"""Family, types of its special tokens, those that a file names, and the ends; an empty set is all of them."""
OURS = {"qwen": {"</s>"}, "gemma-2": {"</s>"}}
"""Ends of llama.cpp's that are plain text, and none of ours."""


def write(path: Path, types: Mapping[str, int], named: Mapping[str, str]) -> Path:
    tokens = ["a", "b", "ab", "Ċ", *types]

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([1, 1, 1, 1, *types.values()])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(0)
        if "eos" not in named:
            writer.add_eos_token_id(tokens.index(next(iter(types))))
        for name, token in named.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", tokens.index(token))

    return write_file(path, len(tokens), edit)


def ends_of_llamacpp(path: Path) -> set[str]:
    """The end tokens that llama.cpp prints when it opens a file."""
    code = (
        "import sys, xllamacpp\n"
        "params = xllamacpp.CommonParams()\n"
        "params.model.path, params.n_ctx, params.warmup, params.verbosity = sys.argv[1], 64, False, 5\n"
        "params.port, params.cpuparams.n_threads = 0, 1\n"
        "xllamacpp.Server(params)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    ends: set[str] = set()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            ends |= set(re.findall(r"EOG token += \d+ '(.*?)'$", line.rstrip()))
            if "max token length" in line or "error loading" in line:
                break  # the lines after the ends
        process.kill()
    return ends


@pytest.mark.parametrize(("family", "types", "named", "ends"), FAMILIES, ids=[one[0] for one in FAMILIES])
def test_answer_ends_where_llama_cpp_ends_it(
    family: str, types: Mapping[str, int], named: Mapping[str, str], ends: set[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf", types, named)
    metadata = read_gguf(path).metadata
    wanted = (ends or set(types)) - OURS.get(family, set())
    assert {metadata["tokenizer.ggml.tokens"][i] for i in end_ids_of(metadata)} == wanted
    if find_spec("xllamacpp") is not None:
        assert ends_of_llamacpp(path) == wanted | OURS.get(family, set())


PUBLISHED = {
    "gptoss": {"<|endoftext|>", "<|return|>", "<|call|>"},
    "qwen3": {"<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"},
    "llama3_1": {"<|eot_id|>", "<|end_of_text|>"},
    "deepseek_v3": {"<｜end▁of▁sentence｜>"},
    "llama2": {"</s>"},
    "gemma3": {"<eos>", "<end_of_turn>"},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_vocabulary_ends_at_its_own_ends(name: str, tmp_path: Path) -> None:
    """gpt-oss's are those of its generation_config.json."""
    file = REAL / f"tokenizer-{name}" / "tokenizer.json"
    if not file.exists():
        pytest.skip(f"{file} is not there")
    state = json.loads(file.read_text(encoding="utf-8"))
    types = {token["content"]: CONTROL if token["special"] else USER for token in state["added_tokens"]}
    tokens = [*state["model"]["vocab"], *(token for token in types if token not in state["model"]["vocab"])]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [types.get(token, WORD) for token in tokens],
    }
    assert {tokens[i] for i in end_ids_of(metadata)} == PUBLISHED[name]


@pytest.mark.parametrize(("key", "value"), [("tokens", 5), ("token_type", 3), ("model", ["llama"])])
def test_a_value_of_another_type_is_told_in_a_sentence(key: str, value: object, tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        add = {str: writer.add_string, list: writer.add_array, int: writer.add_uint32}
        values = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "</s>"], "token_type": [WORD, CONTROL]} | {
            key: value
        }
        for name, one in values.items():
            add[type(one)](f"tokenizer.ggml.{name}", one)

    path = write_file(tmp_path / "model.gguf", 2, edit)
    with pytest.raises(SpecDecError, match=f"ggml.{key}|of this kind"):
        end_ids_of(read_gguf(path).metadata)
        check_gguf_tokenizer(path)
