"""The tokenizers of GGUF files give llama.cpp's tokens: by each pre-tokenizer."""

from pathlib import Path
from typing import Any

import pytest
from llamacpp_tokens import Edit, data, write_byte_level, write_gemma_4, write_sentencepiece
from sentences import Said
from tokenizers import pre_tokenizers

from runtime.checkpoint.gguf.tokenizer import PRE_TOKENIZERS, make_gguf_tokenizer
from runtime.text.chat import ChatTemplate
from runtime.text.text import load_tokenizer
from runtime.util.errors import SpecDecError, SpecDecWarning

SMALL = {"spaced": None, "unspaced": False}


def of_llamacpp(name: str) -> list[list[int]]:
    """The tokens of each text."""
    return [next(one["ids"] for one in answers if name in one["of"]) for answers in data()["ids"]]


def assert_same_tokens(tokenizer: Any, name: str) -> None:
    wrong = [
        (text, expected, found)
        for text, expected in zip(data()["texts"], of_llamacpp(name), strict=True)
        if (found := tokenizer(text)["input_ids"]) != expected
    ]
    assert not wrong, (len(wrong), wrong[:2])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_pre_tokenizer_splits_as_llamacpp_does(name: str, tmp_path: Path) -> None:
    assert_same_tokens(make_gguf_tokenizer(write_byte_level(tmp_path / "model.gguf", name)), name)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_sentencepiece_merges_by_score_as_llamacpp_does(name: str, tmp_path: Path) -> None:
    assert_same_tokens(
        make_gguf_tokenizer(write_sentencepiece(tmp_path / "model.gguf", add_space_prefix=SMALL[name])), name
    )


def test_gemma_4_merges_within_lines_as_llamacpp_does(tmp_path: Path) -> None:
    assert_same_tokens(make_gguf_tokenizer(write_gemma_4(tmp_path / "model.gguf")), "gemma4")


@pytest.mark.parametrize("pre", ["deepseek-llm", "deepseek-v3"])
def test_bos_outside_the_byte_alphabet_keeps_its_id(pre: str, tmp_path: Path) -> None:
    """DeepSeek's begin token: it is in front of every text, is found in texts, and the vocabulary grows by nothing."""
    path = write_byte_level(tmp_path / "model.gguf", pre, lambda writer: writer.add_add_bos_token(True))
    tokenizer, bos = make_gguf_tokenizer(path), data()["byte_level"]["tokens"][0]
    assert tokenizer.bos_token == bos and not set(bos) <= set(pre_tokenizers.ByteLevel.alphabet())
    assert tokenizer("one")["input_ids"] == [0, *tokenizer("one", add_special_tokens=False)["input_ids"]]
    assert tokenizer(f"{bos}one", add_special_tokens=False)["input_ids"] == tokenizer("one")["input_ids"]
    assert len(tokenizer) == len(data()["byte_level"]["tokens"])


@pytest.mark.parametrize("name", ["smollm", "unspaced"])
def test_tokens_become_the_texts_again(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if name in SMALL:
        tokenizer = make_gguf_tokenizer(write_sentencepiece(path, add_space_prefix=SMALL[name]))
    else:
        tokenizer = make_gguf_tokenizer(write_byte_level(path, name))
    for text in data()["texts"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not {"<｜", "<|", "<s>"} & {text[i : i + n] for i in range(len(text)) for n in (2, 3)}:
            assert tokenizer.decode(ids, skip_special_tokens=True) == text


PHI_3 = ("<|user|>", "<|end|>", "<|assistant|>", "<|endoftext|>")


def write_phi_3(path: Path, name: str, architecture: str = "llama") -> Path:
    """The small vocabulary with the special tokens of Phi-3, in a file of that name."""

    def edit(writer: Any) -> None:
        writer.add_name(name)
        written = writer.kv_data[0]
        written["general.architecture"].value = architecture
        for key, more in (("tokens", PHI_3), ("token_type", [3] * len(PHI_3)), ("scores", [-1e4] * len(PHI_3))):
            written[f"tokenizer.ggml.{key}"].value = [*written[f"tokenizer.ggml.{key}"].value, *more]

    return write_sentencepiece(path, add_space_prefix=None, edit=edit)


@pytest.mark.parametrize(
    ("name", "architecture", "is_phi_3"),
    [
        ("Phi-3-mini-4k-instruct", "llama", True),
        ("Phi 3.5 Mini Instruct", "phi3", True),  # as llama.cpp's converter writes the name
        ("Phi 4 Mini Instruct", "llama", False),
    ],
)
def test_special_tokens_of_phi_3_take_the_white_space_after_them(
    name: str, architecture: str, is_phi_3: bool, tmp_path: Path
) -> None:
    """Phi-3's tokenizer.json says so (`rstrip`); llama.cpp knows it by the file's name."""
    tokenizer = make_gguf_tokenizer(write_phi_3(tmp_path / "model.gguf", name, architecture))
    kept = ["<s>", "<|user|>", "▁", "\n", "Hello", "<|end|>", "▁▁", "\n", "<|assistant|>", "▁", "\n", "<s>", "▁▁", "a"]
    without = ["<s>", "<|user|>", "▁", "Hello", "<|end|>", "<|assistant|>", "<s>", "▁▁", "a"]
    shared = ["▁", "<|endoftext|>", "▁▁", "b", "</s>"]
    after = ["▁c", "<think>", "▁", "Hello"] if is_phi_3 else ["▁", "\t", "c", "<think>", "▁▁Hello"]
    text = "<|user|>\nHello<|end|> \n<|assistant|>\n<s> a <|endoftext|> b</s>\tc<think> Hello"
    tokenizer.save_pretrained(tmp_path / "saved")
    for one in (tokenizer, load_tokenizer(tmp_path / "saved", {"model_type": "phi3"})):
        assert one.convert_ids_to_tokens(one(text)["input_ids"]) == [*(without if is_phi_3 else kept), *shared, *after]


REFUSED: list[tuple[str, Edit, str]] = [
    ("smollm9", lambda w: None, "`smollm9`"),
    ("gpt-2", lambda w: w.add_array("tokenizer.ggml.suppress_tokens", [1, 2]), "`tokenizer.ggml.suppress_tokens`"),
    ("gpt-2", lambda w: w.add_string("tokenizer.ggml.add_bos_token", "yes"), "`tokenizer.ggml.add_bos_token`"),
]


@pytest.mark.parametrize(("pre", "edit", "name"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_is_not_known_is_refused_by_name(pre: str, edit: Edit, name: str, tmp_path: Path, said: Said) -> None:
    with pytest.raises(SpecDecError) as raised:
        make_gguf_tokenizer(write_byte_level(tmp_path / "model.gguf", pre, edit))
    said(raised, name)


def test_file_without_a_pre_tokenizer_is_told_of_and_read_as_by_llamacpp(tmp_path: Path, said: Said) -> None:
    def without_pre(writer: Any) -> None:
        del writer.kv_data[0]["tokenizer.ggml.pre"]

    with pytest.warns(SpecDecWarning) as warned:
        tokenizer = make_gguf_tokenizer(write_byte_level(tmp_path / "model.gguf", "default", without_pre))
    said(warned, "`tokenizer.ggml.pre`", "`default`", str(tmp_path / "model.gguf"))
    assert_same_tokens(tokenizer, "default")


def test_broken_template_is_one_error_when_a_chat_is_wanted(tmp_path: Path, said: Said) -> None:
    template = "a\n{% for m in messages %}{{ m.content"
    path = write_byte_level(tmp_path / "model.gguf", "smollm", lambda writer: writer.add_chat_template(template))
    make_gguf_tokenizer(path).save_pretrained(tmp_path / "saved")  # which needs no template
    with pytest.raises(SpecDecError) as error:
        ChatTemplate(tmp_path / "saved", {"model_type": "llama"}).render([{"role": "user", "content": "a"}])
    said(error, "2")
