"""Answer batches of prompts with the engine and with Hugging Face, timed alike.

Each system's first prompt is run once beforehand as a warm-up. Wall time is that of the batches, tokenization left out.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging as transformers_logging

from runtime.errors import SpecDecError
from runtime.request import Sequence
from runtime.sampling import Processor, penalties, warpers
from runtime.session import Session, Work, total_record
from runtime.stats import LoopTimes
from runtime.text import output_text

SystemName = Literal["hf", "engine", "engine_no_drafter"]
Batches = list[list[list[int]]]
"""Token ids of prompts, in batches."""


@dataclass
class SampleRun:
    """One prompt's answer and its times, from whichever system."""

    output_tokens: list[int]
    output_text: str
    ttft_s: float | None
    tpot_s: float | None
    latency_s: float | None
    wall_s: float  # of its batch, divided by the batch's prompts
    sequence: Sequence | None = None


@dataclass
class SystemRun:
    """All answers of one system."""

    name: SystemName
    samples: list[SampleRun] = field(default_factory=list)
    times: LoopTimes = field(default_factory=LoopTimes)

    @property
    def sequences(self) -> list[Sequence]:
        """The engine's; Hugging Face has none."""
        return [sample.sequence for sample in self.samples if sample.sequence]

    @property
    def work(self) -> Work:
        return Work(self.times.wall_s, sum(len(sample.output_tokens) for sample in self.samples))

    def work_on(self, chosen: list[int]) -> Work:
        """On some of the samples only."""
        samples = [self.samples[i] for i in chosen]
        return Work(sum(s.wall_s for s in samples), sum(len(s.output_tokens) for s in samples))

    def total(self, max_draft_len: int) -> dict[str, Any]:
        if self.name == "hf":
            num_tokens = sum(len(sample.output_tokens) for sample in self.samples)
            return {
                "num_requests": len(self.samples),
                "num_generated_tokens": num_tokens,
                "wall_s": self.times.wall_s,
                "output_tokens_per_second": num_tokens / self.times.wall_s,
            }
        return total_record(self.sequences, self.times, max_draft_len)


def evaluate_engine(
    session: Session, batches: Batches, output_len: int, advance: Callable[[], None]
) -> list[SystemRun]:
    """The engine with its drafter and without (or, if there is none, only without), batch by batch in turn."""
    session.check_requests([session.request(0, prompt, output_len) for batch in batches for prompt in batch])
    runs = [SystemRun("engine")]
    if session.drafter is not None:
        runs.append(SystemRun("engine_no_drafter"))
    for run in runs:
        _run_engine_batch(session, batches[0][:1], output_len, SystemRun(run.name))
    session.clear_pools()
    for batch in batches:
        for run in runs:
            _run_engine_batch(session, batch, output_len, run)
        advance()
    return runs


def _run_engine_batch(session: Session, batch: list[list[int]], output_len: int, run: SystemRun) -> None:
    session.clear_cache()
    requests = [session.request(len(run.samples) + i, prompt, output_len) for i, prompt in enumerate(batch)]
    generation = session.run(requests, speculate=run.name == "engine")
    run.times.add(generation.times)
    for sequence in generation.sequences:
        run.samples.append(
            SampleRun(
                sequence.output_tokens,
                output_text(session.tokenizer, sequence.output_tokens, session.stop_words) or "",
                sequence.stats.ttft_s,
                sequence.stats.tpot_s,
                sequence.stats.latency_s,
                generation.times.wall_s / len(batch),
                sequence,
            )
        )


class HuggingFace:
    """The same model run by transformers' `generate`, with the same sampling, its default attention and K/V cache."""

    def __init__(self, model: PreTrainedModel, session: Session) -> None:
        self.model = model
        self.session = session

    @classmethod
    def load(cls, model_dir: Path, session: Session) -> "HuggingFace":
        """Load in the engine's dtype, on the engine's device."""
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        dtype = getattr(torch, session.engine.config.dtype)
        try:
            model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, local_files_only=True)
        except Exception as error:  # transformers raises many kinds; the user needs the directory
            raise SpecDecError(f"transformers cannot load: {model_dir}", hint=str(error)) from error
        if model.config.vocab_size != session.engine.config.vocab_size:
            raise SpecDecError(
                f"`--hf-model-dir` is another model: its vocabulary has {model.config.vocab_size} tokens and the "
                f"engine's {session.engine.config.vocab_size}",
                hint="give the model that the engine was made from",
            )
        # What a model suggests for sampling (penalties, least lengths) changes greedy output too.
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        model.train(False)
        torch.nn.Module.to(model, session.engine.device)
        return cls(model, session)

    def answer(self, batch: list[list[int]], output_len: int, run: SystemRun) -> None:
        """Left-padded generation of one batch; the times of its tokens are taken as they are chosen."""
        longest = max(map(len, batch))
        pad = min(self.session.end_ids, default=0)
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in batch], device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch], device=self.model.device)
        clock, sampling = _TokenClock(), self.session.sampling
        start = time.perf_counter()
        with torch.inference_mode():
            output = self.model.generate(  # type: ignore[operator]  # a mixin's method, untyped
                ids,
                attention_mask=mask,
                max_new_tokens=output_len,
                do_sample=not sampling.is_greedy,
                top_k=None if sampling.is_greedy else 0,  # the processors have the request's own
                num_beams=1,
                logits_processor=LogitsProcessorList(
                    [_WithoutPadding(penalties(sampling), longest, batch), *warpers(sampling)]
                ),
                eos_token_id=sorted(self.session.end_ids) or -1,
                pad_token_id=pad,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        wall_s = time.perf_counter() - start
        run.times.wall_s += wall_s
        for row in output[:, longest:].tolist():
            tokens = self._cut(row)
            last = clock.times[len(tokens) - 1]
            tpot_s = (last - clock.times[0]) / (len(tokens) - 1) if len(tokens) > 1 else None
            text = output_text(self.session.tokenizer, tokens, self.session.stop_words) or ""
            ttft_s, latency_s = clock.times[0] - start, last - start
            run.samples.append(SampleRun(tokens, text, ttft_s, tpot_s, latency_s, wall_s / len(batch)))

    def _cut(self, tokens: list[int]) -> list[int]:
        """The tokens up to the first that ends the output: an end id, or one that completes a stop word."""
        for i, token in enumerate(tokens):
            ended = token in self.session.end_ids
            if ended or (self.session.stop_words and self.session.stop_words(tokens[: i + 1], 0)):
                return tokens[: i + 1]
        return tokens


class _WithoutPadding:
    """Penalties that see each row's own tokens, and not the padding before them."""

    def __init__(self, processors: list[Processor], longest: int, batch: list[list[int]]) -> None:
        self._processors = processors
        self._num_padding = [longest - len(prompt) for prompt in batch]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = []
        for ids, row, num_padding in zip(input_ids, scores, self._num_padding, strict=True):
            row = row[None]
            for processor in self._processors:
                row = processor(ids[None, num_padding:], row)
            rows.append(row)
        return torch.cat(rows)


class _TokenClock(StoppingCriteria):
    """Never stops anything; notes when each token was chosen."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def evaluate_hf(hugging_face: HuggingFace, batches: Batches, output_len: int, advance: Callable[[], None]) -> SystemRun:
    run = SystemRun("hf")
    torch.manual_seed(hugging_face.session.sampling.random_seed)
    hugging_face.answer(batches[0][:1], output_len, SystemRun("hf"))
    for batch in batches:
        hugging_face.answer(batch, output_len, run)
        advance()
    return run
