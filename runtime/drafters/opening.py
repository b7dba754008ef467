"""Drafters opened for a session: n-gram lookup, a draft model with its engine, or somebody's own."""

import filecmp
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from commands.options.drafter_settings import (
    ChainSettings,
    CustomSettings,
    DrafterSettings,
    DraftTargetSettings,
    NgramSettings,
    SuffixSettings,
    each_drafter,
)
from commands.output import warn
from runtime.bundle import read_engine_config
from runtime.config import EngineConfig
from runtime.corpus import Corpus
from runtime.costs import CostModel
from runtime.drafters.adaptive import AdaptiveDrafter
from runtime.drafters.chain import ChainDrafter
from runtime.drafters.corpus import CorpusDrafter
from runtime.drafters.draft_target import DraftTargetDrafter
from runtime.drafters.ngram import NgramDrafter
from runtime.drafters.pool import NgramPool
from runtime.drafters.protocol import Drafter
from runtime.drafters.suffix import SuffixDrafter
from runtime.engine import Engine, KVCacheConfig
from runtime.errors import SpecDecError
from runtime.request import Draft, Sequence
from runtime.text import find_tokenizer, tokenizer_digest


@dataclass(frozen=True)
class TargetBundle:
    """What a drafter has to agree with, and, where it is to draft no more than pays, what steps cost."""

    engine_dir: Path
    tokenizer_dir: Path
    vocab_size: int
    costs: CostModel | None = None


@contextmanager
def open_drafter(settings: DrafterSettings, target: TargetBundle, kv_cache: KVCacheConfig) -> Iterator[Drafter]:
    """The drafter the settings name, for as long as the block lasts."""
    match settings:
        case NgramSettings():
            yield _adapted(_ngram_drafter(settings), target)
        case SuffixSettings():
            yield _adapted(SuffixDrafter(pool=NgramPool() if settings.pool == "public" else None), target)
        case ChainSettings():
            with ExitStack() as stack:
                opened = [stack.enter_context(open_drafter(s, target, kv_cache)) for s in settings.drafters]
                lengths = [s.max_draft_len for s in settings.drafters]
                yield ChainDrafter([ShortDrafter(d, n) if n else d for d, n in zip(opened, lengths, strict=True)])
        case CustomSettings():
            yield _adapted(load_custom_drafter(settings), target)
        case DraftTargetSettings():
            with _errors_of_the_draft_engine():
                config = read_engine_config(settings.draft_engine_dir)
            check_vocabularies(config, settings.draft_engine_dir, target)
            if settings.draft_engine_dir.resolve() == target.engine_dir.resolve():
                warn("the draft model is the target itself: every draft costs more than it can save")
            with _errors_of_the_draft_engine():
                engine = Engine.open(settings.draft_engine_dir, settings.draft_device_id, kv_cache)
            with engine:
                drafter = DraftTargetDrafter(engine, target.vocab_size, use_logits=settings.use_logits)
                yield _adapted(drafter, target, CostModel(config.step_costs, config.host_s) if target.costs else None)


def _adapted(drafter: Drafter, target: TargetBundle, draft_costs: CostModel | None = None) -> Drafter:
    """The drafter itself, or where costs are known its drafts cut to what pays."""
    if target.costs is None:
        return drafter
    if draft_costs is None:
        return AdaptiveDrafter(drafter, target.costs.iteration_s)
    return AdaptiveDrafter(drafter, target.costs.iteration_s, partial(draft_costs.iteration_s, draft_len=0))


class ShortDrafter:
    """A drafter in a chain in which others may draft more tokens."""

    def __init__(self, drafter: Drafter, max_draft_len: int) -> None:
        self.drafter, self.max_draft_len = drafter, max_draft_len

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return self.drafter.propose(sequences, min(max_draft_len, self.max_draft_len))

    def forget(self, request_id: int) -> None:
        self.drafter.forget(request_id)


def each_open_drafter(drafter: Drafter | None) -> Iterator[Drafter]:
    """The drafters that propose, whatever they are put together in."""
    if isinstance(drafter, ChainDrafter):
        for member in drafter.drafters:
            yield from each_open_drafter(member)
    elif isinstance(drafter, ShortDrafter | AdaptiveDrafter):
        yield from each_open_drafter(drafter.drafter)
    elif drafter is not None:
        yield drafter


def clear_pools(drafter: Drafter | None) -> None:
    """Forget what finished requests left to others."""
    for each in each_open_drafter(drafter):
        if isinstance(each, NgramDrafter | SuffixDrafter) and each.pool is not None:
            each.pool = NgramPool(each.pool.max_tokens, each.pool.max_matching_ngram_size)


def _ngram_drafter(settings: NgramSettings) -> Drafter:
    """Lookup in the sequence, then in the pool, then in the corpus."""
    max_size, min_size = settings.max_matching_ngram_size, settings.min_matching_ngram_size
    pool = NgramPool(max_matching_ngram_size=max_size) if settings.pool == "public" else None
    ngram = NgramDrafter(max_size, min_matching_ngram_size=min_size, ranking=settings.ranking, pool=pool)
    if settings.corpus is None:
        return ngram
    corpus = CorpusDrafter(Corpus.open(settings.corpus), max_size, min_matching_ngram_size=min_size)
    return ChainDrafter([ngram, corpus])


def check_corpora(
    settings: DrafterSettings | None, tokenizer: PreTrainedTokenizerBase | None, target_vocab_size: int
) -> None:
    """SpecDecError unless the corpora can be read, and mean the same by every token id as the target."""
    for path in _corpora(settings):
        info = Corpus.open(path).info
        if tokenizer is not None and tokenizer_digest(tokenizer) != info.tokenizer_digest:
            raise SpecDecError(
                f"the corpus is of another tokenizer: {path}",
                hint="make it anew, with the target's engine directory as `--tokenizer-dir`",
            )
        if info.vocab_size > target_vocab_size:
            raise SpecDecError(
                f"the corpus has a vocabulary of {info.vocab_size}, and the target one of {target_vocab_size}: {path}",
                hint="make it anew, with the target's tokenizer",
            )
        if tokenizer is None:
            warn("corpus and target cannot be compared: the engine has no tokenizer")


def check_corpus_files(settings: DrafterSettings | None) -> None:
    """SpecDecError unless every corpus can be read; its tokenizer is compared when the target's is known."""
    for path in _corpora(settings):
        Corpus.open(path)


def _corpora(settings: DrafterSettings | None) -> list[Path]:
    return [s.corpus for s in each_drafter(settings) if isinstance(s, NgramSettings) and s.corpus is not None]


@contextmanager
def _errors_of_the_draft_engine() -> Iterator[None]:
    try:
        yield
    except SpecDecError as error:
        raise type(error)(f"draft engine: {error.message}", hint=error.hint) from error


def check_vocabularies(config: EngineConfig, draft_engine_dir: Path, target: TargetBundle) -> None:
    """SpecDecError unless draft and target model mean the same by every token id.

    Their tokenizers must have the same content; the models' own vocabularies may be padded to different sizes. Without
    tokenizers to compare, the sizes must be equal.
    """
    sizes = f"{config.vocab_size} ids in {draft_engine_dir}, {target.vocab_size} in {target.engine_dir}"
    tokenizer = find_tokenizer(draft_engine_dir, config.pretrained_config)
    target_config = read_engine_config(target.engine_dir)
    target_tokenizer = find_tokenizer(target.tokenizer_dir, target_config.pretrained_config)
    if tokenizer is None or target_tokenizer is None:
        if config.vocab_size != target.vocab_size:
            raise SpecDecError(
                f"draft and target model have different vocabularies, and no tokenizers to compare: {sizes}",
                hint="use models that share a tokenizer, and build engines from checkpoints that have it",
            )
        warn("draft and target model cannot be compared: an engine has no tokenizer")
        return
    if _same_file(draft_engine_dir / "tokenizer.json", target.tokenizer_dir / "tokenizer.json"):
        return
    vocabulary, target_vocabulary = tokenizer.get_vocab(), target_tokenizer.get_vocab()
    if vocabulary != target_vocabulary:
        differing = [token for token, i in vocabulary.items() if target_vocabulary.get(token) != i]
        example = f", for one {min(differing, key=vocabulary.__getitem__)!r}" if differing else ""
        raise SpecDecError(
            f"draft and target model have different tokenizers: {len(vocabulary)} tokens in {draft_engine_dir}, "
            f"{len(target_vocabulary)} in {target.tokenizer_dir}; {len(differing)} of the draft's differ{example}",
            hint="use a draft model with the target's own tokenizer",
        )


def _same_file(a: Path, b: Path) -> bool:
    return a.is_file() and b.is_file() and filecmp.cmp(a, b, shallow=False)


def load_custom_drafter(settings: CustomSettings) -> "GuardedDrafter":
    """Call the factory; SpecDecError if there is none, if it fails, or if what it returns is no drafter."""
    name = f"{settings.module}:{settings.factory}"
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(settings.module)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise SpecDecError(
            f"cannot import the drafter's module ({type(error).__name__}: {error}): {settings.module}",
            hint="it is looked for in the current directory and where Python finds packages",
        ) from error
    factory = getattr(module, settings.factory, None)
    if not callable(factory):
        known = ", ".join(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
        raise SpecDecError(f"`--drafter` names nothing that can be called: {name}", hint=f"the module has: {known}")
    drafter = _guarded(name, factory)
    missing = [method for method in ("propose", "forget") if not callable(getattr(drafter, method, None))]
    if missing:
        raise SpecDecError(
            f"what `--drafter {name}` returns is no drafter, it lacks `{'` and `'.join(missing)}`: "
            f"{type(drafter).__name__}",
            hint="a drafter has `propose(sequences, max_draft_len)` and `forget(request_id)`",
        )
    return GuardedDrafter(name, drafter)


class GuardedDrafter:
    """Somebody's drafter, whose failures are theirs to mend, with a note of whether it ever gave probabilities."""

    def __init__(self, name: str, drafter: Drafter) -> None:
        self._name, self._drafter = name, drafter
        self.has_given_probs = False

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        before = [list(sequence.tokens) for sequence in sequences]
        drafts: list[Draft] = _guarded(self._name, self._drafter.propose, sequences, max_draft_len)
        for sequence, tokens in zip(sequences, before, strict=True):
            if sequence.tokens != tokens:
                raise SpecDecError(
                    f"the drafter `{self._name}` changed the tokens of request {sequence.request.id}",
                    hint="work on a copy: `tokens = list(sequence.tokens)`",
                )
        if isinstance(drafts, list):
            self.has_given_probs |= any(getattr(draft, "probs", None) is not None for draft in drafts)
        return drafts

    def forget(self, request_id: int) -> None:
        _guarded(self._name, self._drafter.forget, request_id)


def _guarded(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except SpecDecError:
        raise
    except (Exception, SystemExit) as error:  # somebody else's code
        raise SpecDecError(
            f"the drafter `{name}` failed: {type(error).__name__}: {error}",
            hint="`specdec --debug` shows where",
        ) from error
