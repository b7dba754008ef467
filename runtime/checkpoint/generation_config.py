"""generation_config.json: the tokens that end a model's outputs, and its sampling defaults.

People edit this file, so its values are checked wherever they are read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.util.errors import SpecDecError
from runtime.util.files import read_json

GENERATION_CONFIG = "generation_config.json"

_NOT_DONE: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "watermarking_config": (),
    "stop_strings": ([],),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
}
"""Settings of transformers' `generate` that change outputs but are not supported -> values without effect."""


@dataclass(frozen=True)
class Range:
    """Finite numbers from `least` to `most`. If `is_open`, `least` itself is not in the range."""

    least: float = -math.inf
    most: float = math.inf
    is_open: bool = False

    def has(self, value: Any) -> bool:
        is_above = value > self.least if self.is_open else value >= self.least
        return bool(is_above and value <= self.most and abs(value) < math.inf)

    @property
    def form(self) -> str:
        """The range in words, such as `at least 0`; empty if every number is in it."""
        if self.least == -math.inf:
            return ""
        if self.most == math.inf:
            return f"{'more than' if self.is_open else 'at least'} {self.least:g}"
        if self.is_open:
            return f"more than {self.least:g} and at most {self.most:g}"
        return f"between {self.least:g} and {self.most:g}"

    @property
    def form_of_number(self) -> str:
        """The range with its noun, such as `a number of at least 0`."""
        if self.most < math.inf:
            return self.form
        if self.least == -math.inf:
            return "a number"
        return f"a number {'above' if self.is_open else 'of at least'} {self.least:g}"


ANY_NUMBER = Range()


@dataclass(frozen=True)
class DefaultField:
    """A request's field, a number, for which a model may have its own default."""

    range: Range
    is_whole: bool
    is_penalty: bool
    """True if the number applies to greedy outputs too."""


@dataclass(frozen=True)
class ModelDefaults:
    """Sampling defaults in a model's generation_config.json."""

    penalties: dict[str, float] = field(default_factory=dict)
    """`repetition_penalty` and `no_repeat_ngram_size`, which transformers' `generate` applies to greedy outputs too."""
    sampling: dict[str, float] = field(default_factory=dict)
    """`temperature`, `top_k`, `top_p` and `min_p`; only temperature 0 if `do_sample` is false."""
    not_done: tuple[str, ...] = ()
    """Settings in the file that specdec does not support."""

    @property
    def all(self) -> dict[str, float]:
        return self.sampling | self.penalties


def read_end_ids(directory: Path) -> frozenset[int] | None:
    """The ids that end an output; None if the file does not exist or names none. SpecDecError for other values."""
    ids = _read(directory).get("eos_token_id")
    return None if ids is None else as_end_ids(ids, directory)


def as_end_ids(ids: Any, directory: Path) -> frozenset[int]:
    """The set of ids from one id or a list. SpecDecError, naming the file to correct, for anything else."""
    found = ids if isinstance(ids, list) else [ids]
    foreign = [i for i in found if not isinstance(i, int) or isinstance(i, bool) or i < 0]
    if foreign:
        raise _wrong(f"the model's `eos_token_id` is not a token id: {foreign[0]!r}", directory)
    return frozenset(found)


def read_model_defaults(directory: Path, fields: Mapping[str, DefaultField]) -> ModelDefaults:
    """The file's values for these fields. SpecDecError for a value that is not a number or is out of range. A missing
    `top_k` stays out, whereas transformers' `generate` uses 50.
    """
    config = _read(directory)
    found = {
        name: _number(name, field, config[name], directory)
        for name, field in fields.items()
        if config.get(name) is not None
    }
    do_sample = config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise _wrong(f"the model's `do_sample` is neither true nor false: {do_sample!r}", directory)
    sampling = {name: value for name, value in found.items() if not fields[name].is_penalty}
    return ModelDefaults(
        {name: value for name, value in found.items() if fields[name].is_penalty},
        {"temperature": 0.0} if do_sample is False else sampling,
        tuple(name for name, neutral in _NOT_DONE.items() if config.get(name) not in (None, False, *neutral)),
    )


def _number(name: str, field: DefaultField, value: Any, directory: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(f"the model's `{name}` is not a number: {value!r}", directory)
    least = Range(field.range.least, is_open=field.range.is_open) if field.is_whole else field.range
    if not least.has(value) or (field.is_whole and value != int(value)):
        whole = "a whole number, " if field.is_whole else ""
        raise _wrong(f"the model's `{name}` must be {whole}{least.form}: {value!r}", directory)
    return max(int(value), 0) if field.is_whole else float(value)


def _wrong(said: str, directory: Path) -> SpecDecError:
    return SpecDecError(said, hint=f"correct `{directory / GENERATION_CONFIG}`")


def check_generation_config(directory: Path, fields: Mapping[str, DefaultField]) -> None:
    """SpecDecError for a file that cannot be read, or that has a wrong value."""
    read_end_ids(directory)
    read_model_defaults(directory, fields)


def _read(directory: Path) -> dict[str, Any]:
    path = directory / GENERATION_CONFIG
    return read_json(path) if path.is_file() else {}
