"""A tokenizer that is a tekken.json alone is read with its BOS token, by every way into an engine."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from sentences import Said
from tiny import make_model

from runtime.checkpoint.resolve import refuse_unreadable_tokenizer
from runtime.text.text import load_tokenizer
from runtime.util.errors import SpecDecError
from specdec_cli import LLM, SamplingParams

PATTERN = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
WORDS = [bytes([i]) for i in range(256)] + [b"th", b"the", b" d", b" do", b" dog"]
NUM_SPECIAL = 10
TEXTS = {"the dog": [b"the", b" dog"], "the théme": [b"the", b" ", b"th", b"\xc3", b"\xa9", b"m", b"e"], "": []}


def write_tekken(directory: Path) -> Path:
    """A file as Mistral writes it: 261 words after 10 special tokens, of which 4 have no name."""
    directory.mkdir(exist_ok=True)
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(word).decode(), "token_str": None} for i, word in enumerate(WORDS)
    ]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(WORDS),
        "default_vocab_size": len(WORDS) + NUM_SPECIAL,
        "default_num_special_tokens": NUM_SPECIAL,
        "version": "v7",
    }
    special = [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(SPECIAL)]
    document = {"config": config, "vocab": vocab, "special_tokens": special}
    (directory / "tekken.json").write_text(json.dumps(document))
    return directory


def ids_of(words: list[bytes]) -> list[int]:
    return [1, *(NUM_SPECIAL + WORDS.index(word) for word in words)]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_the_files_after_its_bos(text: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tekken(tmp_path / "model"), None)
    assert tokenizer(text)["input_ids"] == ids_of(TEXTS[text])
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids_of(TEXTS[text])[1:]
    assert tokenizer.decode(ids_of(TEXTS[text]), skip_special_tokens=True) == text
    assert tokenizer("[INST]the", add_special_tokens=False)["input_ids"] == [3, *ids_of([b"the"])[1:]]
    assert tokenizer.eos_token_id == 2


def test_tokens_are_those_of_mistrals_own_library(tmp_path: Path) -> None:
    tekken: Any = pytest.importorskip("mistral_common.tokens.tokenizers.tekken", reason="mistral-common is absent")
    path = write_tekken(tmp_path / "model") / "tekken.json"
    own, tokenizer = tekken.Tekkenizer.from_file(path), load_tokenizer(path.parent, None)
    for text in [*TEXTS, "a  b\n\tc 12 345 🙂 done", "the the dogs do"]:
        assert tokenizer(text)["input_ids"] == own.encode(text, bos=True, eos=False)


def test_an_engine_has_the_tokenizer(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    make_model("llama", vocab_size=len(WORDS) + NUM_SPECIAL).save_pretrained(model_dir)
    write_tekken(model_dir)
    (model_dir / "chat_template.jinja").write_text("{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}")
    refuse_unreadable_tokenizer(model_dir)
    with LLM(model_dir, compiler="none", use_cache=False) as llm:
        (output,) = llm.generate("the dog", SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        assert output.prompt_token_ids == ids_of([b"the", b" dog"])
        assert llm.chat_template.encode([{"role": "user", "content": "the"}]) == [3, *ids_of([b"the"])[1:], 4]


@pytest.mark.parametrize("damage", ["{", "[]", '{"config": {}}'])
def test_a_damaged_file_is_told(damage: str, tmp_path: Path, said: Said) -> None:
    directory = write_tekken(tmp_path / "model")
    (directory / "tekken.json").write_text(damage)
    with pytest.raises(SpecDecError) as error:
        load_tokenizer(directory, None)
    said(error, str(directory / "tekken.json"))
