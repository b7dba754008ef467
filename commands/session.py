"""What `run` and `summarize` share: an opened engine with its tokenizer and drafter settings, and timed generation."""

import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from commands.options import NgramSettings
from commands.text import StopWords, find_end_ids, load_tokenizer
from runtime.bundle import read_engine_config
from runtime.config import as_json
from runtime.drafters.ngram import NgramDrafter
from runtime.engine import Engine, KVCacheConfig
from runtime.errors import SpecDecError, UsageError
from runtime.orchestrator import generate
from runtime.request import Request, Sequence
from runtime.stats import LoopTimes, sum_stats

OnTokens = Callable[[Sequence, list[int]], None]


@dataclass(frozen=True)
class Session:
    """An engine ready to answer requests."""

    engine_dir: Path
    tokenizer_dir: Path
    engine: Engine
    tokenizer: PreTrainedTokenizerBase | None
    end_ids: frozenset[int]
    stop_words: StopWords | None
    ngram: NgramSettings | None

    def request(self, request_id: int, prompt_tokens: list[int], max_new_tokens: int) -> Request:
        return Request(request_id, tuple(prompt_tokens), max_new_tokens, self.end_ids, self.stop_words)

    @property
    def max_draft_len(self) -> int:
        return self.ngram.max_draft_len if self.ngram else 0

    def run(self, requests: Seq[Request], *, speculate: bool, on_tokens: OnTokens | None = None) -> "Generation":
        """Answer the requests, in order, with the drafter or without."""
        ngram = self.ngram if speculate else None
        drafter = NgramDrafter(ngram.max_matching_ngram_size) if ngram else None
        times, finished = LoopTimes(), {}
        for sequence, new_tokens in generate(self.engine, requests, drafter, self.max_draft_len, times):
            if on_tokens:
                on_tokens(sequence, new_tokens)
            if sequence.finish_reason is not None:
                finished[sequence.request.id] = sequence
        return Generation([finished[request.id] for request in requests], times)

    def engine_record(self) -> dict[str, Any]:
        """What made the numbers, for JSON."""
        config = self.engine.config
        record = as_json(config)
        return {
            "engine_dir": str(self.engine_dir),
            "model_type": config.pretrained_config["model_type"],
            **{key: record[key] for key in ("dtype", "build_config", "environment", "logits_check", "compiler_note")},
        }

    def settings_record(self) -> dict[str, Any]:
        return {
            "ngram_config": dataclasses.asdict(self.ngram) if self.ngram else None,
            "end_ids": sorted(self.end_ids),
            "stop_words": list(self.stop_words.words) if self.stop_words else [],
            "block_reuse": self.engine.block_reuse,
        }


@dataclass(frozen=True)
class Generation:
    """Finished sequences and where the time went."""

    sequences: list[Sequence]
    times: LoopTimes

    def total(self, max_draft_len: int) -> dict[str, Any]:
        """Counts over all requests, the rates derived from them, and the times."""
        return total_record(self.sequences, self.times, max_draft_len)


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
        "target_time_s": times.target_time_s,
        "host_time_s": times.host_time_s,
        "num_iterations": times.num_iterations,
    }


@contextmanager
def open_session(
    engine_dir: Path,
    tokenizer_dir: Path | None,
    ngram: NgramSettings | None,
    kv_cache: KVCacheConfig,
    end_id: int | None,
    stop_words: list[str],
) -> Iterator[Session]:
    """Open an engine for `ngram`'s device; SpecDecError if it cannot serve those settings."""
    config = read_engine_config(engine_dir)
    max_draft_len = config.build_config.max_draft_len
    if ngram and ngram.max_draft_len > max_draft_len:
        built = f"takes drafts of at most {max_draft_len} tokens" if max_draft_len else "was built without drafts"
        raise SpecDecError(
            f"the engine {built}, and `--ngram-config` asks for: {ngram.max_draft_len}",
            hint="lower it, or build with `--speculative-decoding-mode draft_tokens_external "
            f"--use-paged-context-fmha enable --max-draft-len {ngram.max_draft_len}`",
        )
    if end_id is not None and end_id >= config.vocab_size:
        raise SpecDecError(
            f"`--end-id` is outside the vocabulary of {config.vocab_size}: {end_id}",
            hint="give an id of the engine's tokenizer",
        )
    if any(not word for word in stop_words):
        raise UsageError("a stop word is empty: `--stop-words ''`", hint="leave it out")
    tokenizer = None
    if tokenizer_dir is not None:
        tokenizer = load_tokenizer(tokenizer_dir, config.pretrained_config)
    elif (engine_dir / "tokenizer_config.json").is_file() or (engine_dir / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(engine_dir, config.pretrained_config)
    if stop_words and tokenizer is None:
        raise SpecDecError("stop words need a tokenizer, and the engine has none", hint="`--tokenizer-dir` names one")
    end_ids = (
        frozenset([end_id]) if end_id is not None else find_end_ids(engine_dir, config.pretrained_config, tokenizer)
    )
    stops = StopWords(tuple(stop_words), tokenizer) if stop_words and tokenizer else None
    with Engine.open(engine_dir, ngram.device_id if ngram else 0, kv_cache) as engine:
        yield Session(engine_dir, tokenizer_dir or engine_dir, engine, tokenizer, end_ids, stops, ngram)
