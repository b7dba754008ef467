"""Engine directories: `config.json`, the compiled step of each rank and the tokenizer's files.

The files of a step depend on the compiler. aot: `rank0.pt2`, and `rank0.safetensors` with the weights in the step's
layout. torch-compile: the model's own weights, and `rank0.cache`, the compiler's cache. none: the model's own weights
alone. `self-draft` has the same files for the self-draft copy, if there is one, without the weights that it shares with
the target. A split model has one step for all ranks, and a file of weights for each. A compiled step is machine code:
open only bundles that you would run as a program.

Nothing here needs torch: errors about a directory are reported before torch is imported.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoint.checksums import (
    CONFIG,
    Artefact,
    check_config,
    check_contents,
    check_mapping,
    check_recorded,
    check_sizes,
    is_of_tokenizer,
)
from runtime.checkpoint.config import Compiler, EngineConfig, FileRecord, Mapping, parse
from runtime.checkpoint.costs import are_measured_when_asked_for, with_kept_costs
from runtime.checkpoint.gguf.reader import is_gguf
from runtime.util.errors import SpecDecError
from runtime.util.files import Stamp, check_model_files, read_json, read_json_and_text, recover_directory, stamp_of

LIBRARY = "kernels.so"
PACKAGE, COMPILER_CACHE, STEP_WEIGHTS = "rank0.pt2", "rank0.cache", "rank0.safetensors"
COPY_DIR = "self-draft"
"""Subdirectory of the self-draft copy: its compiled step, and the weights that it does not share with the target."""
DRAFT_VOCAB, HEAD_OUTPUT = "draft_vocab.txt", "head_output.safetensors"
"""Files with the ids that may be drafted, and with a trained head's quantized layers, if an engine has them."""
TARGET_OUTPUT = "target_output.safetensors"
"""File with the target's output layer, for a trained head that has none of its own."""
ENGINE = Artefact("the engine was built", "build it again", code="engine")


def step_files(config: EngineConfig) -> list[str]:
    build = config.build_config
    library = [LIBRARY] if uses_kernels(build.compiler, config.environment.device) else []
    made = {"aot": [PACKAGE], "torch-compile": [COMPILER_CACHE], "none": []}[build.compiler]
    of_copy = [] if build.self_draft is None else [f"{COPY_DIR}/{name}" for name in (STEP_WEIGHTS, *made)]
    of_drafts = [DRAFT_VOCAB] if build.draft_output.vocab_size is not None else []
    if build.draft_output.is_quantized and build.hidden_states:
        of_drafts.append(HEAD_OUTPUT)
    return [*weights_files(config.mapping), *made, *of_copy, *of_drafts, *library]


def weights_files(mapping: Mapping) -> list[str]:
    """The files of weights, one for each rank."""
    return [f"rank{rank}.safetensors" for rank in range(mapping.tp_size)]


def uses_kernels(compiler: Compiler, device: str) -> bool:
    """True if our kernels compute attention: in a compiled step on a CPU."""
    return compiler != "none" and device == "cpu"


@dataclass(frozen=True)
class Bundle:
    """An engine's directory and its configuration, read once and checked."""

    directory: Path
    config: EngineConfig
    model: str | None = None
    """The model from which the engine was made, as the user named it; None if the user named the engine."""

    @property
    def given(self) -> str:
        """The path or name that the user gave, for errors about files that a user edits, such as tokenizer.json."""
        return self.model or str(self.directory)

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of the model's weights of all ranks, without those of a self-draft copy."""
        own = weights_files(self.config.mapping)
        return sum(record.num_bytes for record in self.config.files if record.name in own)

    @property
    def has_costs(self) -> bool:
        """True if step costs are known, or will be measured when they are needed."""
        return bool(self.config.step_costs) or are_measured_when_asked_for(self.directory)


def read_bundle(engine_dir: Path, model: str | None = None) -> Bundle:
    """Open an engine's directory; SpecDecError as from `read_engine_config`."""
    return Bundle(engine_dir, read_engine_config(engine_dir), model)


def is_engine_dir(directory: Path) -> bool:
    """True if the directory's config.json says that it is an engine's, whatever else may be wrong with it."""
    try:
        return directory.is_dir() and "build_config" in read_json(directory / CONFIG)
    except SpecDecError:
        return False


def read_engine_config(engine_dir: Path) -> EngineConfig:
    """Parse and check an engine's configuration; SpecDecError names the file or key that is missing or wrong."""
    recover_directory(engine_dir)
    if not engine_dir.is_dir():
        if is_gguf(engine_dir):
            raise _other_kind("a GGUF model", engine_dir)
        problem = "is not a directory" if engine_dir.exists() else "does not exist"
        raise SpecDecError(f"engine directory {problem}: {engine_dir}", hint="build it", code="no_engine")
    check_model_files(engine_dir)
    data, text = read_json_and_text(engine_dir / CONFIG)
    config = parse_engine_config(data, engine_dir)
    check_config(engine_dir / CONFIG, text, ENGINE)
    check_sizes(engine_dir, _but_the_tokenizers(config), ENGINE)
    return with_kept_costs(config, engine_dir)


def parse_engine_config(data: dict[str, Any], engine_dir: Path) -> EngineConfig:
    """Parse the `config.json` of an engine directory; SpecDecError if it is invalid."""
    if "build_config" not in data:
        if "format_version" in data:
            raise SpecDecError(
                f"this is a checkpoint, not an engine: {engine_dir}",
                hint="build it first",
                code="checkpoint_for_engine",
                path=engine_dir,
            )
        if "model_type" in data:
            raise _other_kind("a Hugging Face model", engine_dir)
        raise SpecDecError(f"this is not an engine directory: {engine_dir}", hint="build one", code="not_an_engine")
    config = parse(EngineConfig, data, str(engine_dir / CONFIG))
    if not isinstance(config.pretrained_config.get("model_type"), str):
        raise ENGINE.wrong(f"`{engine_dir / CONFIG}` names no `model_type`")
    check_mapping(config.mapping, engine_dir, ENGINE)
    check_recorded(step_files(config), config.files, engine_dir, ENGINE)
    return config


def _other_kind(kind: str, path: Path) -> SpecDecError:
    return SpecDecError(
        f"this is {kind}, not an engine: {path}", hint="give it as a model", code="model_for_engine", path=path
    )


def _but_the_tokenizers(config: EngineConfig) -> list[FileRecord]:
    return [record for record in config.files if not is_of_tokenizer(record)]


def check_step_files(bundle: Bundle) -> None:
    """SpecDecError unless all files but the tokenizer's are as built. A file whose digest is known is not read."""
    check_contents(bundle.directory, _but_the_tokenizers(bundle.config), ENGINE)


@contextmanager
def unchanged_while_opened(bundle: Bundle) -> Iterator[None]:
    """SpecDecError if the engine was replaced during the block: files opened there may belong to two engines."""
    names = [CONFIG, *(record.name for record in _but_the_tokenizers(bundle.config))]
    paths = [bundle.directory / name for name in names]
    before = [_stamp(path) for path in paths]
    yield
    if [_stamp(path) for path in paths] != before:
        raise SpecDecError(
            f"the engine was replaced while it was opened: {bundle.directory}", hint="start again when it is written"
        )


def _stamp(path: Path) -> Stamp | None:
    try:
        return stamp_of(path.stat())
    except FileNotFoundError:
        return None


def check_tokenizer_files(bundle: Bundle) -> None:
    """SpecDecError unless the tokenizer's files are as they were when the engine was built."""
    records = [record for record in bundle.config.files if is_of_tokenizer(record)]
    check_sizes(bundle.directory, records, ENGINE)
    check_contents(bundle.directory, records, ENGINE)
