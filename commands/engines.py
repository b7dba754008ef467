"""Engines of the models that the command line names, built with a display of what is done."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from commands.output import Output
from runtime.config import Compiler, Dtype
from runtime.drafters.spec import DrafterSpec
from runtime.drafters.specs import Speculation
from runtime.engine_cache import EngineSettings, engine_of_model

_MIN_DRAFT_LEN = 10  # so that other draft lengths can be tried without building again


@dataclass(frozen=True)
class Models:
    """Models to make engines of, and what for; None: the model's own dtype, and its positions up to 4,096."""

    model_dir: str | None
    dtype: Dtype | None
    max_batch_size: int
    max_seq_len: int | None
    use_cache: bool
    self_draft: Literal["int8", "int4"] | None = None
    """None: int4 where the model is to draft for itself, and no copy elsewhere."""
    compiler: Compiler | None = None
    """None: what the device's default is."""


@dataclass(frozen=True)
class Engines:
    """Where the target's engine is, and how to draft, with a draft model's engine in its place."""

    engine_dir: Path
    speculation: Speculation


@contextmanager
def engines_of_models(models: Models, engine_dir: Path, speculation: Speculation, output: Output) -> Iterator[Engines]:
    """The engines that are given, and those of the models that are given instead."""
    with ExitStack() as stack:

        def engine_of(name: str, max_draft_len: int, self_draft: Literal["int8", "int4"] | None = None) -> Path:
            settings = EngineSettings(
                models.dtype,
                models.max_batch_size,
                models.max_seq_len,
                max_draft_len,
                self_draft,
                compiler=models.compiler,
            )
            engine = engine_of_model(name, settings, use_cache=models.use_cache, phases=output.phases)
            return stack.enter_context(engine)

        def with_engine(one: DrafterSpec) -> DrafterSpec:
            return one.with_draft_model(engine_of(one.draft_model, 0)) if isinstance(one.draft_model, str) else one

        if models.model_dir is not None:
            self_draft = models.self_draft or ("int4" if speculation.needs_copy else None)
            engine_dir = engine_of(models.model_dir, max(speculation.max_draft_len or 0, _MIN_DRAFT_LEN), self_draft)
        yield Engines(engine_dir, speculation.with_drafters(map(with_engine, speculation)))
