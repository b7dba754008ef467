"""Answer batches of prompts with the engine and with Hugging Face, timed alike.

Each system's first prompt is run once beforehand as a warm-up. Wall time is that of the batches, tokenization left out.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from runtime.compiler.identity import differences
from runtime.compiler.reference import load_original
from runtime.errors import SpecDecError
from runtime.evaluation.checks import SystemName
from runtime.generation import Work, total_record
from runtime.llm import LLM
from runtime.request import Request, Sequence
from runtime.sampling import Processor, penalties, warpers
from runtime.session import Session
from runtime.stats import LoopTimes
from runtime.text import output_text, sequence_text, stop_words_of

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
    """Answers of one system."""

    name: SystemName
    samples: list[SampleRun] = field(default_factory=list)
    times: LoopTimes = field(default_factory=LoopTimes)
    workers: Counter[str] = field(default_factory=Counter)
    """Samples by the machine and process that answered them, where it was another."""

    def add(self, other: "SystemRun") -> None:
        """Add another worker's results."""
        self.samples += other.samples
        self.times.add(other.times)
        self.workers += other.workers

    @property
    def sequences(self) -> list[Sequence]:
        """The engine's; Hugging Face has none."""
        return [sample.sequence for sample in self.samples if sample.sequence]

    @property
    def work(self) -> Work:
        return Work(self.times.wall_s, sum(len(sample.output_tokens) for sample in self.samples))

    def work_on(self, chosen: list[int]) -> Work:
        """Work on some of the samples only."""
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


@dataclass(frozen=True)
class Question:
    """Task given to the systems: the model, and a template for the request of every prompt."""

    llm: LLM
    template: Request


class EvaluationInterrupted(KeyboardInterrupt):
    """Ctrl-C, with the batches, by their number, that both ways to run the engine had answered by then."""

    def __init__(self, answers: dict[int, list[SystemRun]]) -> None:
        super().__init__()
        self.answers = answers


EvaluateEngine = Callable[[Question, Session, Batches, Callable[[], None]], list[SystemRun]]
"""`evaluate_engine`, or what has others do the same."""


def evaluate_engine(
    question: Question, session: Session, batches: Batches, advance: Callable[[], None]
) -> list[SystemRun]:
    """The engine with its drafter and without (or, if there is none, only without), batch by batch in turn.

    That it can serve all of them has been checked. Raises EvaluationInterrupted at Ctrl-C.
    """
    warm_up(question, session, batches[0][0])
    answers: dict[int, list[SystemRun]] = {}
    try:
        for i, (place, batch) in enumerate(zip(places_of(batches), batches, strict=True)):
            answers[i] = answer_batch(question, session, batch, place)
            advance()
    except KeyboardInterrupt:
        raise EvaluationInterrupted(answers) from None
    return joined(answers)


def warm_up(question: Question, session: Session, prompt: list[int]) -> None:
    """Run both ways once to absorb first-call costs, and discard what others would learn from it."""
    answer_batch(question, session, [prompt], range(1))
    session.clear_pools()


def places_of(batches: Batches) -> list[range]:
    """Positions of each batch's prompts among all prompts."""
    ends = itertools.accumulate(map(len, batches))
    return [range(end - len(batch), end) for batch, end in zip(batches, ends, strict=True)]


def answer_batch(question: Question, session: Session, batch: list[list[int]], place: range) -> list[SystemRun]:
    """One batch, with the drafter and without, each from an empty cache."""
    names: list[SystemName] = ["engine", "engine_no_drafter"] if session.has_drafter else ["engine"]
    return [_run_engine_batch(question, session, batch, place, name) for name in names]


def joined(answers: Mapping[int, list[SystemRun]]) -> list[SystemRun]:
    """The answers of batches, one of them at least, in the batches' order."""
    runs = [SystemRun(run.name) for run in next(iter(answers.values()))]
    for i in sorted(answers):
        for run, part in zip(runs, answers[i], strict=True):
            run.add(part)
    return runs


def _run_engine_batch(
    question: Question, session: Session, batch: list[list[int]], place: range, name: SystemName
) -> SystemRun:
    session.clear_cache()
    requests = [question.template.with_prompt(i, prompt) for i, prompt in zip(place, batch, strict=True)]
    generation = session.run(requests, speculate=name == "engine")
    run = SystemRun(name, times=generation.times)
    for sequence in generation.sequences:
        run.samples.append(
            SampleRun(
                sequence.output_tokens,
                sequence_text(question.llm.tokenizer, sequence) or "",
                sequence.stats.ttft_s,
                sequence.stats.tpot_s,
                sequence.stats.latency_s,
                generation.times.wall_s / len(batch),
                sequence,
            )
        )
    return run


class HuggingFace:
    """The same model run by transformers' `generate`, with the same sampling, its default attention and K/V cache.

    Where it is another one, `differences` says in what.
    """

    def __init__(self, model: PreTrainedModel, question: Question, differences: list[str]) -> None:
        self.model, self.differences = model, differences
        self.tokenizer, self.template = question.llm.tokenizer, question.template
        self.stop_words = stop_words_of(question.template)

    @classmethod
    def load(cls, model_dir: Path, question: Question) -> "HuggingFace":
        """Load in the engine's dtype, on the engine's device."""
        engine = question.llm.engine
        dtype = getattr(torch, engine.config.dtype)
        try:
            model = load_original(model_dir, dtype)
        except SpecDecError:
            raise
        except Exception as error:  # transformers raises many kinds; the user needs the directory
            raise SpecDecError(f"transformers cannot load: {model_dir}", hint=_why_not(error)) from error
        if model.config.vocab_size != engine.config.vocab_size:
            raise SpecDecError(
                f"this is another model, its vocabulary has {model.config.vocab_size} tokens and the "
                f"engine's {engine.config.vocab_size}",
                hint="give the model that the engine was made from",
                code="other_model",
            )
        found = differences(model, model_dir, question.llm.bundle, question.llm.tokenizer, dtype)
        # What a model suggests for sampling (penalties, least lengths) changes greedy output too.
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        model.train(False)
        torch.nn.Module.to(model, engine.device)
        return cls(model, question, found)

    def answer(self, batch: list[list[int]], run: SystemRun) -> None:
        """Left-padded generation of one batch; the times of its tokens are taken as they are chosen."""
        longest = max(map(len, batch))
        pad = min(self.template.end_ids, default=0)
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in batch], device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch], device=self.model.device)
        clock, sampling = _TokenClock(), self.template.sampling
        start = time.perf_counter()
        with torch.inference_mode():
            output = self.model.generate(  # type: ignore[operator]  # a mixin's method, untyped
                ids,
                attention_mask=mask,
                max_new_tokens=self.template.max_new_tokens,
                do_sample=not sampling.is_greedy,
                top_k=None if sampling.is_greedy else 0,  # the processors have the request's own
                num_beams=1,
                logits_processor=LogitsProcessorList(
                    [_WithoutPadding(penalties(sampling), longest, batch), *warpers(sampling)]
                ),
                eos_token_id=sorted(self.template.end_ids) or -1,
                pad_token_id=pad,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        wall_s = time.perf_counter() - start
        run.times.wall_s += wall_s
        for prompt, row in zip(batch, output[:, longest:].tolist(), strict=True):
            tokens = self._cut(prompt, row)
            last = clock.times[len(tokens) - 1]
            tpot_s = (last - clock.times[0]) / (len(tokens) - 1) if len(tokens) > 1 else None
            text = output_text(self.tokenizer, tokens, self.stop_words, prompt) or ""
            ttft_s, latency_s = clock.times[0] - start, last - start
            run.samples.append(SampleRun(tokens, text, ttft_s, tpot_s, latency_s, wall_s / len(batch)))

    def _cut(self, prompt: list[int], tokens: list[int]) -> list[int]:
        """The output's tokens up to the first that ends the output: an end id, or one that completes a stop word."""
        for i, token in enumerate(tokens):
            ended = token in self.template.end_ids
            if ended or (self.stop_words and self.stop_words([*prompt, *tokens[: i + 1]], len(prompt))):
                return tokens[: i + 1]
        return tokens


def _why_not(error: Exception) -> str:
    """Transformers' error in one line; if it advises running a model's code or unpickling, our own."""
    said = " ".join(str(error).split())
    if "trust_remote_code" in said:
        return "it is code of its own (`auto_map`), which is not run: name a model that transformers has a class for"
    if "torch.load" in said:
        return "its weights are pickled, and not read: save the model again, in safetensors"
    return f"transformers said: {said}"


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


def evaluate_hf(hugging_face: HuggingFace, batches: Batches, advance: Callable[[], None]) -> SystemRun:
    run = SystemRun("hf")
    torch.manual_seed(hugging_face.template.sampling.random_seed)
    hugging_face.answer(batches[0][:1], SystemRun("hf"))
    for batch in batches:
        hugging_face.answer(batch, run)
        advance()
    return run
