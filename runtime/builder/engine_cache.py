"""Engines of models: converted and built once, then found in the cache by a digest of everything that they depend on:
the model's files, the settings, the machine, and the code that builds engines.
"""

import errno
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal, Unpack

import torch

from runtime.builder.choosing import check_is_aot, compiler_for, without_kernels
from runtime.builder.engine_options import EngineOptions, build_config_of, draft_output_of, precision_of, with_defaults
from runtime.checkpoint.build_code import digests_of_build_code
from runtime.checkpoint.bundle import check_step_files, check_tokenizer_files, read_bundle, uses_kernels
from runtime.checkpoint.cached_engines import (
    cached_engines,
    engine_entry,
    engines_to_prune,
    prune,
    remove_unused_entry,
    share_files,
)
from runtime.checkpoint.checkpoint_dir import check_not_split
from runtime.checkpoint.checksums import CONFIG, NOT_RECORDED
from runtime.checkpoint.config import BuildConfig, Compiler, Dtype, max_draft_len_for, usual_max_seq_len
from runtime.checkpoint.costs import MeasuredCosts, keep_costs
from runtime.checkpoint.generation_config import GENERATION_CONFIG
from runtime.checkpoint.resolve import (
    check_weight_files,
    files_of_model,
    read_model_config,
    resolve_model,
    weight_files,
)
from runtime.drafters.heads.head_config import DraftOutputSettings, HeadConfig
from runtime.engine.engine import resolve_device
from runtime.engine.load import current_environment, take_step
from runtime.kernels.library import begin_kernels, check_kernels_can_be_made, kernels_can_wait, processor
from runtime.util.cache import (
    cache_dir,
    check_private_dir,
    check_private_entry,
    locked_entry,
    make_private,
    max_cache_bytes,
    remove_left_over,
    unwritable,
    used_entry,
)
from runtime.util.digests import digest, file_digest, is_digest_awaited
from runtime.util.errors import SpecDecError, SpecDecWarning, errors_about
from runtime.util.files import read_json
from runtime.util.locks import MODEL_INIT_LOCK
from runtime.util.temporary import own_temporary_files, temporary_dir

_MOST_BYTES_WITHOUT_KERNELS = 1 << 30
_KERNELS_COME_LATER = (
    "the CPU kernels are being compiled (1 to 4 minutes, once, in the background). Until then the model runs "
    "several times slower, and where two tokens are nearly equally likely, later outputs may differ"
)
Phases = Callable[[], AbstractContextManager[Callable[[str], None]]]
"""Opens a display of phases: gives a function to call with the name of each phase when it begins."""


@dataclass(frozen=True)
class EngineSettings:
    """Build settings for a model's engine: a value for each of its options, and the heads that draft with it."""

    options: EngineOptions
    """The options of `with_defaults`. A compiler of None is the device's default (`runtime.builder.choosing`)."""
    hidden_states: tuple[int, ...] = ()
    """Hidden states that the step gives, for a trained drafter (`BuildConfig`)."""
    takes_torch_compile: bool = field(default=False, repr=False)
    """Value of `BuildEffort.takes_torch_compile`. It is not part of the `repr`, nor of an engine's digest."""
    draft_output: DraftOutputSettings = field(default_factory=DraftOutputSettings)
    """Output layer for drafts: of the self-draft copy, and of the first head."""
    heads: tuple[HeadConfig, ...] = ()
    """Trained drafters that the engine is for."""

    def changed(self, **options: Unpack[EngineOptions]) -> "EngineSettings":
        """A copy with other values for some of the options."""
        return replace(self, options=self.options | options)

    def build_config(self, num_positions: int | None) -> BuildConfig:
        """Build config made from these settings, which must name a compiler."""
        compiler, max_seq_len = self.options["compiler"], self.options["max_seq_len"]
        assert compiler is not None
        return build_config_of(
            self.options, compiler, max_seq_len or usual_max_seq_len(num_positions), self.hidden_states
        )


def settings_of(
    options: EngineOptions, heads: Seq[HeadConfig] = (), hidden_states: tuple[int, ...] = ()
) -> EngineSettings:
    """Settings for the engine of a target, for which these heads draft."""
    return EngineSettings(
        with_defaults(options), hidden_states, draft_output=draft_output_of(options), heads=tuple(heads)
    )


def no_phases() -> AbstractContextManager[Callable[[str], None]]:
    return nullcontext(lambda name: None)


@contextmanager
def engine_of_model(
    name: str,
    settings: EngineSettings,
    *,
    use_cache: bool = True,
    phases: Phases = no_phases,
    answers_first: bool = False,
) -> Iterator[Path]:
    """The engine's directory for a model (directory, hub id or shipped name), built unless the cache has it.

    Without the cache the engine is built anew, and removed when the block ends. With `answers_first`, a small model's
    engine may come without kernels if these must still be compiled; a process begins to compile them when the block
    ends.
    """
    model_dir = resolve_model(name)
    check_weight_files(model_dir)
    device = resolve_device("auto", 0)
    if is_digest_awaited():  # the model is new, so its engine will be built: the builder is imported meanwhile
        _import_builder()
    asked, dtype = settings.options["compiler"], settings.options["dtype"]
    settings = replace(settings, takes_torch_compile=asked is None)
    if settings.options["self_draft"] is not None:
        check_not_split(settings.options["tensor_parallel_size"])

    @cache
    def entry_of(compiler: Compiler, dtype: Literal["auto", Dtype]) -> Path:
        wanted = settings.changed(compiler=compiler, dtype=dtype)
        return engine_entry(Path(name), _identity(model_dir, wanted, device))

    usual = partial(entry_of, compiler_for(device, asked))
    if use_cache and dtype != "auto" and _is_usual_dtype(model_dir, dtype, usual):
        settings = settings.changed(dtype="auto")

    def entry_by(compiler: Compiler) -> Path:
        return entry_of(compiler, settings.options["dtype"])

    def is_made(compiler: Compiler) -> bool:
        return use_cache and _is_engine(entry_by(compiler), model_dir)

    @contextmanager
    def made(compiler: Compiler) -> Iterator[Path]:
        wanted = settings.changed(compiler=compiler)
        make = partial(_make_engine, model_dir, settings=wanted, device=device, phases=phases)
        if use_cache:
            with _entry(entry_by(compiler), model_dir, make) as entry:
                yield entry
        else:
            with tempfile.TemporaryDirectory(dir=temporary_dir()) as directory:
                yield make(Path(directory) / "engine")

    with ExitStack() as stack:
        compiler = compiler_for(device, asked)
        if asked is None and not is_made(compiler):
            if answers_first and use_cache and _needs_no_kernels(model_dir, settings, compiler) and kernels_can_wait():
                warnings.warn(_KERNELS_COME_LATER, SpecDecWarning, stacklevel=1)
                stack.callback(begin_kernels)
                compiler = "none"
            else:
                compiler = without_kernels(compiler)
        gave_first_answer = compiler != "none" and asked is None and not is_made(compiler) and is_made("none")
        engine_dir = stack.enter_context(made(compiler))
        if gave_first_answer:
            remove_unused_entry(entry_by("none"))
        if asked == "aot":
            check_is_aot(read_bundle(engine_dir).config)
        stack.callback(take_step, engine_dir)
        yield engine_dir


@dataclass(frozen=True)
class ModelEngines:
    """Engines made from models by the same options. None of them is removed before `stack` is closed."""

    stack: ExitStack
    options: EngineOptions
    phases: Phases = no_phases
    answers_first: bool = False

    def of_target(self, model: str, heads: Seq[HeadConfig], hidden_states: tuple[int, ...]) -> Path:
        """Directory of the engine of a target, for which these heads draft."""
        return self._made(model, settings_of(self.options, heads, hidden_states))

    def of_draft_model(self, model: str, num_masks: int) -> Path:
        """Directory of a draft model's engine, which is not split or quantized again, and has no copy. Its steps take
        `num_masks` mask tokens behind a sequence.
        """
        answers = settings_of(self.options).changed(
            max_draft_len=max_draft_len_for(num_masks),
            self_draft=None,
            tensor_parallel_size=1,
            quantization=None,
            kv_cache_dtype="auto",
        )
        return self._made(model, replace(answers, draft_output=DraftOutputSettings()))

    def _made(self, model: str, settings: EngineSettings) -> Path:
        use_cache, first = self.options.get("use_cache", True), self.answers_first
        engine = engine_of_model(model, settings, use_cache=use_cache, phases=self.phases, answers_first=first)
        return self.stack.enter_context(engine)


def _is_usual_dtype(model_dir: Path, dtype: Dtype, entry_of: Callable[[Literal["auto", Dtype]], Path]) -> bool:
    """True if the engine would have this dtype anyway, so that naming it makes no other engine. A model's files are
    read only if there is no engine yet. `entry_of` gives the cache's entry for a dtype; `auto` is the model's own.
    """
    usual = entry_of("auto")
    if _is_engine(usual, model_dir):
        return read_bundle(usual).config.dtype == dtype
    if _is_engine(entry_of(dtype), model_dir):
        return False
    with own_temporary_files():
        from runtime.builder.convert import saved_dtype  # not to open an engine: it takes seconds
        from runtime.model.read_model import open_source

    return saved_dtype(open_source(model_dir)) == dtype


@contextmanager
def engine_of_checkpoint(checkpoint_dir: Path, build: BuildConfig) -> Iterator[Path]:
    """The engine's directory for a checkpoint on this machine, built unless the cache has it."""
    with own_temporary_files():  # torch makes a directory for its compiler when it is imported
        from runtime.builder.build import build_engine  # not to open an engine: it takes seconds

    device = resolve_device("auto", 0)
    identity = digest([repr(read_json(checkpoint_dir / "config.json")), *_identity_here(build, device)])

    def make(entry: Path) -> None:
        build_engine(checkpoint_dir, entry, build, device, replace=False, phase=lambda name: None)

    with _entry(engine_entry(checkpoint_dir, identity), checkpoint_dir, make) as entry:
        yield entry


@contextmanager
def _entry(entry: Path, source: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """The cache's entry, made from `source` unless it is there and whole. It is not removed while the block lasts."""
    check_private_dir(entry, cache_dir(), entry.parent)
    check_private_entry(entry)
    max_cache_bytes()  # an invalid size is an error before anything is made
    is_new = False
    while True:
        if _is_engine(entry, source):
            remove_left_over(entry)
        else:
            with MODEL_INIT_LOCK, locked_entry(entry, _say_that_it_waits):
                if damage := _damage(entry, source):  # another process may have built it in the meantime
                    if entry.exists():
                        warnings.warn(f"the engine in the cache is built again: {damage}", SpecDecWarning, stacklevel=3)
                    shutil.rmtree(entry, ignore_errors=True)
                    with _room_in_cache():
                        make(entry)
                        make_private(entry)
                        share_files(entry, {one.name: one.sha256 for one in read_bundle(entry).config.files})
                    is_new = True
        with used_entry(entry) as is_there:
            if is_there:  # otherwise another process has just removed it
                if is_new:
                    _keep_cache_small()
                yield entry
                return


def _keep_cache_small() -> None:
    """Remove the least recently used engines if all together take more than SPECDEC_CACHE_SIZE, with a note."""
    most = max_cache_bytes()
    removed = prune(engines_to_prune(cached_engines(), most))
    if removed:
        names = ", ".join(engine.path.name for engine in removed)
        warnings.warn(
            f"removed from the cache, which is to take {most / 1e9:g} GB (SPECDEC_CACHE_SIZE): {names}; an engine is "
            "built again when it is needed",
            SpecDecWarning,
            stacklevel=4,
        )


def _say_that_it_waits() -> None:
    warnings.warn("waiting for another process, which is building this engine", SpecDecWarning, stacklevel=2)


def _identity(model_dir: Path, settings: EngineSettings, device: torch.device) -> str:
    """A digest of the model's files, the settings, the machine, and the code that builds engines."""
    return digest(
        [
            *(
                f"{path.relative_to(model_dir if model_dir.is_dir() else model_dir.parent)} {file_digest(path)}"
                for path in files_of_model(model_dir)
            ),
            *_identity_of_drafts(settings),
            *_identity_here(replace(settings, draft_output=DraftOutputSettings(), heads=()), device),
        ]
    )


def _identity_of_drafts(settings: EngineSettings) -> list[str]:
    """The output layer for drafts, by the contents of its files: the ids, and a quantized head's weights."""
    wanted, weights = settings.draft_output, list[Path]()
    vocab = wanted.vocab if wanted.vocab in (None, "auto") else file_digest(Path(wanted.vocab))
    if wanted.is_quantized:
        weights = [file for head in settings.heads[:1] for file in weight_files(head.directory)]
    reads_output = any(head.reads_target_output for head in settings.heads[:1])
    return [
        repr(replace(wanted, vocab=vocab)),
        *["target's output"] * reads_output,
        *(file_digest(file) for file in weights),
    ]


def _identity_here(settings: EngineSettings | BuildConfig, device: torch.device) -> list[str]:
    """The settings, the machine, and the code that builds engines."""
    return [*digests_of_build_code(), repr(settings), repr(current_environment(device)), processor()]


def _is_engine(entry: Path, source: Path) -> bool:
    return _damage(entry, source) is None


def _damage(entry: Path, source: Path) -> str | None:
    """The reason why the entry is no whole engine; None if it is.

    Files that people edit have no record. Such a file counts as damaged if it is cut off, which means that it equals
    the beginning of the file in `source`, and a generation config also if it is not JSON.
    """
    try:
        bundle = read_bundle(entry)
        check_step_files(bundle)
        check_tokenizer_files(bundle)
        if (entry / GENERATION_CONFIG).is_file():
            read_json(entry / GENERATION_CONFIG)
    except SpecDecError as error:
        return error.message
    cut = (entry / name for name in sorted(NOT_RECORDED - {CONFIG}) if _is_cut(entry / name, source / name))
    return next((f"`{path}` is cut" for path in cut), None)


def _is_cut(path: Path, original: Path) -> bool:
    if not path.is_file() or not original.is_file() or path.stat().st_size >= original.stat().st_size:
        return False
    return original.read_bytes().startswith(path.read_bytes())


@contextmanager
def _room_in_cache() -> Iterator[None]:
    """Report a full disk as the cache's disk, unless the error names a file elsewhere."""
    try:
        yield
    except OSError as error:
        named = error.filename2 or error.filename  # if a file was copied, the second is the copy
        is_elsewhere = named and not Path(str(named)).is_relative_to(cache_dir())
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or is_elsewhere:
            raise
        raise unwritable(error) from error


def _needs_no_kernels(model_dir: Path, settings: EngineSettings, compiler: Compiler) -> bool:
    """True for a small unquantized model, which answers within seconds without kernels."""
    if compiler != "aot" or model_dir.is_file() or "quantization_config" in read_model_config(model_dir):
        return False
    options = settings.options
    drafts_quantized = options["self_draft"] is not None or settings.draft_output.is_quantized
    is_quantized = options["quantization"] is not None or options["kv_cache_dtype"] != "auto"
    is_plain = not drafts_quantized and not is_quantized and options["tensor_parallel_size"] == 1
    return is_plain and sum(path.stat().st_size for path in files_of_model(model_dir)) <= _MOST_BYTES_WITHOUT_KERNELS


def _import_builder() -> None:
    """Import the modules for building, which takes seconds."""
    with own_temporary_files():
        import runtime.builder.build  # noqa: F401


def _make_engine(
    model_dir: Path, engine_dir: Path, settings: EngineSettings, device: torch.device, phases: Phases
) -> Path:
    """Convert the model, and build the engine from the checkpoint, which is not kept; returns `engine_dir`."""
    _import_builder()
    from runtime.builder.build import BuildEffort, build_engine, positions_of
    from runtime.builder.convert import convert_for_build, plan_conversion
    from runtime.builder.draft_ids import choose_drafts

    options, compiler = settings.options, settings.options["compiler"]
    assert compiler is not None
    if uses_kernels(compiler, device.type):
        check_kernels_can_be_made()  # before the model is converted
    with (
        tempfile.TemporaryDirectory(prefix=f".{engine_dir.name}.", dir=engine_dir.parent) as directory,
        errors_about(str(model_dir), directory),
        phases() as phase,
    ):
        phase("converting the model")
        by_parts = compiler == "aot"  # it reads each weight when it needs it
        dtype = None if options["dtype"] == "auto" else options["dtype"]
        with _no_word_of_own_head(settings.heads, model_dir):
            conversion = plan_conversion(model_dir, dtype, precision_of(options), options["tensor_parallel_size"])
        checkpoint = convert_for_build(conversion, Path(directory), may_link=by_parts)
        build = settings.build_config(positions_of(checkpoint))
        drafts = choose_drafts(settings.draft_output, settings.heads, checkpoint)
        build = replace(build, draft_output=settings.draft_output.output(drafts.ids))
        # A GPU's memory is given away when an engine is opened, and ranks measure together.
        at_once = BuildEffort(
            measure_costs=options["tensor_parallel_size"] > 1 or device.type != "cpu",
            drafts=drafts,
            takes_torch_compile=settings.takes_torch_compile,
            leaves_step=True,
        )
        with warnings.catch_warnings():  # opening the engine says so, with the model's name
            warnings.filterwarnings("ignore", r"the engine takes token ids only", SpecDecWarning)
            config = build_engine(checkpoint, engine_dir, build, device, replace=False, phase=phase, effort=at_once)
    if not at_once.measure_costs:
        keep_costs(engine_dir, MeasuredCosts())
    if config.compiler_note:
        warnings.warn(f"built with torch-compile: the model {config.compiler_note}", SpecDecWarning, stacklevel=2)
    return engine_dir


@contextmanager
def _no_word_of_own_head(heads: Seq[HeadConfig], model_dir: Path) -> Iterator[None]:
    """Ignore the warning about layers that the engine leaves out, if they are the MTP head for which it is built."""
    with warnings.catch_warnings():
        if any(head.kind == "mtp" and head.directory.resolve() == model_dir.resolve() for head in heads):
            warnings.filterwarnings("ignore", r"layers that predict more than the next token", SpecDecWarning)
        yield
