"""What `run` and `summarize` share: an opened engine with its tokenizer and drafter settings, and timed generation."""

import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from commands.options.drafter_settings import (
    CustomSettings,
    DrafterSettings,
    DraftLenMode,
    DraftTargetSettings,
    NgramSettings,
    SuffixSettings,
    drafter_names,
    each_drafter,
)
from runtime import leader, orchestrator
from runtime.bundle import read_engine_config
from runtime.config import EngineConfig, as_json
from runtime.costs import CostModel
from runtime.drafters.draft_target import DraftTargetDrafter
from runtime.drafters.opening import (
    GuardedDrafter,
    TargetBundle,
    check_corpora,
    clear_pools,
    each_open_drafter,
    open_drafter,
)
from runtime.drafters.protocol import Drafter
from runtime.engine import DEFAULT_MAX_NUM_TOKENS, Engine, KVCacheConfig
from runtime.errors import SpecDecError, UsageError
from runtime.request import Request, Sequence
from runtime.sampling import SamplingParams
from runtime.stats import LoopTimes, sum_stats
from runtime.text import StopWords, bad_word_tokens, find_end_ids, find_tokenizer, load_tokenizer, word_tokens

OnTokens = Callable[[Sequence, list[int]], None]
Mode = Literal["orchestrator", "leader"]
Settings = TypeVar("Settings", NgramSettings, SuffixSettings, DraftTargetSettings, CustomSettings)
_LOOPS = {"orchestrator": orchestrator.generate, "leader": leader.generate}


@dataclass(frozen=True)
class SessionSettings:
    """What the command line says about generation, before an engine is looked at."""

    engine_dir: Path
    tokenizer_dir: Path | None
    drafter: DrafterSettings | None
    sampling: SamplingParams
    kv_cache: KVCacheConfig
    end_id: int | None
    stop_words: list[str]
    bad_words: list[str]
    mode: Mode = "orchestrator"
    max_num_tokens: int = DEFAULT_MAX_NUM_TOKENS
    draft_len_mode: DraftLenMode = "fixed"
    profile: Path | None = None
    """Where the drafter's settings are from, if from a file."""


@dataclass(frozen=True)
class Session:
    """An engine ready to answer requests. `sampling` has the bad words' tokens."""

    settings: SessionSettings
    engine: Engine
    drafter: Drafter | None
    tokenizer: PreTrainedTokenizerBase | None
    end_ids: frozenset[int]
    stop_words: StopWords | None
    sampling: SamplingParams

    def request(self, request_id: int, prompt_tokens: Seq[int], max_new_tokens: int) -> Request:
        return Request(
            request_id, tuple(prompt_tokens), max_new_tokens, self.end_ids, self.stop_words, sampling=self.sampling
        )

    @property
    def max_draft_len(self) -> int:
        settings = self.settings.drafter
        if settings is None:
            return 0
        return self.engine.max_draft_len if settings.max_draft_len is None else settings.max_draft_len

    @property
    def tokenizer_dir(self) -> Path:
        return self.settings.tokenizer_dir or self.settings.engine_dir

    @property
    def draft_target(self) -> DraftTargetDrafter | None:
        """The draft model's drafter, by itself or in a chain."""
        return next((d for d in each_open_drafter(self.drafter) if isinstance(d, DraftTargetDrafter)), None)

    @property
    def draft_engine(self) -> Engine | None:
        return self.draft_target.engine if self.draft_target else None

    @property
    def draws_by_probs(self) -> bool:
        """Whether output follows the target's law without being the tokens it draws by itself (rejection sampling)."""
        if self.sampling.is_greedy:
            return False
        custom = [drafter for drafter in each_open_drafter(self.drafter) if isinstance(drafter, GuardedDrafter)]
        return any(d.has_given_probs for d in custom) or (
            self.draft_target is not None and self.draft_target.use_logits
        )

    def run(self, requests: Seq[Request], *, speculate: bool, on_tokens: OnTokens | None = None) -> "Generation":
        """Answer the requests, with the drafter or without. Raises Interrupted at Ctrl-C."""
        drafter = self.drafter if speculate else None
        self.check_requests(requests)
        times, finished = LoopTimes(), {}
        draft_start_s = self.draft_engine.step_time_s if self.draft_engine else 0.0
        generate = _LOOPS[self.settings.mode]
        is_interrupted = False
        try:
            with closing(generate(self.engine, requests, drafter, self.max_draft_len, times)) as steps:
                for sequence, new_tokens in steps:
                    if sequence.finish_reason is not None:
                        finished[sequence.request.id] = sequence
                    if on_tokens:
                        on_tokens(sequence, new_tokens)
        except KeyboardInterrupt:
            is_interrupted = True
        if self.draft_engine:
            times.draft_model_time_s = self.draft_engine.step_time_s - draft_start_s
        generation = Generation([finished[request.id] for request in requests if request.id in finished], times)
        if is_interrupted:
            raise Interrupted(generation)
        return generation

    def check_requests(self, requests: Seq[Request]) -> None:
        """SpecDecError if the engine or the draft engine cannot serve one of them."""
        for request in requests:
            self.engine.check_request(request)
            if self.draft_target is not None:
                self.draft_target.check_request(request)

    def warm_up(self, requests: Seq[Request]) -> None:
        """Run a few tokens of the first request with the drafter and without, and forget them."""
        first = [dataclasses.replace(requests[0], max_new_tokens=min(requests[0].max_new_tokens, 8))]
        for speculate in (True, False):
            self.run(first, speculate=speculate)
        self.clear_cache()
        self.clear_pools()

    def run_without_drafter(self, requests: Seq[Request]) -> "Generation":
        """The same requests again, from an empty cache and with nothing drafted."""
        self.clear_cache()
        return self.run([dataclasses.replace(r, keep_logits=False) for r in requests], speculate=False)

    def clear_cache(self) -> None:
        """Forget the K/V of finished requests, the draft model's too, so that what comes next starts cold."""
        self.engine.clear_cache()
        if self.draft_engine is not None:
            self.draft_engine.clear_cache()

    def clear_pools(self) -> None:
        """Forget what finished requests left to others, so that a warm-up's output is not found by what is measured."""
        clear_pools(self.drafter)

    def engine_records(self) -> dict[str, Any]:
        """What made the numbers, for JSON."""
        draft = self._settings_of(DraftTargetSettings)
        return {
            "engine": _engine_record(self.settings.engine_dir, self.engine.config),
            "draft_engine": _engine_record(draft.draft_engine_dir, self.draft_engine.config)
            if self.draft_engine and draft
            else None,
        }

    def settings_record(self) -> dict[str, Any]:
        custom = self._settings_of(CustomSettings)
        sampling = dataclasses.asdict(self.sampling) | {"bad_words": self.settings.bad_words}
        return {
            "drafters": drafter_names(self.settings.drafter),
            "ngram_config": _config_record(self._settings_of(NgramSettings)),
            "suffix_config": _config_record(self._settings_of(SuffixSettings)),
            "draft_target_model_config": _config_record(self._settings_of(DraftTargetSettings)),
            "drafter": f"{custom.module}:{custom.factory}" if custom else None,
            "sampling": sampling,
            "end_ids": sorted(self.end_ids),
            "stop_words": list(self.stop_words.words) if self.stop_words else [],
            "draft_len_mode": self.settings.draft_len_mode,
            "profile": None if self.settings.profile is None else str(self.settings.profile),
            "mode": self.settings.mode,
            "block_reuse": self.engine.block_reuse,
            "max_num_tokens": self.engine.max_num_tokens,
        }

    def _settings_of(self, kind: type[Settings]) -> Settings | None:
        """The settings of the drafter of that kind, by itself or in a chain."""
        return next((s for s in each_drafter(self.settings.drafter) if isinstance(s, kind)), None)


def _config_record(settings: NgramSettings | SuffixSettings | DraftTargetSettings | None) -> dict[str, Any] | None:
    if settings is None:
        return None
    return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(settings).items()}


def _engine_record(engine_dir: Path, config: EngineConfig) -> dict[str, Any]:
    record = as_json(config)
    return {
        "engine_dir": str(engine_dir),
        "model_type": config.pretrained_config["model_type"],
        **{key: record[key] for key in ("dtype", "build_config", "environment", "logits_check", "compiler_note")},
    }


@dataclass(frozen=True)
class Generation:
    """Finished sequences and where the time went."""

    sequences: list[Sequence]
    times: LoopTimes

    @property
    def work(self) -> "Work":
        return Work(self.times.wall_s, sum(sequence.num_generated for sequence in self.sequences))

    def total(self, max_draft_len: int) -> dict[str, Any]:
        """Counts over all requests, the rates derived from them, and the times."""
        return total_record(self.sequences, self.times, max_draft_len)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what had finished by then."""

    def __init__(self, finished: Generation) -> None:
        super().__init__()
        self.finished = finished


@dataclass(frozen=True)
class Work:
    """How long so many tokens took."""

    wall_s: float
    num_tokens: int

    def speedup_over(self, other: "Work") -> float:
        """The other's time for a token over this one's; of wall times, where both made as many tokens."""
        return other.wall_s / self.wall_s * (self.num_tokens / other.num_tokens)


def total_record(sequences: Seq[Sequence], times: LoopTimes, max_draft_len: int) -> dict[str, Any]:
    stats = [sequence.stats for sequence in sequences]
    record = sum_stats(stats).counts(max_draft_len)
    num_tokens = sum(s.num_generated_tokens for s in stats)
    return {
        "num_requests": len(sequences),
        **record,
        "wall_s": times.wall_s,
        "output_tokens_per_second": num_tokens / times.wall_s if times.wall_s else None,
        "draft_time_s": times.draft_time_s,
        "draft_model_time_s": times.draft_model_time_s,
        "target_time_s": times.target_time_s,
        "host_time_s": times.host_time_s,
        "num_iterations": times.num_iterations,
        **{f"{part}_time_per_step_s": _per_step(times, part) for part in ("draft", "draft_model", "target", "host")},
    }


def _per_step(times: LoopTimes, part: str) -> float | None:
    seconds: float = getattr(times, f"{part}_time_s")
    return seconds / times.num_iterations if times.num_iterations else None


@contextmanager
def open_session(settings: SessionSettings) -> Iterator[Session]:
    """Open the engine and the drafter; SpecDecError if they cannot serve the settings."""
    engine_dir = settings.engine_dir
    config = read_engine_config(engine_dir)
    _check_settings(settings, config)
    tokenizer = (
        load_tokenizer(settings.tokenizer_dir, config.pretrained_config)
        if settings.tokenizer_dir is not None
        else find_tokenizer(engine_dir, config.pretrained_config)
    )
    end_ids = (
        frozenset([settings.end_id])
        if settings.end_id is not None
        else find_end_ids(engine_dir, config.pretrained_config, tokenizer)
    )
    sampling, stop_words = settings.sampling, None
    if settings.stop_words or settings.bad_words:
        if tokenizer is None:
            raise SpecDecError(
                "stop words and bad words need a tokenizer, and the engine has none", hint="`--tokenizer-dir` names one"
            )
        for word in settings.stop_words:
            word_tokens(tokenizer, "--stop-words", word)
        sampling = dataclasses.replace(sampling, bad_words=bad_word_tokens(tokenizer, settings.bad_words))
        stop_words = StopWords(tuple(settings.stop_words), tokenizer) if settings.stop_words else None
    check_corpora(settings.drafter, tokenizer, config.vocab_size)
    with ExitStack() as stack:
        device_id = settings.drafter.device_id if settings.drafter else 0
        engine = stack.enter_context(Engine.open(engine_dir, device_id, settings.kv_cache, settings.max_num_tokens))
        drafter = None
        if settings.drafter is not None:
            costs = CostModel(config.step_costs, config.host_s) if settings.draft_len_mode == "auto" else None
            target = TargetBundle(engine_dir, settings.tokenizer_dir or engine_dir, config.vocab_size, costs)
            drafter = stack.enter_context(open_drafter(settings.drafter, target, settings.kv_cache))
        yield Session(settings, engine, drafter, tokenizer, end_ids, stop_words, sampling)


def _check_settings(settings: SessionSettings, config: EngineConfig) -> None:
    """SpecDecError for what an engine of this configuration cannot do."""
    max_draft_len = config.build_config.max_draft_len
    wanted = settings.drafter.max_draft_len if settings.drafter else 0
    if settings.drafter and (max_draft_len == 0 or (wanted or 0) > max_draft_len):
        built = f"takes drafts of at most {max_draft_len} tokens" if max_draft_len else "was built without drafts"
        raise SpecDecError(
            f"the engine {built}, and the drafter's are of up to: {wanted or 'any number'}",
            hint="lower it, or build with `--speculative-decoding-mode draft_tokens_external "
            f"--use-paged-context-fmha enable --max-draft-len {wanted or 10}`",
        )
    if settings.end_id is not None and settings.end_id >= config.vocab_size:
        raise SpecDecError(
            f"`--end-id` is outside the vocabulary of {config.vocab_size}: {settings.end_id}",
            hint="give an id of the engine's tokenizer",
        )
    if settings.sampling.top_k > config.vocab_size:
        raise SpecDecError(
            f"`--top-k` exceeds the vocabulary of {config.vocab_size}: {settings.sampling.top_k}",
            hint="0 leaves the whole vocabulary",
        )
    for flag, words in (("--stop-words", settings.stop_words), ("--bad-words", settings.bad_words)):
        if any(not word for word in words):
            raise UsageError(f"`{flag}` has a word of no letters: ''", hint="leave it out")
