"""A saved tokenizer against transformers' own: tokens, texts and what is special, whatever kind it is."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizers import backtracking, byte_level, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import logged
from sentences import Said
from shared import edit_json
from strength import CHARACTERS
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerFast

from runtime.checkpoint.tokenizer import SAVED, SavedTokenizer, find_saved_tokenizer, save_tokenizer
from runtime.text.text import encode, encode_text, find_tokenizer, load_tokenizer, word_tokens
from runtime.util import panics
from runtime.util.errors import SpecDecError

STORIES_DIR = Path(__file__).parents[3] / "../shared/data/stories260k"
DEMO_DIR = Path(__file__).parents[3] / "runtime/demo/target"


def word_pieces() -> PreTrainedTokenizerFast:
    """Lower case, with `##` before what continues a word."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abdeghot", *(f"##{c}" for c in "abdeghot"), "the", "dog"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return BertTokenizerFast(tokenizer_object=backend)


def stored(tokenizer: Any, directory: Path) -> tuple[SavedTokenizer | None, Any]:
    """Tokenizer that was saved, and the one that transformers reads from its own files."""
    tokenizer.save_pretrained(directory)
    own = AutoTokenizer.from_pretrained(directory, truncation_side="left")
    save_tokenizer(own, directory)
    return find_saved_tokenizer(directory), own


@pytest.fixture(scope="module", params=["word-pieces", "demo", "stories"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[SavedTokenizer, Any]:
    kinds = {
        "word-pieces": word_pieces,
        "demo": lambda: AutoTokenizer.from_pretrained(DEMO_DIR),
        "stories": lambda: AutoTokenizer.from_pretrained(STORIES_DIR),
    }
    if request.param == "stories" and not STORIES_DIR.is_dir():
        pytest.skip("shared data stories260k is absent")
    saved, own = stored(kinds[request.param](), tmp_path_factory.mktemp("tokenizer"))
    assert saved is not None
    return saved, own


@settings(deadline=None, max_examples=60)
@given(text=st.one_of(texts, st.text(CHARACTERS, max_size=20)), special=st.booleans(), skip=st.booleans())
def test_tokens_and_texts_are_those_of_transformers(
    both: tuple[SavedTokenizer, Any], text: str, special: bool, skip: bool
) -> None:
    saved, own = both
    ids = own(text, add_special_tokens=special)["input_ids"]
    assert saved(text, add_special_tokens=special)["input_ids"] == ids
    for start in range(len(ids)):
        expected = own.decode(ids[start:], skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert saved.decode(ids[start:], skip_special_tokens=skip) == expected


def test_tokenizer_that_does_more_than_the_package_is_not_saved(tmp_path: Path) -> None:
    class Shouting(PreTrainedTokenizerFast):
        def decode(self, *arguments: Any, **options: Any) -> str:
            return str(super().decode(*arguments, **options)).upper()

    backend = byte_level().backend_tokenizer
    save_tokenizer(Shouting(tokenizer_object=backend, eos_token="</s>"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_damage_is_named(tmp_path: Path, said: Said) -> None:
    stored(byte_level(), tmp_path)
    record = json.loads((tmp_path / SAVED).read_text())
    (tmp_path / SAVED).write_text(json.dumps(record | {"state": 3}))
    with pytest.raises(SpecDecError) as error:
        find_saved_tokenizer(tmp_path)
    said(error, SAVED, "state")
    (tmp_path / SAVED).write_text(json.dumps(record | {"state": "{}"}))
    with pytest.raises(SpecDecError) as error:
        find_saved_tokenizer(tmp_path)
    said(error)


def test_an_engines_tokenizer_is_the_saved_one(llama_uncompiled_dir: Path) -> None:
    tokenizer = find_tokenizer(llama_uncompiled_dir, {"model_type": "llama"})
    assert isinstance(tokenizer, SavedTokenizer)
    expected = AutoTokenizer.from_pretrained(llama_uncompiled_dir)("the dog")["input_ids"]
    assert tokenizer("the dog")["input_ids"] == expected


LLAMA3_ROPE = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3": {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 8192}},
    "nonsense": {"rope_scaling": "none", "num_attention_heads": -1, "torch_dtype": "float12"},
}


@pytest.mark.parametrize("names_class", [True, False], ids=["class", "no-class"])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_tokenizer_is_read_whatever_the_models_config_says(config: str, names_class: bool, tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    expected = AutoTokenizer.from_pretrained(tmp_path)
    if not names_class:
        edit_json(tmp_path / "tokenizer_config.json", tokenizer_class=None)
    found = load_tokenizer(tmp_path, {"model_type": "llama", "vocab_size": 512} | CONFIGS[config])
    assert found("the dog")["input_ids"] == expected("the dog")["input_ids"] != []


REAL_DIR = Path(os.environ.get("SPECDEC_REAL_DIR", "~/.cache/specdec-real")).expanduser()
LLAMA3_DIR = REAL_DIR / "tokenizer-llama3_1"


@pytest.mark.skipif(not LLAMA3_DIR.is_dir(), reason=f"the tokenizer of Llama 3.1 is absent: {LLAMA3_DIR}")
def test_a_real_tokenizer_beside_an_engines_config_is_opened_without_a_word(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """transformers takes a config.json without a model type for one of Mistral's, and warns of its pattern."""
    shutil.copytree(LLAMA3_DIR, tmp_path / "engine")
    (tmp_path / "engine" / "config.json").write_text('{"format_version": 8}')
    with logged("transformers") as messages:
        found = load_tokenizer(tmp_path / "engine", {"model_type": "llama"} | CONFIGS["llama3"])
    assert found("Hello world")["input_ids"] == [128000, 9906, 1917]
    assert messages == [] and len(recwarn) == 0


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_tokenizer_that_panics_on_a_text_is_told_in_a_sentence(is_saved: bool, tmp_path: Path, said: Said) -> None:
    saved, own = stored(backtracking(), tmp_path)
    tokenizer = saved if is_saved else own
    assert tokenizer is not None and encode("the dog", tokenizer)[0]
    asks = [
        lambda text: encode(text, tokenizer),
        lambda text: encode_text(tokenizer, text),
        lambda text: word_tokens(tokenizer, "stop", text),
    ]
    for ask in asks:
        with pytest.raises(SpecDecError) as error:
            ask("x" * 200)
        said(error, "retry-limit-in-match")
    assert encode("the dog", tokenizer)[0]


def test_what_others_write_while_a_panic_is_held_back_is_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the blocks of two threads overlap."""
    monkeypatch.setattr(panics._Held, "is_command", True)
    with panics.panics_held():
        os.write(2, b"before\n")
        with panics.panics_held():
            os.write(2, b"\nthread '<unnamed>' (7) panicked at lib.rs:1:2:\nwhy\nstack backtrace:\n   0: a\n")
    with panics.panics_held():
        print("later", file=sys.stderr)
    assert capfd.readouterr().err == "before\nlater\n"
