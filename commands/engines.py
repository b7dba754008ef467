"""Engines of the models that the command line names, built with a display of what is done."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from commands.output import Output
from runtime.config import Compiler, Dtype
from runtime.drafters.settings import (
    ChainDrafter,
    DrafterSettings,
    DraftTargetDrafter,
    OneDrafter,
    SelfDrafter,
    each_drafter,
)
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
    """Where the target's engine is, and the drafter, whose draft model is an engine's directory too."""

    engine_dir: Path
    drafter: DrafterSettings | None


@contextmanager
def engines_of_models(
    models: Models, engine_dir: Path, drafter: DrafterSettings | None, output: Output
) -> Iterator[Engines]:
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

        def with_engine(one: OneDrafter) -> OneDrafter:
            if not isinstance(one, DraftTargetDrafter) or isinstance(one.model, Path):
                return one
            return replace(one, model=engine_of(one.model, 0))

        if models.model_dir is not None:
            wanted = (drafter.max_draft_len if drafter else None) or 0
            drafts_for_itself = any(isinstance(one, SelfDrafter) for one in each_drafter(drafter))
            self_draft = models.self_draft or ("int4" if drafts_for_itself else None)
            engine_dir = engine_of(models.model_dir, max(wanted, _MIN_DRAFT_LEN), self_draft)
        drafters = [with_engine(one) for one in each_drafter(drafter)]
        if drafters:
            drafter = drafters[0] if len(drafters) == 1 else ChainDrafter(drafters)
        yield Engines(engine_dir, drafter)
