"""Engines for `--model-dir`: converted and built once, then found in the cache by all that went into them."""

import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import runtime
from commands.options.drafter_settings import DrafterSettings, DraftTargetSettings, chain, each_drafter
from commands.output import Output
from runtime.bundle import current_environment, read_engine_config
from runtime.cache import cache_dir, digest, file_digest, locked_entry
from runtime.compiler.kernels import processor
from runtime.compiler.weights import is_whole
from runtime.config import BuildConfig, Dtype
from runtime.engine import resolve_device
from runtime.errors import SpecDecError
from runtime.models import MODEL_FILES, resolve_model

_MAX_SEQ_LEN = 4096  # unless asked for: a K/V cache for all positions of a long-context model would not fit
_MIN_DRAFT_LEN = 10  # so that other draft lengths can be tried without building again


@dataclass(frozen=True)
class EngineSettings:
    """What `--model-dir` engines are built for; None: the model's own dtype, and its positions up to 4,096."""

    dtype: Dtype | None
    max_batch_size: int
    max_seq_len: int | None
    max_draft_len: int
    """0: takes no drafts (a draft model's engine)."""

    def build_config(self, num_positions: int) -> BuildConfig:
        max_seq_len = self.max_seq_len or min(num_positions, _MAX_SEQ_LEN)
        return BuildConfig(
            compiler="aot",
            max_batch_size=self.max_batch_size,
            max_input_len=max_seq_len - 1,
            max_seq_len=max_seq_len + self.max_draft_len,
            max_draft_len=self.max_draft_len,
            tokens_per_block=32,
            speculative_decoding_mode="draft_tokens_external" if self.max_draft_len else "none",
        )


@dataclass(frozen=True)
class Models:
    """Models to make engines of, and what for; None: the model's own dtype, and its positions up to 4,096."""

    model_dir: str | None
    draft_model_dir: str | None
    dtype: Dtype | None
    max_batch_size: int
    max_seq_len: int | None
    use_cache: bool


@dataclass(frozen=True)
class Engines:
    """Where the target's engine is, and the drafter with its engine."""

    engine_dir: Path
    drafter: DrafterSettings | None


@contextmanager
def engines_of_models(
    models: Models, engine_dir: Path, drafter: DrafterSettings | None, output: Output
) -> Iterator[Engines]:
    """The engines that are given, and those of the models that are given instead."""
    with ExitStack() as stack:

        def engine_of(name: str, max_draft_len: int) -> Path:
            settings = EngineSettings(models.dtype, models.max_batch_size, models.max_seq_len, max_draft_len)
            return stack.enter_context(engine_of_model(name, settings, output, use_cache=models.use_cache))

        if models.model_dir is not None:
            wanted = (drafter.max_draft_len if drafter else None) or 0
            engine_dir = engine_of(models.model_dir, max(wanted, _MIN_DRAFT_LEN))
        if models.draft_model_dir is not None:
            draft_engine_dir = engine_of(models.draft_model_dir, 0)
            drafter = chain(
                [
                    replace(s, draft_engine_dir=draft_engine_dir) if isinstance(s, DraftTargetSettings) else s
                    for s in each_drafter(drafter)
                ]
            )
        yield Engines(engine_dir, drafter)


@contextmanager
def engine_of_model(name: str, settings: EngineSettings, output: Output, *, use_cache: bool) -> Iterator[Path]:
    """The engine directory of a model (directory, hub id or shipped name), built if it is not in the cache.

    Without the cache it is built anew, and gone when the block ends.
    """
    model_dir = resolve_model(name)
    device = resolve_device("auto", 0)
    if not use_cache:
        with tempfile.TemporaryDirectory(prefix="specdec-") as directory:
            yield _make_engine(model_dir, Path(directory) / "engine", settings, device, output)
        return
    readable = re.sub(r"[^\w.-]", "_", Path(name).expanduser().resolve().name)
    entry = cache_dir() / "engines" / f"{readable}-{_identity(model_dir, settings, device)[:16]}"
    if not _is_engine(entry):
        waiting = "another process is building this engine: waiting for it"
        with locked_entry(entry, lambda: output.warning(waiting)):
            if not _is_engine(entry):  # or somebody has built it in the meantime
                shutil.rmtree(entry, ignore_errors=True)
                _make_engine(model_dir, entry, settings, device, output)
    yield entry


def _identity(model_dir: Path, settings: EngineSettings, device: torch.device) -> str:
    """A digest of the model's files, the settings, the machine, and the code that builds and runs engines."""
    files = sorted(path for pattern in MODEL_FILES for path in model_dir.glob(pattern) if path.is_file())
    package = Path(runtime.__path__[0])
    code = sorted(path for pattern in ("*.py", "*.cpp", "*.h") for path in package.rglob(pattern))
    return digest(
        [
            *(f"{path.name} {file_digest(path)}" for path in files),
            *(f"{path.relative_to(package)} {digest([path.read_text()])}" for path in code),
            repr(settings),
            repr(current_environment(device)),
            processor(),
        ]
    )


def _is_engine(directory: Path) -> bool:
    """Whether the entry is there and whole; a package that was cut short lacks the list of its files, at its end."""
    try:
        read_engine_config(directory)
    except SpecDecError:
        return False
    package, weights = directory / "rank0.pt2", directory / "rank0.safetensors"
    return (not package.exists() or zipfile.is_zipfile(package)) and (not weights.exists() or is_whole(weights))


def _make_engine(
    model_dir: Path, engine_dir: Path, settings: EngineSettings, device: torch.device, output: Output
) -> Path:
    """Convert and build; the checkpoint between them is not kept."""
    from runtime.checkpoint import convert
    from runtime.compiler.build import build_engine, default_max_seq_len  # not to open an engine: it takes seconds

    with (
        tempfile.TemporaryDirectory(prefix=f".{engine_dir.name}.", dir=engine_dir.parent) as directory,
        output.phases() as phase,
    ):
        checkpoint_dir = Path(directory) / "checkpoint"
        phase("converting the model")
        convert(model_dir, checkpoint_dir, settings.dtype, replace=False, progress=lambda *_: None)
        build = settings.build_config(default_max_seq_len(checkpoint_dir))
        config = build_engine(checkpoint_dir, engine_dir, build, device, replace=False, phase=phase)
    if config.compiler_note:
        output.warning(f"built with `--compiler torch-compile`: the model {config.compiler_note}")
    return engine_dir
