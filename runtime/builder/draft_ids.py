"""Ids that drafts may have: a file's, the most frequent of traces or a corpus, or those a tokenizer learned first."""

import warnings
from collections.abc import Sequence as Seq
from pathlib import Path

from runtime.builder.build import DraftSource
from runtime.checkpoint.checkpoint_dir import OpenedCheckpoint
from runtime.checkpoint.tokenizer import Tokenizer
from runtime.drafters.heads.head_config import DraftOutputSettings, HeadConfig
from runtime.engine.draft_vocab import choose_vocabulary, default_size, missing_ends, read_ids, training_order
from runtime.loop.compatibility import check_corpus, check_head_tokenizer
from runtime.model.pretrained import parse_pretrained_config
from runtime.text.corpus import Corpus, is_corpus
from runtime.text.text import find_end_ids, find_tokenizer
from runtime.text.trace_lines import is_like_traces
from runtime.text.traces import read_traces
from runtime.util.errors import SpecDecError, SpecDecWarning, UsageError


def choose_drafts(wanted: DraftOutputSettings, heads: Seq[HeadConfig], checkpoint: OpenedCheckpoint) -> DraftSource:
    """The ids and the head for drafts: the first of these heads, or none for a self-draft copy. SpecDecError for a head
    with another tokenizer, and for ids that cannot be chosen.
    """
    directory, config = checkpoint.directory, checkpoint.config.pretrained_config
    for head in heads:
        check_head_tokenizer(head.directory, directory, lambda: find_tokenizer(directory, config))
    return DraftSource(tuple(_choose_ids(wanted.vocab, wanted.vocab_size, checkpoint)), heads[0] if heads else None)


def _choose_ids(source: str | None, size: int | None, checkpoint: OpenedCheckpoint) -> list[int]:
    """Token ids that may be drafted, at most `size`: from the file `source`, or chosen if it is `auto`; an empty list,
    which stands for all ids, if it is None.
    """
    if source is None:
        return []
    directory, config = checkpoint.directory, checkpoint.config.pretrained_config
    vocab_size: int = parse_pretrained_config(config, str(directory / "config.json")).vocab_size
    if size is not None and size >= vocab_size:
        raise UsageError(
            f"draft_vocab_size is not below the vocabulary of {vocab_size}: {size}",
            hint="lower it, or leave the draft vocabulary out",
            name="draft_vocab_size",
        )
    tokenizer = find_tokenizer(directory, config)
    end_ids = find_end_ids(directory, config, tokenizer)
    if source == "auto" or is_corpus(Path(source)) or is_like_traces(Path(source)):
        texts = [] if source == "auto" else _read_texts(Path(source), tokenizer, vocab_size)
        if tokenizer is None and not texts:
            raise SpecDecError(
                f"the checkpoint has no tokenizer, so ids cannot be chosen for drafts: {directory}",
                hint='list the token ids in a file: `draft_vocab="FILE"`',
                code="no_tokenizer_for_ids",
            )
        order = range(vocab_size) if tokenizer is None else training_order(tokenizer, vocab_size)
        ends = [i for i in end_ids if i < vocab_size]
        return choose_vocabulary(texts, order, size or default_size(vocab_size), ends)
    return sorted(read_ids(Path(source), vocab_size)[:size])


def warn_of_missing_ends(drafts: DraftSource, checkpoint: OpenedCheckpoint) -> None:
    """Warn if none of the model's end ids is drafted. Opening the drafter warns again."""
    directory, config = checkpoint.directory, checkpoint.config.pretrained_config
    end_ids = find_end_ids(directory, config, find_tokenizer(directory, config)) if drafts.ids else ()
    if (warning := missing_ends(drafts.ids, end_ids)) is not None:
        warnings.warn(warning, SpecDecWarning, stacklevel=2)


def _read_texts(path: Path, tokenizer: Tokenizer | None, vocab_size: int) -> list[tuple[Seq[int], Seq[int]]]:
    """Prompts and outputs of traces; each document of a corpus counts as an output."""
    if not is_corpus(path):
        return [(trace.prompt_tokens, trace.output_tokens) for trace in read_traces(path, tokenizer, vocab_size)]
    corpus = Corpus.open(path)
    check_corpus(corpus, tokenizer, vocab_size)
    return [((), document.tolist()) for document in corpus.documents()]
