"""The vocabulary of drafts: the ids that a head or a self-draft copy has in its output layer, if these are not all ids.

They are chosen at `build`, from a user's list or by frequency, and kept in the engine's directory. Verification uses
the target's whole vocabulary; an id that is never drafted only makes drafts shorter.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.bundle import DRAFT_VOCAB, Bundle
from runtime.checkpoint.tokenizer import Tokenizer
from runtime.util.errors import SpecDecError
from runtime.util.reading import parse_json, read_utf8, shown

_MAX_DEFAULT_SIZE = 32768
"""Approximate number of ids in published EAGLE-3 heads with large vocabularies."""
_BY_TORCH, _TENSORS = (".pt", ".pth", ".bin"), ".safetensors"


def default_size(vocab_size: int) -> int:
    """Number of ids to draft from a vocabulary, if no number is given."""
    return max(1, min(vocab_size // 4, _MAX_DEFAULT_SIZE))


def choose_vocabulary(
    texts: Iterable[tuple[Seq[int], Seq[int]]], among: Iterable[int], size: int, end_ids: Iterable[int]
) -> list[int]:
    """The `size` ids of `among` that are the most frequent in the outputs of (prompt, output) pairs, in order of ids;
    end ids are always included. After ids of outputs come ids of prompts, then the first of `among`.
    """
    outputs, prompts = Counter[int](), Counter[int]()
    for prompt, output in texts:
        outputs.update(output)
        prompts.update(prompt)
    ends = set(end_ids)
    ranked = sorted(dict.fromkeys(among), key=lambda one: (one not in ends, -outputs[one], -prompts[one]))
    return sorted(ranked[:size])


def training_order(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """All ids in the order in which the tokenizer learned them: the first are the most frequent in its training text.

    Tokenizers of merges (BPE) list learned ids in that order. Before these come single characters, in order of ids
    (SentencePiece numbers them by frequency), as many as a 32nd of the vocabulary. Pieces with scores (Unigram) are
    ordered by score, and other ids by number. Special tokens come last.
    """
    model = _model_of(tokenizer)
    vocab: Any = model.get("vocab") or {}
    if isinstance(vocab, list):  # Unigram: pieces and scores, by ids
        learned = sorted(range(len(vocab)), key=lambda i: -vocab[i][1])
    elif merges := model.get("merges"):
        made = [one if isinstance(one, list) else one.split(" ", 1) for one in merges]
        merged = [vocab[left + right] for left, right in made if left + right in vocab]
        letters = [i for piece, i in vocab.items() if len(piece) == 1]
        learned = [*sorted(letters)[: vocab_size // 32], *merged]
    else:
        learned = sorted(vocab.values())
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    known = [i for i in dict.fromkeys(learned) if i < vocab_size and i not in special]
    return list(dict.fromkeys([*known, *(i for i in range(vocab_size) if i not in special), *range(vocab_size)]))


def _model_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """The learned part of a tokenizer, as the `tokenizers` package writes it; of other tokenizers the ids."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "to_str"):
        return {"vocab": tokenizer.get_vocab()}
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    return model


def read_ids(path: Path, vocab_size: int) -> list[int]:
    """The ids of a file: a list in JSON, a tensor of torch or safetensors, or numbers in a text. SpecDecError if it has
    no ids, something other than ids, an id twice, or an id outside the vocabulary.
    """
    values = list(_read_values(path))
    if not values:
        raise SpecDecError(f"the file lists no token ids to draft: {path}", hint="list at least one token id")
    foreign = next((one for one in values if type(one) is not int), None)
    if foreign is not None:
        raise SpecDecError(f"`{path}` lists something that is no id: {shown(foreign)}", hint="ids are whole numbers")
    outside = next((one for one in values if not 0 <= one < vocab_size), None)
    if outside is not None:
        raise SpecDecError(
            f"`{path}` lists an id outside the vocabulary of {vocab_size}: {outside}",
            hint="the file was made for another model: list ids of this one",
        )
    if len(set(values)) < len(values):
        twice = next(one for one, count in Counter(values).items() if count > 1)
        raise SpecDecError(f"`{path}` lists an id twice: {twice}", hint="list each id once")
    return values


def _read_values(path: Path) -> Seq[Any]:
    if path.suffix in (*_BY_TORCH, _TENSORS):
        return _read_tensor(path)
    text = read_utf8(path)
    if text.lstrip()[:1] not in ("[", "{"):
        return [int(one) if re.fullmatch(r"-?[0-9]{1,18}", one) else one for one in text.split()]
    values = parse_json(text, path)
    if not isinstance(values, list):
        raise SpecDecError(f"`{path}` has no list of ids, but an object", hint="such as [1, 2, 3]")
    return values


def _read_tensor(path: Path) -> Seq[Any]:
    from safetensors.torch import load_file  # not to open an engine

    try:
        found: Any = load_file(path) if path.suffix == _TENSORS else torch.load(path, weights_only=True)
    except Exception as error:  # pickle, zip and torch raise many kinds for a file that is not a tensor
        raise SpecDecError(
            f"`{path}` cannot be read as a tensor: {shown(str(error))}", hint="save the ids again"
        ) from None
    if isinstance(found, dict) and len(found) == 1:
        (found,) = found.values()
    if isinstance(found, Tensor) and found.dim() == 1:
        found = found.tolist()
    if not isinstance(found, list):
        raise SpecDecError(f"`{path}` has no list of ids, but: {type(found).__name__}", hint="save one tensor")
    return found


def read_draft_ids(bundle: Bundle) -> Tensor | None:
    """Ids int64 [n] that an engine's drafts may have; None for all. SpecDecError if the engine's file is damaged."""
    size = bundle.config.build_config.draft_output.vocab_size
    if size is None:
        return None
    path = bundle.directory / DRAFT_VOCAB
    ids = read_ids(path, bundle.config.vocab_size)
    if len(ids) != size:
        raise SpecDecError(f"`{path}` lists {len(ids)} ids, and the engine drafts: {size}", hint="build it again")
    return torch.tensor(ids)


def rows_by_id(ids: Tensor, vocab_size: int) -> Tensor:
    """Row of each id [vocab_size] in an output layer whose rows belong to `ids` [n]; n for ids that it lacks."""
    return torch.full((vocab_size,), len(ids)).index_copy(0, ids, torch.arange(len(ids)))


def among_all(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits [tokens, vocab_size] from logits [tokens, n] of an output layer whose rows belong to `ids` [n]: -inf for
    other ids. With `ids` None the logits are returned unchanged.
    """
    if ids is None:
        return logits
    return logits.new_full((len(logits), vocab_size), -torch.inf).index_copy_(1, ids, logits)


def missing_ends(ids: Iterable[int], end_ids: Iterable[int]) -> str | None:
    """Warning if no end id is drafted; None if one is, or the model has none."""
    ends, drafted = sorted(end_ids), set(ids)
    if not ends or not drafted.isdisjoint(ends):
        return None
    return (
        f"drafts never end where the output does, because none of the model's end ids is among the {len(drafted):,} "
        f"that are drafted: {', '.join(map(str, ends))}"
    )
