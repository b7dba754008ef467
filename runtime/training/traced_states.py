"""The file of a target's results for texts: the hidden states that a head reads, and the most probable tokens.

It has a record for each token, text after text. The file grows by whole texts: a text that a killed process wrote in
part is cut off when the file is opened again. Records are read through memory mapping, so a large file needs no memory.
"""

import os
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtime.checkpoint.config import LayerShape
from runtime.core.request import Request, Sequence
from runtime.engine.engine import Engine
from runtime.engine.head_cache import HeadCache
from runtime.text.trace_lines import Trace
from runtime.training.unrolled import Rows
from runtime.util.errors import SpecDecError

NUM_TOP = 32
"""Number of most probable tokens that are kept for each distribution."""
_MAX_LOGITS, _GROUP = 1 << 23, 64
_NUM_JUDGED, _LIKELY, _LEAST_LIKELY = 256, 8, 0.6
"""An answer is the target's if, of about 256 tokens, 0.6 are among the 8 likeliest."""
_FREE_BYTES = 1 << 26
"""Bytes left free on the disk for checkpoints and the head."""


@dataclass(frozen=True)
class _AllStates:
    """A stand-in for a head: the engine keeps tokens' hidden states unchanged for it, and no keys."""

    state_size: int
    kv_layers: Seq[LayerShape] = ()
    first_token: int = 1

    def reduce(self, states: Tensor) -> Tensor:
        return states


def read_states(engine: Engine, traces: Seq[Trace], *, of_prompts: bool) -> Iterator[np.ndarray[Any, Any]]:
    """Records [tokens] of each text, from a pass of the target; see `record_type`. The engine must reuse no blocks.
    Most probable tokens are recorded for outputs, and with `of_prompts` also for prompts. SpecDecError if a text does
    not fit into the K/V cache.
    """
    cache = engine.add_head(_AllStates(width)) if (width := width_of(engine)) else None
    try:
        for trace in traces:
            yield _records(engine, cache, trace, 1 if of_prompts else len(trace.prompt_tokens))
    finally:
        if cache is not None:
            engine.remove_head(cache)


def width_of(engine: Engine) -> int:
    """Number of numbers in a token's hidden states, of all layers that the engine returns."""
    return len(engine.config.build_config.hidden_states) * int(engine.config.pretrained_config["hidden_size"])


def check_answers(all_records: Iterator[np.ndarray[Any, Any]], traces: Seq[Trace]) -> Iterator[np.ndarray[Any, Any]]:
    """The same records. SpecDecError if the outputs of the first texts are not likely to be this target's."""
    num_likely = num_tokens = 0
    for records, trace in zip(all_records, traces, strict=True):
        if num_tokens < _NUM_JUDGED:
            first = len(trace.prompt_tokens)
            outputs = np.array(trace.output_tokens)
            num_likely += int((records["ids"][first:, :_LIKELY] == outputs[:, None]).any(1).sum())
            num_tokens += len(outputs)
            if num_tokens >= _NUM_JUDGED and num_likely < _LEAST_LIKELY * num_tokens:
                raise SpecDecError(
                    f"the traces are not answers of this target: the share of their first {num_tokens:,} output "
                    f"tokens that is among the target's {_LIKELY} likeliest tokens is: {num_likely / num_tokens:.0%}",
                    hint="record them with this model and its own tokenizer",
                )
        yield records


def record_type(width: int) -> np.dtype[Any]:
    """Type of a token's record: states as bits of bfloat16, and the likeliest tokens in its place, or zeros."""
    return np.dtype([("states", "<i2", (width,)), ("ids", "<i4", (NUM_TOP,)), ("probs", "<f2", (NUM_TOP,))])


def _records(engine: Engine, cache: HeadCache | None, trace: Trace, first: int) -> np.ndarray[Any, Any]:
    """Records of a text, with the most probable tokens from index `first` on."""
    tokens = [*trace.prompt_tokens, *trace.output_tokens]
    records = np.zeros(len(tokens), record_type(width_of(engine)))
    sequence = Sequence.start(Request(0, tuple(tokens), 1))
    if not engine.admit(sequence):
        engine.raise_cache_is_taken(sequence.request)
    try:
        if first > 1:
            engine.compute_context(sequence, first - 1)
        most = max(1, min(_MAX_LOGITS // engine.config.vocab_size, engine.max_num_tokens))
        while (start := sequence.num_computed) < len(tokens) - 1:
            logits = engine.forward_context(sequence, min(most, len(tokens) - 1 - start)).float()
            probs, ids = likeliest(logits, min(NUM_TOP, logits.shape[-1]))
            place = slice(start + 1, sequence.num_computed + 1)
            records["ids"][place, : ids.shape[1]] = ids.cpu().numpy()
            records["probs"][place, : ids.shape[1]] = probs.cpu().numpy()
        if cache is not None:
            states = cache.states_for(sequence.block_table, 1, len(tokens)).to("cpu", torch.bfloat16)
            records["states"][:-1] = states.view(torch.int16).numpy()
    finally:
        engine.release(sequence)
    return records


def likeliest(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Probabilities and ids, [rows, num] each, of the most probable tokens in falling order, from logits [rows, vocab].

    The most probable tokens are in the groups with the highest maxima, so few numbers of a large vocabulary are sorted.
    """
    padded = nn.functional.pad(logits, (0, -logits.shape[-1] % _GROUP), value=-torch.inf)
    groups = padded.reshape(len(logits), -1, _GROUP)
    best = groups.amax(-1).topk(min(num, groups.shape[1]), sorted=False).indices
    chosen = groups.gather(1, best[..., None].expand(-1, -1, _GROUP)).flatten(1)
    values, places = chosen.topk(num)
    ids = best.gather(1, places // _GROUP) * _GROUP + places % _GROUP
    return (values - logits.logsumexp(-1, keepdim=True)).exp(), ids.clamp_max(logits.shape[-1] - 1)


class StatesFile:
    """The file of texts' records, of which it may have only the first. `lengths` has the texts' numbers of tokens."""

    def __init__(self, path: Path, lengths: Seq[int], width: int) -> None:
        self.path, self.lengths, self._type = path, list(lengths), record_type(width)
        self._ends = np.cumsum(self.lengths) * self._type.itemsize
        size = path.stat().st_size if path.exists() else 0
        self.num_texts = int(np.searchsorted(self._ends, size, side="right"))
        """Number of texts whose records are in the file."""
        if path.exists():
            os.truncate(path, self._end_of(self.num_texts))

    def _end_of(self, num_texts: int) -> int:
        return int(self._ends[num_texts - 1]) if num_texts else 0

    def check_room(self) -> None:
        """SpecDecError if the disk has too little room for the missing records."""
        status = os.statvfs(self.path.parent)
        needed = self._end_of(len(self.lengths)) - self._end_of(self.num_texts)
        free, num_tokens = status.f_bavail * status.f_frsize, sum(self.lengths[self.num_texts :])
        if needed and needed + _FREE_BYTES > free:
            raise SpecDecError(
                f"the target's hidden states of {num_tokens:,} tokens need {needed / 1e6:,.1f} MB, beside "
                f"{_FREE_BYTES / 1e6:,.0f} MB that are to stay free, and the disk has free: {free / 1e6:,.1f} MB, at "
                f"{self.path.parent}",
                hint="give fewer traces, or write elsewhere",
            )

    def append(self, all_records: Iterator[np.ndarray[Any, Any]], done: Callable[[int], None]) -> None:
        """Write the records of the missing texts; `done` is called with each text's number of tokens."""
        with self.path.open("ab") as file:
            for records in all_records:
                assert len(records) == self.lengths[self.num_texts]
                file.write(records.tobytes())
                self.num_texts += 1
                done(len(records))

    def rows(self, texts: Seq[int], traces: Seq[Trace]) -> Rows:
        """The records of these texts as `Rows`, padded to the longest text."""
        longest = max(self.lengths[i] for i in texts)
        records = np.zeros((len(texts), longest), self._type)
        tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
        is_output = torch.zeros(len(texts), longest, dtype=torch.bool)
        everything = np.memmap(self.path, self._type, "r")
        for row, i in enumerate(texts):
            length, end = self.lengths[i], self._end_of(i + 1) // self._type.itemsize
            records[row, :length] = everything[end - length : end]
            tokens[row, :length] = torch.tensor([*traces[i].prompt_tokens, *traces[i].output_tokens])
            is_output[row, len(traces[i].prompt_tokens) : length] = True
        return Rows(
            tokens,
            torch.from_numpy(np.ascontiguousarray(records["states"])).view(torch.bfloat16),
            torch.from_numpy(np.ascontiguousarray(records["ids"])).long(),
            torch.from_numpy(np.ascontiguousarray(records["probs"])).float(),
            is_output,
        )
