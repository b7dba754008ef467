"""The ids that drafts have: read from files, and in the order in which tokenizers learned them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from runtime.engine.draft_vocab import read_ids, training_order
from runtime.util.errors import SpecDecError

IDS = [7, 0, 31, 5]


def test_ids_of_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(IDS))
    (tmp_path / "ids.txt").write_text("7\n0\n31 5\n")
    torch.save(torch.tensor(IDS), tmp_path / "ids.pt")
    torch.save(IDS, tmp_path / "ids.bin")  # as FR-Spec's token maps are
    save_file({"ids": torch.tensor(IDS)}, tmp_path / "ids.safetensors")
    for path in tmp_path.iterdir():
        assert read_ids(path, 32) == IDS, path
    bad = {"is empty": "", "outside the vocabulary of 31: 31": "31", "id twice: 3": "[3, 3]", "no id: 'x'": "x 3"}
    bad |= {"no id: True": "[true]", "outside the vocabulary of 31: -1": "-1", "but an object": '{"a": 1}'}
    for said, text in bad.items():
        (tmp_path / "bad").write_text(text)
        with pytest.raises(SpecDecError) as error:
            read_ids(tmp_path / "bad", 31)
        assert said in error.value.message and error.value.hint
    torch.save({"a": torch.tensor(IDS), "b": 1}, tmp_path / "bad.pt")
    (tmp_path / "damaged.pt").write_bytes(b"PK")
    for name, said in (("bad.pt", "no list of ids, but: dict"), ("damaged.pt", "cannot be read as a tensor")):
        with pytest.raises(SpecDecError, match=said):
            read_ids(tmp_path / name, 32)


@pytest.mark.parametrize("kind", ["BPE", "BPE with its letters last", "Unigram", "WordPiece"])
def test_frequent_words_come_first(kind: str) -> None:
    """Words by how often a text has them: `the` eight times, `dog` four, `house` twice, `zebra` once."""
    text = "the the the the the the the the dog dog dog dog house house zebra"
    if kind == "Unigram":  # pieces, and the logarithms of their shares
        made = Tokenizer(models.Unigram([("<s>", 0.0), ("</s>", 0.0), ("house", -2.0), ("the", -0.6), ("dog", -1.3)]))
        made.add_special_tokens(["<s>", "</s>"])
    else:
        learner, trainer = {
            "BPE": (models.BPE(), trainers.BpeTrainer),
            "WordPiece": (models.WordPiece(), trainers.WordPieceTrainer),
        }[kind.split()[0]]
        made = Tokenizer(learner)
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.train_from_iterator([text] * 3, trainer(special_tokens=["<s>", "</s>"], show_progress=False))
    if "last" in kind:  # as SentencePiece numbers them
        state = json.loads(made.to_str())
        pieces = sorted(state["model"]["vocab"], key=lambda one: (len(one) == 1, state["model"]["vocab"][one]))
        state["model"]["vocab"] = {piece: i for i, piece in enumerate(pieces)}
        state["added_tokens"] = [one | {"id": pieces.index(one["content"])} for one in state["added_tokens"]]
        made = Tokenizer.from_str(json.dumps(state))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    size = len(tokenizer) + 5  # a padded vocabulary
    order = training_order(tokenizer, size)
    assert sorted(order) == list(range(size))
    words = [order.index(made.token_to_id(one)) for one in ("the", "dog", "house") if made.token_to_id(one) is not None]
    assert words == sorted(words) and len(words) > 1
    assert {made.token_to_id("<s>"), made.token_to_id("</s>")} == set(order[-2:])
