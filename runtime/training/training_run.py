"""A training of a head from its beginning to its end, however often it is interrupted.

Its state is in a directory of its own: its settings, the target's hidden states of the texts, and a checkpoint. From
these the same training continues, and ends with the same weights. Other settings are an error.
"""

import os
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.drafters.head_draft import embedding_of
from runtime.drafters.heads.head_config import HeadConfig, num_layers_of, read_head
from runtime.drafters.heads.head_model import load_head
from runtime.drafters.heads.mtp_head import ChainedMtp, MtpHead
from runtime.engine.draft_vocab import choose_vocabulary
from runtime.engine.engine import Engine
from runtime.model.read_model import read_numbers
from runtime.text.trace_lines import Trace
from runtime.training.new_head import (
    TargetWeights,
    drafted_ids,
    new_head_config,
    new_tensors,
    tensors_of,
    with_vocabulary,
    write_head,
    write_mtp,
)
from runtime.training.traced_states import StatesFile, check_answers, read_states, width_of
from runtime.training.unrolled import (
    Losses,
    Rows,
    Schedule,
    Trainer,
    accepted_lengths,
    batches,
    have_unrolled_attention,
    steps_of,
)
from runtime.util.errors import SpecDecError
from runtime.util.files import read_json, write_json

MIN_TRACES, MIN_OUTPUT_LEN = 8, 3
MAX_EVALUATED_LEN = 5
_SAVE_EVERY_S = 60.0
_EVALUATED_TOKENS = 2048


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training; `draft_vocab_size` None is the given head's, or `NEW_VOCAB_SIZE` for a new head."""

    draft_vocab_size: int | None = None
    num_epochs: int = 3
    learning_rate: float = 1e-3
    num_unrolled: int = 3
    batch_tokens: int = 2048
    random_seed: int = 0
    learn_prompts: bool = False
    """True if the first token of drafts is learned from prompts too."""


NEW_VOCAB_SIZE = 8192


@dataclass(frozen=True)
class Texts:
    """Traces to learn from, and further traces to measure on."""

    learned: list[Trace]
    held_out: list[Trace]

    @property
    def all(self) -> list[Trace]:
        return [*self.learned, *self.held_out]


@dataclass(frozen=True)
class Accepted:
    """Output tokens of the held-out texts, and the target's steps for them with drafts of up to 1, 2, ... tokens."""

    num_tokens: int
    num_steps: list[int]

    @property
    def tokens_per_step(self) -> list[float]:
        return [self.num_tokens / one for one in self.num_steps]


@dataclass(frozen=True)
class Target:
    """The target, as an engine that reuses no blocks, and as the model from which the engine was made."""

    engine: Engine
    model_dir: Path
    end_ids: frozenset[int]


Progress = Callable[[int, str], None]
"""Function that is called with the number of further items done, such as tokens or texts, and a remark."""


def check_num_traces(num_traces: int, max_len: int) -> None:
    """SpecDecError for too few traces."""
    if num_traces < MIN_TRACES:
        raise SpecDecError(
            f"there are too few traces to train with, at least {MIN_TRACES} of at most {max_len} tokens: {num_traces}",
            hint="give more traces, or longer traces; about 1,000 answers are a start",
        )


def split_traces(traces: Seq[Trace], max_len: int, held_out: Seq[Trace] | None) -> tuple[Texts, int]:
    """Texts cut to `max_len` tokens, those to learn from and those held out, and the number of texts left out because
    fewer than three output tokens remain. Without `held_out` one text in ten is held out, of fewer than 20 texts one in
    four. SpecDecError for too few texts.
    """
    kept = [_cut(trace, max_len) for trace in traces]
    usable = [trace for trace in kept if _is_usable(trace)]
    check_num_traces(len(usable), max_len)
    left_out = len(traces) - len(usable)
    if held_out is None:
        every = 10 if len(usable) >= 20 else 4
        return Texts([t for i, t in enumerate(usable) if i % every], usable[::every]), left_out
    measured = [trace for trace in (_cut(one, max_len) for one in held_out) if _is_usable(trace)]
    if not measured:
        raise SpecDecError(
            f"none of the held-out traces has an output within its first {max_len} tokens: {len(held_out)}",
            hint="give other traces, or allow longer outputs",
        )
    return Texts(usable, measured), left_out + len(held_out) - len(measured)


def _cut(trace: Trace, max_len: int) -> Trace:
    room = max(0, max_len - len(trace.prompt_tokens))
    return Trace(trace.prompt_tokens, trace.output_tokens[:room], trace.category)


def _is_usable(trace: Trace) -> bool:
    return len(trace.output_tokens) >= MIN_OUTPUT_LEN and len(trace.prompt_tokens) >= 1


class TrainingRun:
    """A training in its directory. Once opened, it knows its head and its progress."""

    trainer_class = Trainer

    def __init__(
        self,
        directory: Path,
        settings: TrainingSettings,
        identity: dict[str, Any],
        texts: Texts,
        target: Target,
        given: HeadConfig | Path | None,
    ) -> None:
        """SpecDecError if the directory has a training with other settings or another `identity`, such as its texts."""
        self.directory, self.settings, self.texts = directory, settings, texts
        self.engine, self._model_dir = target.engine, target.model_dir
        self._agree_on({"settings": asdict(settings), **identity})
        self._target = self.engine.config.pretrained_config
        self.config, self.head = self._open(given, target.end_ids)
        lengths = [len(one.prompt_tokens) + len(one.output_tokens) for one in texts.all]
        self.states = StatesFile(directory / "states.bin", lengths, width_of(self.engine))
        self._epochs: dict[int, list[list[int]]] = {}
        self._per_epoch = len(self._epoch(0))
        num_steps = self._per_epoch * settings.num_epochs
        schedule = Schedule(num_steps, settings.learning_rate, settings.num_unrolled, settings.random_seed)
        self.trainer = self.trainer_class(
            self.head, schedule, self._rows_of, autocast=_multiplies_bfloat16(self.engine)
        )
        if self._checkpoint.is_file():
            self._go_on()

    @property
    def _checkpoint(self) -> Path:
        return self.directory / "checkpoint.pt"

    def _go_on(self) -> None:
        try:
            self.trainer.load_state(torch.load(self._checkpoint, map_location="cpu", weights_only=True))
        except Exception as error:  # whatever torch raises of a file that is cut off, or another program's
            raise SpecDecError(
                f"the training's `{self._checkpoint}` is damaged",
                hint="remove this file to learn from the beginning with the same traces, or the directory to begin "
                "with new traces",
            ) from error

    def _agree_on(self, wanted: dict[str, Any]) -> None:
        """Write the settings of a new training; SpecDecError if they are not those of the training to continue."""
        where = self.directory / "settings.json"
        if not where.is_file():
            write_json(where, wanted)
            return
        begun = read_json(where)
        flat, was = _flat(wanted), _flat(begun)
        other = next((key for key in sorted(flat.keys() | was.keys()) if flat.get(key) != was.get(key)), None)
        if other is not None:
            raise SpecDecError(
                f"the training in {self.directory} was begun with {other} {was.get(other)}, and not: {flat.get(other)}",
                hint="go on with the same, or remove the directory to begin anew",
            )

    @property
    def longest(self) -> int:
        """Length of the longest drafts that are measured."""
        return min(MAX_EVALUATED_LEN, len(self.head.heads) if isinstance(self.head, ChainedMtp) else MAX_EVALUATED_LEN)

    def _open(self, given: Any, end_ids: frozenset[int]) -> tuple[Any, Any]:
        """Open the head to train, or another model that drafts: its config or directory, and the module."""
        embedding = embedding_of(self.engine)
        embedding = None if embedding is None else embedding.float()
        size = self.settings.draft_vocab_size
        if given is None:
            given = self._make_head(min(size or NEW_VOCAB_SIZE, self.engine.config.vocab_size), end_ids)
            size = None
        head: Any = load_head(given, embedding, torch.float32)
        if given.kind != "mtp" and size is not None and size < head.config.draft_vocab_size:
            ids = choose_vocabulary(_pairs(self.texts.learned), drafted_ids(head), size, end_ids)
            head = with_vocabulary(head, ids)
        return head.config, have_unrolled_attention(head)

    def _make_head(self, size: int, end_ids: frozenset[int]) -> HeadConfig:
        """Make a new head's directory inside the training's directory, with `size` ids to draft."""
        directory = self.directory / "initial"
        vocab_size = self.engine.config.vocab_size
        ids = choose_vocabulary(_pairs(self.texts.learned), range(vocab_size), size, end_ids)
        config = new_head_config(self._target, directory, len(ids))
        directory.mkdir(exist_ok=True)
        last = config.hidden_states_of(num_layers_of(self._target))[-1]
        tensors = new_tensors(config, ids, self._weights_of_target(last), self.settings.random_seed)
        write_head(directory, config, tensors, self._target, target_name="", draft_len=1)
        return read_head(directory)

    def _weights_of_target(self, layer: int) -> TargetWeights:
        """The target's output layer, or the embeddings that stand for it, its last norm, and the weights of the layer
        with this number, by their usual names. SpecDecError if it has no output layer of such a name.
        """
        ends, prefix = ("lm_head.weight", "embed_tokens.weight", "model.norm.weight"), f".layers.{layer}."
        _, read = read_numbers(self._model_dir, torch.float32, lambda name: name.endswith(ends) or prefix in name)
        found = {end: one for end in ends for name, one in read.items() if name.endswith(end)}
        output_layer = found.get("lm_head.weight", found.get("embed_tokens.weight"))
        if output_layer is None:
            raise SpecDecError(
                f"a head cannot be made for a target without an output layer of that name: {self._model_dir}",
                hint="a head that was published for it can be trained further",
            )
        if "gemma" in str(self._target.get("model_type")):  # whose norms multiply by one more
            return TargetWeights(output_layer, None, {})
        own = {name.partition(prefix)[2]: one for name, one in read.items() if prefix in name}
        return TargetWeights(output_layer, found.get("model.norm.weight"), own)

    def compute_states(self, progress: Progress) -> None:
        """Compute missing hidden states. SpecDecError for texts that are not the target's, or a full disk."""
        self.states.check_room()
        missing = self.texts.all[self.states.num_texts :]
        records = check_answers(read_states(self.engine, missing, of_prompts=self.settings.learn_prompts), missing)
        self.states.append(records, lambda num_tokens: progress(num_tokens, ""))

    def train(self, progress: Progress) -> None:
        """Train to the end; the state is saved every minute and at the end."""
        saved = time.monotonic()
        while not self.trainer.is_done:
            sums = self.trainer.train_step()
            progress(1, _remark(sums))
            if time.monotonic() - saved > _SAVE_EVERY_S:
                self.save()
                saved = time.monotonic()
        self.save()

    def save(self) -> None:
        new = self._checkpoint.with_suffix(".new")
        try:
            with new.open("wb") as file:
                torch.save(self.trainer.state(), file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._checkpoint)
        finally:
            new.unlink(missing_ok=True)

    def measure_before(self, progress: Progress) -> Accepted:
        """The result of `measure` for the head with which the training began: measured once, and kept in a file."""
        where = self.directory / "before.json"
        if not where.is_file():
            write_json(where, asdict(self.measure(progress)))
        found = read_json(where)
        return Accepted(found["num_tokens"], found["num_steps"])

    def measure(self, progress: Progress) -> Accepted:
        """Steps that the target would have taken for the held-out texts with drafts from the present head."""
        first, longest = len(self.texts.learned), self.longest
        num_steps, num_tokens = [0] * longest, 0
        lengths = self.states.lengths[first:]
        for batch in batches(lengths, _EVALUATED_TOKENS, 0, 0):
            found = self.accepted([first + i for i in batch])
            for accepted, i in zip(found.tolist(), batch, strict=True):
                start = len(self.texts.held_out[i].prompt_tokens)
                num_tokens += lengths[i] - start
                for draft_len in range(1, longest + 1):
                    num_steps[draft_len - 1] += steps_of(accepted, start, lengths[i], draft_len)
            progress(len(batch), "")
        return Accepted(num_tokens, num_steps)

    def accepted(self, texts: Seq[int]) -> Tensor:
        """The `accepted_lengths` of these texts, with the present head."""
        return accepted_lengths(self.head, self._rows(texts), self.longest)

    def write(self, directory: Path, target_name: str, draft_len: int) -> None:
        """Write the present head, in the target's dtype."""
        dtype = getattr(torch, self.engine.config.dtype)
        if isinstance(self.head, MtpHead | ChainedMtp):
            write_mtp(directory, self.head, dtype)
            return
        tensors = tensors_of(self.head, dtype)
        write_head(directory, self.head.config, tensors, self._target, target_name=target_name, draft_len=draft_len)

    def _epoch(self, number: int) -> list[list[int]]:
        if number not in self._epochs:
            lengths = self.states.lengths[: len(self.texts.learned)]
            self._epochs = {number: batches(lengths, self.settings.batch_tokens, self.settings.random_seed, number)}
        return self._epochs[number]

    def _rows_of(self, step: int) -> Rows:
        epoch, place = divmod(step, self._per_epoch)
        found = self._epoch(epoch)
        return self._rows(found[place % len(found)])  # every epoch has the first epoch's number of steps

    def _rows(self, texts: Seq[int]) -> Rows:
        return self.states.rows(texts, self.texts.all)


def _remark(sums: Losses) -> str:
    if not sums.num[0]:
        return ""
    return f"loss {sums.loss[0] / sums.num[0]:.2f}, first token right {sums.num_right[0] / sums.num[0]:.0%}"


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in record.items():
        found |= value if isinstance(value, dict) else {key: value}
    return found


def _multiplies_bfloat16(engine: Engine) -> bool:
    """True if the engine's own kernels multiply in bfloat16, which the build then found to be faster."""
    return engine.config.arithmetic in ("avx512_bf16", "amx_bf16")


def _pairs(traces: Iterable[Trace]) -> Iterable[tuple[Seq[int], Seq[int]]]:
    return ((trace.prompt_tokens, trace.output_tokens) for trace in traces)
