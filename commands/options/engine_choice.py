"""Opening an engine from the command line: flags become an `EngineChoice`, which is checked before torch is imported.

choice = engine.choose(params)
with open_setup_of_models(choice, output) as setup: ...
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.options.drafter_flags import algorithm_flag, example_of
from commands.options.engine_flags import ModelEngineOptions
from commands.options.expand import MODEL_AT_HAND
from commands.options.leader_flags import LeaderOptions, ModelDir, ModelOptions
from commands.options.model_word import ModelWord, is_surely_model, may_be_model, named_by, near_model
from commands.options.settings import is_setting
from commands.options.shared import USUAL_ENGINE, TokenizerDir
from commands.options.speculation_flags import SpeculationOptions, needs_drafter
from commands.output.help import INPUT, KV_CACHE, option
from commands.output.output import note, warn
from runtime.checkpoint.bundle import Bundle, read_bundle
from runtime.checkpoint.config import USUAL_MAX_DRAFT_LEN, IntFormat, positions_in, usual_max_seq_len
from runtime.checkpoint.resolve import (
    check_is_model,
    check_weight_files,
    files_of_model,
    read_model_config,
    refuse_unreadable_tokenizer,
    resolve_model,
    resolve_tokenizer,
)
from runtime.core.limits import check_output_len
from runtime.core.params import Mode, SamplingParams
from runtime.drafters.heads.head_config import DraftOutputSettings, hidden_states_for
from runtime.drafters.lists import Devices
from runtime.drafters.specs import NgramDrafter, SelfDrafter
from runtime.drafters.speculation import Speculation
from runtime.engine.devices import check_device_ids
from runtime.text.chat import check_chat_template
from runtime.util.cache import SIZES, size_in_bytes
from runtime.util.digests import begin_digests
from runtime.util.errors import UsageError

if TYPE_CHECKING:
    from runtime.engine.engine import KVCacheConfig


@dataclass(frozen=True)
class KVCacheOptions:
    """Size of the K/V cache, and whether its content is reused.

    Leader mode has its own flag to turn reuse off: `disable_reuse`.
    """

    kv_cache_enable_block_reuse: Annotated[
        bool,
        option(
            KV_CACHE,
            "Reuse keys and values of a prefix that was computed before. Orchestrator mode needs it.",
            "--kv-cache-enable-block-reuse",
            shown="on",
        ),
    ] = False
    no_kv_cache_enable_block_reuse: Annotated[bool, typer.Option("--no-kv-cache-enable-block-reuse", hidden=True)] = (
        False
    )
    kv_cache_free_gpu_memory_fraction: Annotated[
        float, option(KV_CACHE, "Share of free GPU memory for the K/V cache.", min=0.0, max=1.0)
    ] = 0.9
    max_tokens_in_paged_kv_cache: Annotated[
        int | None,
        option(KV_CACHE, "Size of the K/V cache in tokens.", shown="CPU: max_batch_size x max_seq_len", min=1),
    ] = None
    state_checkpoint_interval: Annotated[
        int | None,
        option(
            KV_CACHE,
            "Keep a recurrent state for reuse every this many prompt tokens (models with recurrent states only).",
            shown="8192",
            min=1,
        ),
    ] = None

    def config(self, disk: "KVDiskOptions") -> "KVCacheConfig":
        from runtime.engine.engine import KVCacheConfig

        return KVCacheConfig(
            not self.no_kv_cache_enable_block_reuse,
            self.max_tokens_in_paged_kv_cache,
            self.kv_cache_free_gpu_memory_fraction,
            self.state_checkpoint_interval,
            disk.kv_cache_dir,
            disk.max_bytes,
        )

    def fitting(self, *, is_leader: bool, disable_reuse: bool = False) -> "KVCacheOptions":
        """The same options with leader mode's flag taken into account. UsageError if block reuse is turned off in
        orchestrator mode, and in leader mode if it is turned both on and off.
        """
        if not is_leader and self.no_kv_cache_enable_block_reuse:
            raise UsageError(
                "orchestrator mode needs block reuse: `--no-kv-cache-enable-block-reuse`", hint="leave the flag out"
            )
        if not is_leader and disable_reuse:
            raise UsageError(
                "orchestrator mode needs block reuse: `--disable-kv-cache-reuse`",
                hint="leave the flag out, or `--mode leader`",
            )
        if self.kv_cache_enable_block_reuse and (self.no_kv_cache_enable_block_reuse or disable_reuse):
            flag = "no-kv-cache-enable-block-reuse" if self.no_kv_cache_enable_block_reuse else "disable-kv-cache-reuse"
            raise UsageError(
                f"`--kv-cache-enable-block-reuse` and `--{flag}` cannot be given together", hint="choose one"
            )
        return replace(self, no_kv_cache_enable_block_reuse=self.no_kv_cache_enable_block_reuse or disable_reuse)


def _disk_size(text: str) -> int:
    """The size in bytes; UsageError if the text is no size, or 0."""
    if not (size := size_in_bytes(text)):
        raise UsageError(f"`--kv-cache-disk-size` is no size: {text}", hint=f"write {SIZES}")
    return size


@dataclass(frozen=True)
class KVDiskOptions:
    """Place and size of the K/V cache on disk."""

    kv_cache_dir: Annotated[
        Path | None,
        option(
            KV_CACHE,
            "Directory in which keys and values are kept for later runs and other processes. They and their tokens "
            "can be read there: mode 0700.",
            shown="none are kept",
            metavar="DIR",
        ),
    ] = None
    kv_cache_disk_size: Annotated[
        str | None,
        option(
            KV_CACHE,
            "Most bytes in that directory: bytes, or 500M, 20G (decimal), 20GiB (binary).",
            shown="as before; 20G",
            check=_disk_size,
            metavar="SIZE",
        ),
    ] = None

    @property
    def max_bytes(self) -> int | None:
        """`--kv-cache-disk-size` in bytes; None if it is not given."""
        return None if self.kv_cache_disk_size is None else _disk_size(self.kv_cache_disk_size)

    def check(self, cache: KVCacheOptions) -> None:
        """UsageError for a size without a directory, and for K/V on disk while block reuse is off. Runs before torch is
        imported.
        """
        if self.max_bytes is not None and self.kv_cache_dir is None:
            raise UsageError(
                f"`--kv-cache-disk-size` needs `--kv-cache-dir`: {self.kv_cache_disk_size}",
                hint="name the directory too",
            )
        if self.kv_cache_dir is not None and cache.no_kv_cache_enable_block_reuse:
            raise UsageError(
                f"K/V on disk are for requests that reuse them, and nothing is reused: {self.kv_cache_dir}",
                hint="leave the flag that turns reuse off out, or `--kv-cache-dir`",
            )


EngineDir = Annotated[Path | None, option(INPUT, "Engine directory made by `build`.", shown=USUAL_ENGINE)]
"""Directory of the engine; None where a model may be given instead."""


@dataclass(frozen=True)
class EngineChoice:
    """The engine, or the model to make an engine from, and how it drafts and answers. `speculation` names models until
    they are opened; `bundle` is the engine's, if there is an engine already.
    """

    engine_dir: Path = Path(USUAL_ENGINE)
    tokenizer_dir: Path | None = None
    speculation: Speculation = field(default_factory=Speculation)
    device_ids: Devices = None
    """The target's devices; None for the first devices."""
    mode: Mode = "orchestrator"
    kv_cache: KVCacheOptions = field(default_factory=KVCacheOptions)
    max_num_tokens: int | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    models: ModelOptions = field(default_factory=ModelOptions)
    profile: Path | None = None
    bundle: Bundle | None = None
    disk: KVDiskOptions = field(default_factory=KVDiskOptions)
    answers_first: bool = False
    """True if there is a single answer, which need not wait for kernels to be compiled (`engine_of_model`)."""

    def with_disk(self, disk: KVDiskOptions) -> "EngineChoice":
        """The same choice with K/V on disk. UsageError if the two do not fit together."""
        disk.check(self.kv_cache)
        return replace(self, disk=disk)

    def with_pools(self, options: SpeculationOptions) -> "EngineChoice":
        """The same choice with the pool of each lookup set to the request's owner's, unless a flag names a pool."""
        if options.flags.ngram_pool is not None:
            return self
        return replace(self, speculation=self.speculation.with_owner_pools())

    @property
    def model_dir(self) -> str | None:
        return self.models.model_dir

    @property
    def built_for(self) -> ModelEngineOptions:
        return self.models.engines

    @property
    def draft_output(self) -> DraftOutputSettings:
        return self.models.draft_output.settings

    @property
    def max_draft_len(self) -> int:
        """Longest draft that the engine made from the model will take: at least 10, so that longer drafts can be tried
        without a new build.
        """
        return max(self.speculation.max_draft_len or 0, USUAL_MAX_DRAFT_LEN)

    @property
    def self_draft(self) -> IntFormat | None:
        """Quantization of the self-draft copy; None if there is no copy."""
        return self.built_for.copy or ("int4" if self.speculation.needs_copy else None)

    @property
    def hidden_states(self) -> tuple[int, ...]:
        """Hidden states of the model that its trained drafters read."""
        assert self.model_dir is not None
        return hidden_states_for(self.speculation.read_heads(), self.model_dir)

    @property
    def model_name(self) -> str:
        """Default name of the model for clients, without local paths."""
        return Path(self.model_dir or self.engine_dir).expanduser().resolve().name

    def checked(self, *, check_lossless: bool = False, cuts_drafts: bool = False) -> "EngineChoice":
        """Check the options; returns a copy with the profile's drafter, if there is a profile, and the engine's config.
        SpecDecError for a model, engine or drafter that cannot be opened, as far as that shows without torch, and for a
        flag that needs a drafter if there is none. With `cuts_drafts`, drafts that are longer than the engine takes are
        cut.
        """
        bundle, speculation, device_ids = None, self.speculation, self.device_ids
        if self.profile is not None:
            from runtime.builder.profile import profile_for, profile_for_model

            if self.model_dir is None:
                bundle = read_bundle(self.engine_dir)
                profile = profile_for(self.profile, bundle)
            else:
                profile = profile_for_model(self.profile, self.model_dir)
            speculation, device_ids = profile.speculation, None
        has_copy = self.built_for.copy is not None
        if speculation.needs_copy and self.built_for.self_draft is not None and not has_copy:
            raise UsageError(
                "self-drafting needs a copy, and there is to be none: `--self-draft none`",
                hint="leave the flag out, or `--self-draft int4`",
            )
        check_needed_drafter(speculation, check_lossless=check_lossless, has_copy=has_copy)
        if self.tokenizer_dir is not None:
            resolve_tokenizer(self.tokenizer_dir)
        MODEL_AT_HAND.set(self.model_dir)
        if self.model_dir is not None:
            check_is_model(model_dir := resolve_model(self.model_dir))
            check_weight_files(model_dir)
            begin_digests(files_of_model(model_dir))  # while torch is imported
            copy = replace(self, speculation=speculation).self_draft
            self.draft_output.check(speculation.read_heads(), has_copy=copy is not None)
        else:
            bundle = bundle or read_bundle(self.engine_dir)
            check_device_ids(device_ids, bundle.config.mapping.tp_size)
        speculation.check_fits(None if bundle is None else bundle.config.build_config, is_cut=cuts_drafts)
        speculation.check_files()
        return replace(self, speculation=speculation, device_ids=device_ids, bundle=bundle)

    def check_output_len(self) -> None:
        """SpecDecError for outputs so long that no prompt fits beside them, as far as the config of the engine or the
        model shows. It runs before an engine is built.
        """
        if self.bundle is not None:
            positions = positions_in(self.bundle.config.pretrained_config)
            most = self.bundle.config.build_config.max_request_len
        else:
            assert self.model_dir is not None
            positions = positions_in(read_model_config(resolve_model(self.model_dir)))
            most = self.built_for.options.get("max_seq_len") or usual_max_seq_len(positions)
        check_output_len(self.params.max_tokens or 0, most, positions)

    def check_tokenizer(self) -> None:
        """SpecDecError for a tokenizer that cannot be read here, as far as files show; it runs before an engine is
        built.
        """
        if self._tokenizer_files is not None:
            refuse_unreadable_tokenizer(self._tokenizer_files)

    def check_chat_template(self) -> None:
        """`check_tokenizer`, and SpecDecError for a tokenizer whose files have no chat template."""
        self.check_tokenizer()
        if self._tokenizer_files is not None:
            check_chat_template(self._tokenizer_files, str(self.tokenizer_dir or self.model_dir))

    @property
    def _tokenizer_files(self) -> Path | None:
        """Path of the tokenizer that `--tokenizer-dir` or the model gives; None for an engine, which has its own."""
        if self.tokenizer_dir is not None:
            return resolve_tokenizer(self.tokenizer_dir)
        return None if self.model_dir is None else resolve_model(self.model_dir)


@dataclass(frozen=True)
class TargetOptions:
    """An engine, or a model to make an engine from, without a drafter."""

    engine_dir: EngineDir = None
    tokenizer_dir: TokenizerDir = None
    model_dir: ModelDir = None
    engines: ModelEngineOptions = field(default_factory=ModelEngineOptions)

    def named(self, word: str | None) -> "TargetOptions":
        """The same options with the model or engine that a word names. UsageError if a flag names another."""
        model_dir, engine_dir = named_by(word, self.model_dir, self.engine_dir)
        return replace(self, model_dir=model_dir, engine_dir=engine_dir)

    def choose(self) -> EngineChoice:
        """Resolve and check the flags. UsageError for flags that do not fit together; SpecDecError for an engine or
        model that cannot be opened.
        """
        models = ModelOptions(self.model_dir, self.engines).fitting()
        models.check(self.engine_dir)
        choice = EngineChoice(self.engine_dir or Path(USUAL_ENGINE), self.tokenizer_dir, mode="leader", models=models)
        return choice.checked()

    @property
    def paths(self) -> list[Path]:
        """Paths to read."""
        return [path for path in (self.engine_dir, self.tokenizer_dir) if path is not None]


@dataclass(frozen=True)
class EngineOptions:
    """Model or engine, K/V cache, loop and drafter."""

    model: ModelWord = None
    engine_dir: EngineDir = None
    tokenizer_dir: TokenizerDir = None
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    kv_cache: KVCacheOptions = field(default_factory=KVCacheOptions)
    leader: LeaderOptions = field(default_factory=LeaderOptions)

    def named(self) -> "EngineOptions":
        """The same options with the model or engine that the first word names. UsageError if a flag names another."""
        model_dir, engine_dir = named_by(self.model, self.leader.model_dir, self.engine_dir)
        leader = replace(self.leader, model_dir=model_dir).fitting()
        return replace(self, model=None, engine_dir=engine_dir, leader=leader)

    def named_before(self, prompts: list[str] | None) -> "tuple[EngineOptions, list[str]]":
        """The same options, as `named` gives them, and the prompts: the first word is a prompt if it is not a model.
        UsageError for a second model where the prompt should be, or for a misspelt model's name before a prompt.
        """
        word, others = self.model, prompts or []
        if word is None:
            return self.named(), others
        given = {"model_dir": self.leader.model_dir, "engine_dir": self.engine_dir}
        names = [name for name, value in given.items() if value is not None]
        has_flag = not all(map(is_setting, names))
        is_answered = bool(names) or Path(USUAL_ENGINE).exists()
        if not word and not is_answered:
            raise UsageError(f"the model's name is empty: {word!r}", hint="`specdec run demo` names a model")
        if is_surely_model(word) or (not has_flag and may_be_model(word, is_answered=is_answered)):
            if len(others) == 1 and is_surely_model(others[0]):
                raise UsageError(
                    f"two models are given: `{word}` and `{others[0]}`",
                    hint=f"`--draft-model-dir {others[0]}` drafts by it; `--input-text` gives such a word as a prompt",
                )
            return self.named(), others
        if not has_flag:
            _tell_slip(word, others)
        return replace(self, model=None).named(), [word, *others]

    @property
    def paths(self) -> list[Path]:
        """Paths to read."""
        own = [self.engine_dir or Path(USUAL_ENGINE), self.tokenizer_dir]
        return [*(path for path in own if path is not None), *self.speculation.paths, *self.leader.paths]

    def check_is_leader(self, who: str) -> None:
        if self.leader.mode == "orchestrator":
            raise UsageError(f"{who} runs in leader mode: `--mode orchestrator`", hint="leave the flag out")

    def choose(
        self,
        params: SamplingParams,
        max_num_tokens: int | None,
        default_mode: Mode | None = None,
        *,
        check_lossless: bool = False,
        requests_draft: bool = False,
        answers_many: bool = False,
    ) -> EngineChoice:
        """Resolve and check the flags. SpecDecError for flags that do not fit together, or an engine or model that
        cannot be opened.

        `default_mode` None: leader mode if one of its flags is given, orchestrator mode otherwise. `requests_draft`:
        later requests may name drafters of their own. `answers_many`: some requests may come again.
        """
        leader = self.leader.with_config(self.speculation)
        mode = leader.mode or default_mode or leader.loop
        profile = self.speculation.find_profile(leader.drafting_flags, leader.model_dir)
        has_leader_flags = default_mode is not None or mode == "leader" or leader.are_given
        leader_flags = None
        if has_leader_flags:
            leader_flags = leader.flags(self.engine_dir, self.speculation, answers_many=answers_many)
        speculation, device_ids = self.speculation.resolve(leader_flags)
        choice = EngineChoice(
            self.engine_dir or Path(USUAL_ENGINE),
            self.tokenizer_dir,
            speculation,
            device_ids,
            mode,
            self.kv_cache.fitting(is_leader=mode == "leader", disable_reuse=leader.disable_kv_cache_reuse),
            max_num_tokens,
            params,
            leader.models,
            profile,
        )
        checked = choice.checked(check_lossless=check_lossless)
        if leader.engines.copy is not None and not checked.speculation.needs_copy and not requests_draft:
            warn(
                f"`--self-draft {leader.engines.copy}` makes a copy that no drafter drafts with; "
                f"`{algorithm_flag(SelfDrafter)}` does"
            )
        return checked


def _tell_slip(word: str, others: list[str]) -> None:
    """UsageError if the first of several prompts is nearly a model's name; a note if it is the only prompt."""
    if (near := near_model(word)) is None:
        return
    if others:
        raise UsageError(
            f"no model has this name: {word}",
            hint=f"perhaps `{near}`; if it is a prompt, `--input-text {word}` gives it",
        )
    note(f"`{word}` is taken as a prompt, because no model has this name; perhaps `{near}` was meant")


def check_needed_drafter(speculation: Speculation, *, check_lossless: bool, has_copy: bool = False) -> None:
    """UsageError for flags that need a drafter, if there is none."""
    if speculation:
        return
    if speculation.draft_len_mode == "auto":
        raise needs_drafter()
    if check_lossless:
        raise UsageError(
            "`--check-lossless` compares a drafter with none, and there is no drafter",
            hint=f"`{algorithm_flag(SelfDrafter)}` drafts with the copy"
            if has_copy
            else f"`{example_of(NgramDrafter)}` is one",
        )
