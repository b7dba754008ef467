"""Answers batches of prompts by transformers' own `generate`, timed as the engine is. It is a module of its own because
importing transformers takes seconds, and the engine does not need it.
"""

import time
from collections.abc import Callable
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

from runtime.builder.identity import differences
from runtime.builder.reference import load_original
from runtime.core.request import Request, Sequence
from runtime.core.sampling import Choosable, apply_rule, penalties, warpers
from runtime.measure.evaluation.systems import Batches, Question, SampleRun, SystemRun
from runtime.text.text import output_text, stop_words_of
from runtime.util.errors import SpecDecError


class HuggingFace:
    """The same model run by transformers' `generate`, with the same sampling, its default attention and K/V cache.
    `differences` lists how the model differs from the engine's, if it does.
    """

    def __init__(self, model: PreTrainedModel, question: Question, differences: list[str]) -> None:
        self.model, self.differences = model, differences
        self.tokenizer, self.template = question.llm.tokenizer, question.template
        self.stop_words = stop_words_of(question.template)

    @classmethod
    def load(cls, model_dir: Path, question: Question) -> "HuggingFace":
        """Load the model in the engine's dtype, on the engine's device."""
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
        # A model's suggestions for sampling (penalties, least lengths) change greedy output too.
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        model.train(False)
        torch.nn.Module.to(model, engine.device)
        return cls(model, question, found)

    def answer(self, batch: list[list[int]], run: SystemRun) -> None:
        """Answer a batch by generation with left padding; the time of each token is taken when it is chosen."""
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
                logits_processor=LogitsProcessorList([_RequestRules(self.template, batch), *warpers(sampling)]),
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
        """The output's tokens up to the first that ends it: an end id, or a token that completes a stop word."""
        for i, token in enumerate(tokens):
            ended = token in self.template.end_ids
            if ended or (self.stop_words and self.stop_words([*prompt, *tokens[: i + 1]], len(prompt))):
                return tokens[: i + 1]
        return tokens


def _why_not(error: Exception) -> str:
    """transformers' error in one line; a sentence of ours if the error advises to run a model's code or to unpickle."""
    said = " ".join(str(error).split())
    if "trust_remote_code" in said:
        return "it is code of its own (`auto_map`), which is not run: name a model that transformers has a class for"
    if "torch.load" in said:
        return "its weights are pickled, and not read: save the model again, in safetensors"
    return f"transformers said: {said}"


class _RequestRules:
    """Processor for budgets for thinking, choosable tokens and penalties, which see each row without its padding."""

    def __init__(self, template: Request, batch: list[list[int]]) -> None:
        longest = max(map(len, batch))
        self._choosable = Choosable(template.sampling, longest, template.end_ids)
        self._penalties = penalties(template.sampling)
        self._num_padding = [longest - len(prompt) for prompt in batch]
        self._budgets = [Sequence.start(template.with_prompt(0, prompt)).sampler.budget for prompt in batch]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        given = zip(input_ids, scores.clone(), self._num_padding, self._budgets, strict=True)
        rows = []
        for ids, row, start, budget in given:
            if budget is not None:
                apply_rule(budget.rules(ids[start:].tolist(), [])[0], row)
            self._choosable.apply(len(ids), row)  # outputs begin at the same position in all rows
            changed = row[None]
            for processor in self._penalties:
                changed = processor(ids[None, start:], changed)
            rows.append(changed)
        return torch.cat(rows)


class _TokenClock(StoppingCriteria):
    """A stopping criterion that never stops; it notes when each token was chosen."""

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
