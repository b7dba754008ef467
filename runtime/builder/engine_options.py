"""Options of a model's engine, each described once. Imports no torch.

Arguments of `LLM` and their checks, the settings of a cached engine, the flags of `convert`, `build` and the commands
that take a model, the flags' other names, and the table in docs/python.md are made from these descriptions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, cast, get_args, get_origin, get_type_hints

from runtime.checkpoint.config import (
    MAX_BATCH_SIZE,
    MAX_DRAFT_LEN,
    USUAL_MAX_BATCH_SIZE,
    USUAL_MAX_DRAFT_LEN,
    USUAL_TOKENS_PER_BLOCK,
    Activations,
    Between,
    BuildConfig,
    Compiler,
    Dtype,
    IntFormat,
    KVCacheDtype,
    QuantConfig,
    QuantFormat,
    SelfDraft,
    Size,
)
from runtime.drafters.heads.head_config import DraftOutputSettings
from runtime.util.words import word_among

FlagGroup = Literal["model", "convert", "build", "drafts"]
"""Commands that have a flag: `model` stands for all commands that take a model, such as `run`. `drafts` is the group of
flags for the layers that draft, in commands that take a model and in `build`."""


@dataclass(frozen=True)
class EngineOption:
    """Description of an option, whose type stands in `EngineOptions`."""

    help: str
    default: Any = None
    shown: str | None = None
    """Default in words, if the help should not show the value itself."""
    flags: tuple[FlagGroup, ...] = ()
    """Groups of flags that the option's flag belongs to; empty if it has no flag."""
    aliases: tuple[str, ...] = ()
    """Other programs' names for the flag: `qformat` is TensorRT-LLM's for `quantization`."""
    metavar: str | None = None
    """Placeholder of the value in help; None for `NAME` or a number's usual one."""
    spellings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Other words for values, in flags: TensorRT-LLM's and vLLM's."""
    takes_none: bool = False
    """True if the flag has the value `none` for None."""
    hint: str | None = None
    """Remedy for a value that is not allowed."""
    stands_for: str | None = None
    """Our name for the option, if this is vLLM's name."""

    @property
    def shown_default(self) -> str:
        return self.shown if self.shown is not None else str(self.default)


class EngineOptions(TypedDict, total=False):
    """Options of a model's engine; options that are left out have their defaults."""

    dtype: Annotated[
        Literal["auto", Dtype],
        EngineOption("Dtype of the weights: float32, float16, bfloat16, or auto, the model's own.", "auto",
                     flags=("model", "convert")),
    ]  # fmt: skip
    quantization: Annotated[
        QuantFormat | None,
        EngineOption(
            "Quantize the weights: int8, int4 or fp8.", shown="none", flags=("model", "convert"), aliases=("qformat",),
            metavar="FORMAT", takes_none=True,
            spellings={"full_prec": None, "int8_wo": "int8", "int4_wo": "int4"},
            hint="leave it out for a model that is quantized already, such as AWQ, GPTQ or GGUF: its files say how",
        ),
    ]  # fmt: skip
    activations: Annotated[
        Activations | None,
        EngineOption("Number format in which quantized layers read their inputs: float, int8 or int16.",
                     shown="int8 for weights in int4, int16 for int8, float for fp8",
                     flags=("model", "convert")),
    ]  # fmt: skip
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        EngineOption(
            "Number format of keys and values: int8, fp8, or auto, the weights' dtype.", "auto",
            flags=("model", "convert"), spellings={"fp8_e4m3": "fp8"},
            hint="int8 and fp8 take half the memory of bfloat16",
        ),
    ]  # fmt: skip
    max_batch_size: Annotated[
        int,
        Between(1, MAX_BATCH_SIZE),
        EngineOption("Most requests in one step.", USUAL_MAX_BATCH_SIZE, flags=("model", "build"),
                     aliases=("max-num-seqs", "max-running-requests", "parallel")),
    ]  # fmt: skip
    max_seq_len: Annotated[
        Annotated[int, Between(2)] | None,
        EngineOption("Most tokens in a prompt and its output together. Room for a draft is added.",
                     shown="the model's positions, at most 4,096", flags=("model", "build"),
                     aliases=("max-model-len", "context-length", "ctx-size")),
    ]  # fmt: skip
    max_draft_len: Annotated[
        int,
        Between(0, MAX_DRAFT_LEN),
        EngineOption("Most tokens in a draft; 0 builds an engine without drafts.", USUAL_MAX_DRAFT_LEN,
                     flags=("build",)),
    ]  # fmt: skip
    self_draft: Annotated[
        IntFormat | None,
        EngineOption("Add a copy of the linear weights, quantized to int8 or int4, for self-drafting; `none`: no copy.",
                     shown="none; int4 if it is to draft", flags=("model", "build"), takes_none=True),
    ]  # fmt: skip
    head: Annotated[
        str | Path | None,
        EngineOption("Directory of a trained head that will draft, and whose hidden states the steps give.",
                     shown="none; the model's own MTP head"),
    ]  # fmt: skip
    draft_vocab: Annotated[
        str | Path | None,
        EngineOption(
            "Token ids that a self-draft copy or a head may draft: a file of ids, traces or a corpus (their most "
            "frequent ids), or `auto` (the ids that the tokenizer learned first). A head with a vocabulary of its own "
            "keeps it.",
            shown="all", flags=("drafts",), metavar="FILE|auto",
        ),
    ]  # fmt: skip
    draft_vocab_size: Annotated[
        Size | None,
        EngineOption("Number of token ids in the draft vocabulary, such as 32000.", flags=("drafts",),
                     shown="all listed; else a quarter of the vocabulary, up to 32,768"),
    ]  # fmt: skip
    draft_output_layer: Annotated[
        IntFormat | None,
        EngineOption("Number format of the output layer with which a head or a self-draft copy drafts: int8 or int4.",
                     shown="none", flags=("drafts",), takes_none=True),
    ]  # fmt: skip
    draft_layers: Annotated[
        IntFormat | None,
        EngineOption("Number format of a trained head's other linear layers: int8 or int4.",
                     shown="none", flags=("drafts",), takes_none=True),
    ]  # fmt: skip
    compiler: Annotated[
        Compiler | None,
        EngineOption("Compiler: `aot` for CPUs, `torch-compile`, which has all operations, or `none`: run eagerly.",
                     shown="aot; on a GPU none", flags=("model", "build")),
    ]  # fmt: skip
    tensor_parallel_size: Annotated[
        Size, EngineOption("Ranks that the model is split over, each on a device of its own.", 1, aliases=("tp-size",))
    ]
    use_cache: Annotated[bool, EngineOption("False builds a new engine, and discards it.", True)]
    max_num_seqs: Annotated[int, Between(1, MAX_BATCH_SIZE), EngineOption("", stands_for="max_batch_size")]
    max_model_len: Annotated[Annotated[int, Between(2)] | None, EngineOption("", stands_for="max_seq_len")]


def _described() -> dict[str, tuple[Any, EngineOption]]:
    """Type and description of each option. TypeError for an option without a description."""
    found = {}
    for name, hint in get_type_hints(EngineOptions, include_extras=True).items():
        descriptions = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, EngineOption)]
        if len(descriptions) != 1:
            raise TypeError(f"an option of an engine has no EngineOption: {name}")
        found[name] = (hint, descriptions[0])
    return found


_ALL = _described()
OPTIONS = {name: one for name, one in _ALL.items() if one[1].stands_for is None}
"""Our options: (type, description) by name."""
OTHER_NAMES = {name: one.stands_for for name, (_, one) in _ALL.items() if one.stands_for is not None}
"""vLLM's names of options, each with our name."""
FLAG_ALIASES = {alias: name.replace("_", "-") for name, (_, one) in OPTIONS.items() for alias in one.aliases}
"""Other programs' names of flags, each with our name: `qformat` with `quantization`."""


def bounds_of(name: str) -> Between | None:
    """The range of a number option."""
    return _bounds(OPTIONS[name][0])


def _bounds(hint: Any) -> Between | None:
    own = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Between)]
    inner = (found for one in get_args(hint) if (found := _bounds(one)) is not None)
    return own[0] if own else next(inner, None)


def words_of(name: str) -> dict[str, Any]:
    """The words that an option takes, and the value of each: `{"int8": "int8", "int8_wo": "int8", "none": None}`."""
    hint, described = OPTIONS[name]
    words = {word: word for word in literals_of(hint)}
    return words | dict(described.spellings) | ({"none": None} if described.takes_none else {})


def literals_of(hint: Any) -> list[str]:
    """The words of a type: `["int8", "int4"]` for `Literal["int8", "int4"] | None`."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [word for one in get_args(hint) if not isinstance(one, str) for word in literals_of(one)]


def value_of(name: str, value: Any) -> Any:
    """Value of an option's word in any spelling and case: "fp8" for `"FP8_E4M3"`; of anything else the value itself."""
    words = words_of(name)
    word = word_among(value, words) if isinstance(value, str) else None
    return value if word is None else words[word]


def with_defaults(options: EngineOptions) -> EngineOptions:
    """Each option's value or default, except `use_cache` and the options that are read before an engine is made:
    `head`, and the options of `draft_output_of`.
    """
    named = {
        name: options.get(name, described.default)
        for name, (_, described) in OPTIONS.items()
        if "drafts" not in described.flags and name not in ("head", "use_cache")
    }
    return cast(EngineOptions, named)


def precision_of(options: EngineOptions) -> QuantConfig:
    """Number formats of a conversion, with the usual number of inputs that share a scale."""
    return QuantConfig.by_default(
        options.get("quantization"), options.get("kv_cache_dtype", "auto"), options.get("activations")
    )


def build_config_of(
    options: EngineOptions, compiler: Compiler, max_request_len: int, hidden_states: tuple[int, ...]
) -> BuildConfig:
    """Settings of a build for prompts and outputs of `max_request_len` tokens together, to which a draft is added."""
    max_draft_len = options.get("max_draft_len", USUAL_MAX_DRAFT_LEN)
    copy = options.get("self_draft")
    return BuildConfig(
        compiler=compiler,
        max_batch_size=options.get("max_batch_size", USUAL_MAX_BATCH_SIZE),
        max_input_len=max_request_len - 1,
        max_seq_len=max_request_len + max_draft_len,
        max_draft_len=max_draft_len,
        tokens_per_block=USUAL_TOKENS_PER_BLOCK,
        speculative_decoding_mode="draft_tokens_external" if max_draft_len else "none",
        self_draft=None if copy is None else SelfDraft(copy),
        hidden_states=hidden_states,
    )


def draft_output_of(options: EngineOptions) -> DraftOutputSettings:
    """The options for the output layer and the other layers that draft."""
    vocab = options.get("draft_vocab")
    return DraftOutputSettings(
        None if vocab is None else word_among(str(vocab), ("auto",)) or str(vocab),
        options.get("draft_vocab_size"),
        options.get("draft_output_layer"),
        options.get("draft_layers"),
    )
