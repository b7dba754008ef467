"""Checks that a drafter's token ids fit the target's, made before the drafter is opened."""

import filecmp
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint.bundle import Bundle
from runtime.checkpoint.tokenizer import Tokenizer
from runtime.drafters.heads.head_config import read_pard_mask
from runtime.drafters.speculation import Speculation
from runtime.text.corpus import Corpus
from runtime.text.text import open_tokenizer, tokenizer_digest, tokenizer_of_engine
from runtime.util.errors import SpecDecError, SpecDecWarning, draft_engine_errors

_MOST_DIFFERING = 0.01
"""Largest share of a draft model's or head's tokens that may have other ids than the target's: revisions of a model
rename a few special tokens.
"""
Tokenizers = tuple[Tokenizer, Tokenizer]
"""The draft model's tokenizer and the target's."""


@dataclass(frozen=True)
class TargetIdentity:
    """Properties of the target that a drafter must match."""

    bundle: Bundle
    tokenizer_dir: Path
    tokenizer: Tokenizer | None

    @property
    def vocab_size(self) -> int:
        return self.bundle.config.vocab_size


def check_corpora(speculation: Speculation, tokenizer: Tokenizer | None, target_vocab_size: int) -> None:
    """SpecDecError unless the corpora can be read, and every token id means the same in them as for the target."""
    for path in speculation.corpora:
        check_corpus(Corpus.open(path), tokenizer, target_vocab_size)


def check_corpus(corpus: Corpus, tokenizer: Tokenizer | None, target_vocab_size: int) -> None:
    """SpecDecError unless this corpus can be read, and every token id means the same in it as for the target."""
    path, info = corpus.path, corpus.info
    if tokenizer is not None and tokenizer_digest(tokenizer) != info.tokenizer_digest:
        raise SpecDecError(
            f"the corpus was made with another tokenizer: {path}",
            hint="recreate it, with the target's tokenizer",
            code="corpus_tokenizer",
        )
    if info.vocab_size > target_vocab_size:
        raise SpecDecError(
            f"the corpus has a vocabulary of {info.vocab_size}, and the target one of {target_vocab_size}: {path}",
            hint="recreate it, with the target's tokenizer",
        )
    if tokenizer is None:
        warnings.warn("corpus and target cannot be compared: the engine has no tokenizer", SpecDecWarning, stacklevel=2)


def check_draft_engine(draft: Bundle, target: TargetIdentity, *, use_logits: bool) -> Tokenizers | None:
    """None if every token id means the same to the draft model and the target; otherwise the tokenizers by which drafts
    are translated.

    The models' vocabularies may be padded to different sizes. Without tokenizers to compare, the sizes must be equal.
    SpecDecError if they are not, or if drafts by probabilities would have to be translated.
    """
    _warn_of_size(draft, target.bundle)
    config = draft.config
    sizes = f"{config.vocab_size} ids in {draft.directory}, {target.vocab_size} in {target.bundle.directory}"
    with draft_engine_errors():
        tokenizer = tokenizer_of_engine(draft)
    if tokenizer is None or target.tokenizer is None:
        if config.vocab_size != target.vocab_size:
            raise SpecDecError(
                f"draft and target model have different vocabularies, and no tokenizers to compare: {sizes}",
                hint="use models that share a tokenizer, and build engines from checkpoints that have it",
            )
        warnings.warn(
            "draft and target model cannot be compared: an engine has no tokenizer", SpecDecWarning, stacklevel=2
        )
        return None
    if _same_file(draft.directory / "tokenizer.json", target.tokenizer_dir / "tokenizer.json"):
        return None
    vocabulary, target_vocabulary = tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if vocabulary == target_vocabulary:
        return None
    if use_logits:
        differing = [token for token, i in vocabulary.items() if target_vocabulary.get(token) != i]
        example = f", for one {min(differing, key=vocabulary.__getitem__)!r}" if differing else ""
        raise SpecDecError(
            f"draft and target model have different tokenizers: {len(vocabulary)} tokens in {draft.directory}, "
            f"{len(target_vocabulary)} in {target.tokenizer_dir}; {len(differing)} of the draft's differ{example}; "
            "drafts by probabilities need the target's own",
            hint="without `use_logits` drafts are re-tokenized",
        )
    warnings.warn(
        f"the draft model has another tokenizer ({len(vocabulary):,} and {len(target_vocabulary):,} tokens): drafts "
        "are re-tokenized, which costs time and acceptance",
        SpecDecWarning,
        stacklevel=2,
    )
    return tokenizer, target.tokenizer


def _warn_of_size(draft: Bundle, target: Bundle) -> None:
    """Warn if the draft model is the target itself, or larger: its drafts then cost as much as the target's tokens."""
    if draft.directory.resolve() == target.directory.resolve():
        warnings.warn(
            "the draft model is the target itself: every draft costs more than it can save",
            SpecDecWarning,
            stacklevel=2,
        )
    elif (own := draft.num_weight_bytes) > (theirs := target.num_weight_bytes):
        warnings.warn(
            f"the draft model is larger than the target, and every draft costs more than it can save: "
            f"{own / 1e6:,.1f} MB of weights, the target has {theirs / 1e6:,.1f} MB",
            SpecDecWarning,
            stacklevel=2,
        )


def check_parallel_engine(draft: Bundle, target: TargetIdentity, num_masks: int) -> int:
    """The mask token of a parallel draft model (PARD).

    SpecDecError unless the model drafts the target's tokens, by `num_masks` masks at once.
    """
    config, given = draft.config, draft.given
    mask_token = read_pard_mask(config.pretrained_config, config.vocab_size, given)
    if num_masks > config.build_config.max_draft_len:
        raise SpecDecError(
            f"the parallel draft model's engine was built for drafts of at most "
            f"{config.build_config.max_draft_len + 1} tokens, and the drafter's have up to {num_masks + 1}: {given}",
            hint=f"lower the draft length, or build it with a max_draft_len of {num_masks}",
            code="draft_len_of_masks",
            max_draft_len=num_masks,
        )
    with draft_engine_errors():
        tokenizer = tokenizer_of_engine(draft)
    if tokenizer is None or target.tokenizer is None:
        check_draft_engine(draft, target, use_logits=True)
        return mask_token
    _warn_of_size(draft, target.bundle)
    if not _same_file(draft.directory / "tokenizer.json", target.tokenizer_dir / "tokenizer.json"):
        _check_same_ids("parallel draft model", given, tokenizer, target.tokenizer, target.tokenizer_dir)
    return mask_token


def check_head_tokenizer(
    directory: Path, tokenizer_dir: Path, find: Callable[[], Tokenizer | None], what: str = "head"
) -> None:
    """SpecDecError for a trained head (or another part, which `what` names) if the tokenizer in its directory has other
    ids than the target's for more than 1 % of its tokens. `find` opens the target's tokenizer, if it has one. A head
    reads and drafts ids, and with another tokenizer these are other words.
    """
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((directory / name).is_file() for name in names):
        return  # from a config alone transformers would make a tokenizer with a single token
    if _same_file(directory / "tokenizer.json", tokenizer_dir / "tokenizer.json") or (target := find()) is None:
        return
    try:
        tokenizer = open_tokenizer(directory)
    except SpecDecError as error:
        warnings.warn(f"the {what}'s tokenizer is not compared with the target's: {error.message}", SpecDecWarning, 2)
        return
    _check_same_ids(what, directory, tokenizer, target, tokenizer_dir)


def _check_same_ids(what: str, where: str | Path, tokenizer: Tokenizer, target: Tokenizer, target_dir: Path) -> None:
    """SpecDecError if more than 1 % of the drafting model's tokens have other ids than the target's."""
    vocabulary, target_vocabulary = tokenizer.get_vocab(), target.get_vocab()
    differing = [token for token, i in vocabulary.items() if target_vocabulary.get(token) != i]
    if len(differing) > _MOST_DIFFERING * len(vocabulary):
        raise SpecDecError(
            f"the {what} has another tokenizer than the target: {len(differing)} of its {len(vocabulary)} tokens are "
            f"not those of {target_dir}, for one {min(differing, key=vocabulary.__getitem__)!r}: {where}",
            hint=f"take the {what} of this model, or of its family",
        )


def _same_file(a: Path, b: Path) -> bool:
    return a.is_file() and b.is_file() and filecmp.cmp(a, b, shallow=False)
