"""Identity of the model that answers: the digest of what its results depend on, and how it is opened, here or on
another machine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from commands.batch.answering import BatchModel
from commands.batch.command import BatchDefaults
from commands.options.engine_choice import EngineChoice
from commands.sessions import open_setup
from runtime.bundle import read_bundle
from runtime.cache import digest, read_digest
from runtime.checksums import NOT_RECORDED
from runtime.drafters.specs import DraftLenMode
from runtime.drafters.speculation import Speculation
from runtime.errors import UsageError
from runtime.gguf import is_gguf
from runtime.models import resolve_tokenizer
from runtime.tokenizer import TOKENIZER_FILES


@dataclass(frozen=True)
class Job:
    """A model, its settings, and what requests call it."""

    choice: EngineChoice
    names: tuple[str, ...]
    defaults: BatchDefaults

    def with_choice(self, choice: EngineChoice) -> "Job":
        return replace(self, choice=choice)

    @contextmanager
    def opened(self) -> Iterator[BatchModel]:
        """The model with its loop; SpecDecError if it cannot be opened."""
        with open_setup(self.choice) as setup:
            model = BatchModel(setup.llm, setup.session, self.names, self.defaults)
            try:
                yield model
            finally:
                model.close()

    @property
    def draft_len_mode(self) -> DraftLenMode:
        """Requested draft length mode; by default automatic where it is known to be safe."""
        speculation = self.choice.speculation
        if speculation.draft_len_mode is None and read_bundle(self.choice.engine_dir).has_costs:
            return speculation.default_mode(is_leader=True)
        return speculation.draft_len_mode or "fixed"

    def digest(self) -> str:
        """Digest of everything that results depend on. Drafts are included only if they affect samples."""
        speculation = self.choice.speculation
        parts = [model_digest(self.choice.engine_dir, self.choice.tokenizer_dir), *self.names, repr(self.defaults)]
        if self.defaults.form.params:
            parts.append(repr(self.defaults.form))
        if speculation.may_draw_by_probs:
            parts += [repr(speculation.drafters), self.draft_len_mode]
        return digest(parts)


def model_digest(engine_dir: Path, tokenizer_dir: Path | None) -> str:
    """Digest of the model, its build settings and its tokenizer: the same for engines of all processors."""
    config = read_bundle(engine_dir).config
    tokenizer = engine_dir if tokenizer_dir is None else resolve_tokenizer(tokenizer_dir)
    files = [tokenizer] if is_gguf(tokenizer) else [tokenizer / name for name in TOKENIZER_FILES]
    files += [directory / name for name in sorted(NOT_RECORDED) for directory in {engine_dir, tokenizer}]
    parts = [config.weights_digest, repr(sorted(config.pretrained_config.items())), config.dtype]
    parts += [repr(config.build_config), repr(config.quantization)]
    return digest([*parts, *(f"{path.name} {read_digest(path)}" for path in files if _counts(path))])


def check_same_everywhere(speculation: Speculation) -> None:
    """UsageError for drafts that choose what is sampled, and are not the same whenever they are made."""
    if not speculation.draws_by_probs:
        return
    shares, is_auto = speculation.shares_pool, speculation.draft_len_mode == "auto"
    for is_so, what in ((shares, "a public pool"), (is_auto, "`--draft-len-mode auto`")):
        if is_so:
            raise UsageError(
                f"with use_logits drafts affect the samples, so runs would differ with {what}",
                hint="leave one of the two out",
            )


def _counts(path: Path) -> bool:
    return path.is_file() and path.name != "config.json"  # which records when an engine was built, and where
