"""Comparison of activations in 8 bits with more bits: the time that they save, and how far probabilities move."""

import tempfile
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from runtime.builder.build import BuildEffort, Phase, build_engine
from runtime.checkpoint.checkpoint_dir import OpenedCheckpoint
from runtime.checkpoint.config import BuildConfig, InEightBits, RelativeTime
from runtime.core.params import GREEDY
from runtime.core.request import Request
from runtime.engine.engine import Engine
from runtime.llm import LLM
from runtime.loop.step_costs import time_cell
from runtime.proof.long_drafts import LongDraft, LongDrafts
from runtime.text.trace_lines import Trace
from runtime.util.errors import SpecDecError
from runtime.util.temporary import temporary_dir

_CONTEXT_LEN, _PROMPT_LEN, _NUM_TURNS = 64, 512, 5
_NUM_TOKENS, _WINDOW = 2000, 256
"""Number of tokens of a text that are compared, and number of tokens that are computed at once and see each other."""


def compare_activations(more: LLM, eight: LLM, texts: Seq[Trace]) -> InEightBits:
    """Compare the probabilities of both engines at the outputs' tokens of `texts`, and the times of their steps."""
    quantization = more.bundle.config.quantization
    assert quantization is not None
    divergence, num_same, num_tokens = 0.0, 0, 0
    for text in texts:
        ours, theirs = (_log_probs(llm.engine, text) for llm in (more, eight))
        divergence += float((ours.exp() * (ours - theirs)).nan_to_num(0.0).sum())
        num_same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        num_tokens += len(ours)
    times = tuple(_times_in_turn(more.engine, eight.engine))
    return InEightBits(quantization.activations, num_tokens, divergence / num_tokens, num_same / num_tokens, times)


def _log_probs(engine: Engine, text: Trace) -> Tensor:
    """Log-probabilities of the output's tokens, float32 [tokens of the output, vocab]."""
    found: list[Tensor] = []

    def keep(_: list[LongDraft], all_logits: list[Tensor]) -> None:
        found.extend(logits.float().log_softmax(-1) for logits in all_logits)

    output = tuple(text.output_tokens)
    draft = LongDraft(Request(0, tuple(text.prompt_tokens), len(output), sampling=GREEDY), output, len(output))
    LongDrafts(engine, keep).compute([draft])
    if draft.problem is not None:
        raise SpecDecError(f"an output cannot be compared: {draft.problem}", hint="give shorter prompts")
    return torch.cat(found)


def _times_in_turn(more: Engine, eight: Engine) -> Iterator[RelativeTime]:
    """Times of the second engine's steps over the first's, for steps of one token, of a whole draft, and of a prompt of
    up to 512 tokens. The engines take turns, and a step is timed after an equal step, as in a generation.
    """
    most = more.config.build_config.max_request_len - 1
    lengths = sorted({1, more.max_draft_len + 1, min(_PROMPT_LEN, most, more.max_num_tokens)})
    context_len = min(_CONTEXT_LEN, most - lengths[-1])
    for engine in (more, eight):
        num_blocks = -(-(context_len + lengths[-1]) // engine.config.build_config.tokens_per_block)
        engine.occupy_cache(range(1, num_blocks + 1))
    for length in lengths:
        seconds: list[list[float]] = [[], []]
        for _ in range(_NUM_TURNS):
            for engine, own in zip((more, eight), seconds, strict=True):
                time_cell(engine, 1, context_len, length)
                own.append(time_cell(engine, 1, context_len, length))
        ratios = [eighth / other for other, eighth in zip(*seconds, strict=True)]
        yield RelativeTime(length, median(ratios), min(ratios), max(ratios))
    for engine in (more, eight):
        engine.clear_cache()


def windows_of(llm: LLM, text: str) -> list[Trace]:
    """The first 2,000 tokens of a text, in pieces of up to 256 tokens: the first token of a piece is its prompt, the
    others are its output. SpecDecError for a text of one token.
    """
    tokens = llm.encode(text)[0][:_NUM_TOKENS]
    window = min(_WINDOW, llm.engine.config.build_config.max_request_len)
    pieces = [tuple(tokens[start : start + window]) for start in range(0, len(tokens), window)]
    traces = [Trace(piece[:1], piece[1:]) for piece in pieces if len(piece) > 1]
    if not traces:
        raise SpecDecError(f"the text has too few tokens for a comparison: {len(tokens)}", hint="give a longer text")
    return traces


def compare_at_build(
    checkpoint: OpenedCheckpoint, engine_dir: Path, build: BuildConfig, text: str, phase: Phase
) -> InEightBits:
    """Comparison of a checkpoint's engine with one that has activations in 8 bits, built for this and then removed."""
    quantization = checkpoint.config.quantization
    assert quantization is not None
    in_eight = replace(checkpoint.config, quantization=replace(quantization, activations="int8"))
    with tempfile.TemporaryDirectory(dir=temporary_dir()) as directory:
        eight_dir, effort = Path(directory) / "engine", BuildEffort(measure_costs=False, takes_torch_compile=True)
        with LLM(str(engine_dir)) as more:
            opened = replace(checkpoint, config=in_eight)
            phase("comparing activations")
            build_engine(
                opened, eight_dir, build, more.engine.device, replace=False, phase=lambda name: None, effort=effort
            )
            with LLM(str(eight_dir)) as eight:
                return compare_activations(more, eight, windows_of(more, text))
