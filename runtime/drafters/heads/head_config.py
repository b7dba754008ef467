"""Configs of trained drafters (heads): recognised, read and checked without torch.

EAGLE-3 heads are published with two kinds of configs and weight names: those of SafeAILab, SpecForge and NVIDIA, and
those of `speculators`. Configs say in three ways which hidden states of the target the head reads (`_eagle3_states`).
MTP heads, which predict the token after the next, are in the directory of the model itself.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runtime.checkpoint.config import DraftOutput, IntFormat
from runtime.checkpoint.resolve import read_model_config, resolve_head, resolve_model, shipped_head, weight_files
from runtime.drafters.heads.mtp_families import (
    ASSISTANTS,
    BLOCK_LAYERS,
    EAGLE_LAYERS,
    TARGETS_OF_ASSISTANTS,
    mtp_family,
)
from runtime.util.errors import SpecDecError, UsageError
from runtime.util.files import check_regular, read_json
from runtime.util.reading import raise_unreadable, shown

_MOST_LAYERS, _LARGEST_SIZE = 1000, 2**40
OF_TWO_HEADS = "config.json and weights belong to two heads; download the head again"
HeadKind = Literal["eagle3", "mtp", "assistant", "dflash"]
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_SHARE_PARTS = ("mtp_num_hidden_layers", "mtp_layers_block_type")
"""Keys of configs whose heads have a single projection and a single norm, whatever their number of layers."""
_BLOCKS = {"DFlashDraftModel": "dflash", "Qwen3DSparkModel": "dspark", "DSparkDraftModel": "dspark"}
"""Classes of heads that draft blocks, for configs that name no `speculators_model_type`."""
_MASKS = ("mask_token_id", "pard_token", "ptd_token_id", "dspark_noise_token_id")
_OTHERS = {
    "dflash2": "DFlash 2",
    "dflare": "DFlare",
    "eagle": "EAGLE-1",
    "mlp": "an MLP speculator",
    "mtp": "a multi-token prediction head in a file of its own",
}


@dataclass(frozen=True)
class BlockConfig:
    """Config of a head that drafts several tokens in one pass: the sequence's last token, then mask tokens."""

    size: int | None
    """Slots that the head was trained for, the last token's included; None if its config does not say (P-EAGLE)."""
    mask_token_id: int
    starts_at_anchor: bool
    """True if the last token's slot drafts the next token, and False if the first mask does."""
    markov: Literal["none", "vanilla", "gated"] = "none"
    """Kind of the term that the token before adds to a slot's logits (DSpark)."""
    markov_rank: int = 0
    confidence: Literal["none", "hidden", "markov"] = "none"
    """Inputs of the prediction that a slot's token is accepted, if the head makes it (DSpark)."""

    @property
    def is_cut(self) -> bool:
        """True if a draft of fewer tokens is computed as a shorter block. Blocks with a `markov` term always have their
        trained length: shorter blocks give garbled output (vLLM's `SpeculativeConfig`).
        """
        return self.markov == "none"

    def num_drafts(self, num_slots: int) -> int:
        """Draft tokens of a block: as many as its slots, or one fewer if the first slot is a known token."""
        return num_slots - (not self.starts_at_anchor)


@dataclass(frozen=True)
class HeadConfig:
    """Config of a head. Hidden states have the numbers of transformers and of `BuildConfig.hidden_states`."""

    directory: Path
    kind: HeadKind
    layers: dict[str, Any]
    """transformers' config of the head's layers."""
    hidden_size: int
    target_hidden_size: int
    num_layers: int
    vocab_size: int
    """Size of the target's vocabulary."""
    draft_vocab_size: int
    hidden_states: tuple[int, ...] | None
    """Numbers of the hidden states that it reads; None if they depend on the number of the target's layers."""
    flags: frozenset[str] = frozenset()
    """Flags of `_FLAGS` that are on. An assistant may have `centroids`, by which it chooses ids, and a block head
    `target_output`, if it uses the target's output layer.
    """
    logit_scale: float = 1.0
    max_draft_len: int | None = None
    """Number of tokens that its config proposes to draft; None if it proposes none."""
    block: BlockConfig | None = None
    num_target_layers: int | None = None
    """Number of the target's layers, if the head's config states it."""

    @property
    def weight_files(self) -> list[Path]:
        """The safetensors files of the head's directory."""
        return weight_files(self.directory)

    @property
    def reads_target_output(self) -> bool:
        """True if the head has no output layer and uses the target's."""
        return "target_output" in self.flags

    @property
    def is_chain(self) -> bool:
        """True for several MTP layers in a row, each of which drafts one token."""
        return self.kind == "mtp" and self.num_layers > 1

    @property
    def drafts_all_ids(self) -> bool:
        """True if the head has no draft vocabulary of its own."""
        return self.draft_vocab_size == self.vocab_size

    def hidden_states_of(self, num_layers: int) -> tuple[int, ...]:
        """Hidden states that the head reads from a target of this size; SpecDecError if the target lacks a layer."""
        if self.kind not in ("eagle3", "dflash"):
            return (num_layers,)
        wanted = (2, num_layers // 2, num_layers - 3) if self.hidden_states is None else self.hidden_states
        end = num_layers + (self.kind == "dflash")  # what leaves the last one, behind the target's norm
        if any(not 0 <= one < end for one in wanted) or self.num_target_layers not in (None, num_layers):
            raise SpecDecError(
                "the head reads the inputs of layers "
                f"{', '.join(map(str, wanted))}"
                f"{'' if self.num_target_layers is None else f' of {self.num_target_layers}'}, and the target has "
                f"{num_layers} layers: {self.directory}",
                hint="it was trained for another target",
            )
        return wanted

    def check_target(self, config: dict[str, Any], vocab_size: int | None) -> None:
        """SpecDecError if the head was trained for another target than this `pretrained_config`."""
        if self.kind == "assistant" and not str(config.get("model_type")).startswith(TARGETS_OF_ASSISTANTS):
            raise SpecDecError(
                f"an assistant reads keys and values of a Gemma 4, and the target is of the type "
                f"{shown(config.get('model_type'))}: {self.directory}",
                hint="it was trained for another target",
            )
        hidden_size = language_model(config).get("hidden_size")
        sizes = ("hidden size", self.target_hidden_size, hidden_size), ("vocabulary", self.vocab_size, vocab_size)
        for what, own, its in sizes:
            if own != its:
                raise SpecDecError(
                    f"the head was trained for a target with a {what} of {own}, and this target has {its}: "
                    f"{self.directory}",
                    hint="take the head of this model",
                )
        self.hidden_states_of(num_layers_of(config))


@dataclass(frozen=True)
class DraftOutputSettings:
    """Requested ids and number formats for a trained head and a self-draft copy; None for the model's own."""

    vocab: str | None = None
    """Ids that may be drafted: `auto`, or a file of ids, traces or a corpus."""
    vocab_size: int | None = None
    """Number of ids that may be drafted."""
    qformat: IntFormat | None = None
    """Quantization of the output layer."""
    layers: IntFormat | None = None
    """Quantization of the head's other linear layers."""

    @property
    def is_quantized(self) -> bool:
        return self.output(()).is_quantized

    def output(self, ids: Seq[int]) -> DraftOutput:
        """The settings as a `DraftOutput` with these chosen ids; empty `ids` stands for all."""
        return DraftOutput(self.qformat, len(ids) or None, self.layers)

    def check(self, heads: "Seq[HeadConfig]", *, has_copy: bool) -> None:
        """UsageError if no drafter can use these settings; SpecDecError for a vocabulary's file that cannot be read."""
        for name, value in (("draft_vocab", self.vocab), ("draft_output_layer", self.qformat)):
            if value is not None and not heads and not has_copy:
                raise UsageError(
                    f"{name} needs a trained head or a self-draft copy: {value}",
                    hint='name a head by `head`, or have a copy made by `self_draft="int4"`',
                    code="no_layer_that_drafts",
                    name=name,
                )
        if self.layers is not None and not heads:
            raise UsageError(
                f"draft_layers needs a trained head: {self.layers}",
                hint="name a head",
                code="no_head_of_layers",
                name="draft_layers",
                value=self.layers,
            )
        if self.vocab_size is not None and self.vocab is None:
            raise UsageError(
                f"draft_vocab_size needs a draft vocabulary: {self.vocab_size}",
                hint='give a vocabulary too, such as `draft_vocab="auto"`',
                code="size_of_no_vocab",
                name="draft_vocab_size",
            )
        if (self.vocab or self.qformat) is not None and any("centroids" in one.flags for one in heads) and not has_copy:
            raise UsageError(
                "the assistant already computes few of its ids, and cannot have another output layer: "
                f"{self.vocab or self.qformat}",
                hint="leave the output layer as it is",
            )
        if self.vocab is None:
            return
        own = next((head for head in heads if not head.drafts_all_ids), None)
        if own is not None and not has_copy:
            raise UsageError(
                f"the head has its own draft vocabulary, of {own.draft_vocab_size:,} ids, and takes no other: "
                f"{self.vocab}",
                hint="leave the draft vocabulary out",
            )
        if self.vocab != "auto":
            check_regular(Path(self.vocab))
            try:
                with Path(self.vocab).open("rb"):
                    pass
            except OSError as error:
                raise_unreadable(Path(self.vocab), error)


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """Config of a target's language model, which a multimodal model nests in its config."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def num_layers_of(config: dict[str, Any]) -> int:
    """Number of layers of a target's language model."""
    text = language_model(config)
    found = text.get("num_hidden_layers")
    kinds = next((text[key] for key in ("layers_block_type", "layer_types") if isinstance(text.get(key), list)), ())
    return found if type(found) is int else len(kinds)


PARD_MASK = "pard_token"
"""Key of config.json with the id of the mask token by which a parallel draft model (PARD) drafts."""


def is_parallel_model(model: Path | str) -> bool:
    """True for a draft model, or a draft model's engine, whose config has PARD's mask token."""
    if is_head(model):
        return False
    try:
        return _pard_mask(_config_of_model(model)) is not None
    except SpecDecError:
        return False


def check_is_parallel(model: Path | str) -> None:
    """SpecDecError unless this model, or this engine, has PARD's mask token in its config.json."""
    config = _config_of_model(model)
    vocab_size = language_model(config).get("vocab_size")
    read_pard_mask(config, vocab_size if type(vocab_size) is int else _LARGEST_SIZE, model)


def _config_of_model(model: Path | str) -> dict[str, Any]:
    """The `pretrained_config` of a model, by its name or directory, or of an engine's model."""
    config_file = Path(model).expanduser() / "config.json"
    config = read_json(config_file) if config_file.is_file() else read_model_config(resolve_model(str(model)))
    pretrained: dict[str, Any] = config.get("pretrained_config", config)
    return pretrained


def read_pard_mask(config: dict[str, Any], vocab_size: int, directory: Path | str) -> int:
    """Id of PARD's mask token by a draft model's `pretrained_config`. SpecDecError if the config has no id, or an id
    outside the vocabulary.
    """
    found = _pard_mask(config)
    if found is None:
        raise SpecDecError(
            f"the draft model's config.json has no `{PARD_MASK}`, the mask token that PARD drafts by: {directory}",
            hint="take a model that was adapted for PARD, or adapt this one; as it is it drafts token by token, as "
            "`DRAFT_TARGET`",
            code="no_pard_token",
        )
    if type(found) is not int:
        raise SpecDecError(
            f"`{PARD_MASK}` in the draft model's config.json must be a whole number: {shown(found)}, in {directory}",
            hint="download the draft model again",
        )
    if not 0 <= found < vocab_size:
        raise SpecDecError(
            f"`{PARD_MASK}` is outside the draft model's vocabulary of {vocab_size}: {shown(found)}, in {directory}",
            hint="download the draft model again",
        )
    return found


def _pard_mask(config: dict[str, Any]) -> Any:
    return config.get(PARD_MASK, language_model(config).get(PARD_MASK))


def is_head(directory: Path | str) -> bool:
    """True for a directory with the config of a trained drafter alone, also of an unsupported kind."""
    return kind_of_head(directory) is not None


def kind_of_head(directory: Path | str) -> HeadKind | None:
    """Kind of the head in a directory of its own; None for a model, and for a directory without a config. An
    unsupported kind is `eagle3`, and `read_head` says what it is.
    """
    shipped = shipped_head(str(directory))
    config_file = (shipped or Path(directory).expanduser()) / "config.json"
    try:
        return _kind_of(read_json(config_file)) if config_file.is_file() else None
    except SpecDecError:
        return None


def has_mtp_head(model: Path | str) -> bool:
    """True for a model whose config has an MTP head that can draft, and whose files have this head's weights."""
    try:
        directory = resolve_model(str(model))
        config = read_model_config(directory)
        if not _num_mtp_layers(config):
            return False
        layer = f".layers.{num_layers_of(config)}."
        _read_mtp(config, _num_mtp_layers(config), directory, str(directory))
        return any(n.startswith(("mtp.", "model.mtp_", "model.mtp.")) or layer in n for n in _names_in(directory))
    except SpecDecError:
        return False


def _names_in(directory: Path) -> Iterable[str]:
    """Names of a model's weights; none if the file cannot be read."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not single.is_file():
        names: dict[str, str] = read_json(index).get("weight_map") or {}
        return names
    from safetensors import SafetensorError

    from runtime.util.tensor_file import read_header

    check_regular(single)
    try:
        with single.open("rb") as file:
            return read_header(file).tensors
    except (OSError, SafetensorError):
        return ()


def _kind_of(config: dict[str, Any]) -> HeadKind | None:
    """`kind_of_head`, by a head's config."""
    if config.get("model_type") in ASSISTANTS:
        return "assistant"
    if _kind_of_block(config) is not None:
        return "dflash"
    is_assistant = str(config.get("model_type")).endswith("_assistant")
    is_named = any(key in config for key in ("speculators_model_type", "draft_vocab_size", "dflash_config"))
    names = config.get("architectures")
    names_eagle3 = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    return "eagle3" if is_assistant or is_named or names_eagle3 else None


def _kind_of_block(config: dict[str, Any]) -> str | None:
    """`dflash` or `dspark` for heads of these kinds, else None."""
    if (kind := config.get("speculators_model_type")) is not None:
        return kind if kind in _BLOCKS.values() else None
    names = config.get("architectures")
    found = next((kind for name, kind in _BLOCKS.items() if isinstance(names, list) and name in names), None)
    return found or ("dflash" if "dflash_config" in config else None)


def read_head(head: Path | str) -> HeadConfig:
    """Config of a head, from its directory or from a model that contains it; SpecDecError if it cannot draft."""
    directory = resolve_head(str(head))
    if directory.is_file():
        raise SpecDecError(
            f"this file is not a trained drafter: {directory}",
            hint="name a directory; GGUF files leave the head out, the original model has it",
        )
    where = directory / "config.json"
    config = read_json(where)
    kind = _kind_of(config)
    if kind is None and (num_mtp_layers := _num_mtp_layers(config)):
        return _read_mtp(config, num_mtp_layers, directory, str(where))
    if kind is None:
        raise SpecDecError(
            f"config.json does not describe a trained drafter: {directory}",
            hint="an EAGLE-3 head's has `draft_vocab_size`, or names its class, and a model with an MTP head has "
            "`num_nextn_predict_layers` or `mtp_num_hidden_layers`; a draft model is another drafter",
        )
    read = {"assistant": _read_assistant, "dflash": _read_block}.get(kind, _read_eagle3)
    return read(config, directory, str(where))


def _read_eagle3(config: dict[str, Any], directory: Path, where: str) -> HeadConfig:
    kind = config.get("speculators_model_type", "eagle3")
    if str(config.get("model_type")).endswith("_assistant"):
        kind = config["model_type"]
    if kind not in ("eagle3", "peagle"):
        raise SpecDecError(
            f"a head of this kind is not supported, {_OTHERS.get(str(kind), shown(kind))}: {directory}",
            hint="EAGLE-3, P-EAGLE, DFlash, DSpark and Gemma 4's assistants are supported",
        )
    own = config.get("eagle_config") or {}
    if not isinstance(own, dict):
        raise _damaged(f"`{where}: eagle_config` is not a JSON object: {shown(own)}")
    if own.get("use_aux_hidden_state") is False:
        raise SpecDecError(
            f"an EAGLE-3 head that reads the last hidden state only is not supported: {directory}",
            hint="take a head that reads three layers of the target",
        )
    layers = config.get("transformer_layer_config", config)
    if not isinstance(layers, dict):
        raise SpecDecError(f"`{where}: transformer_layer_config` is not a JSON object: {shown(layers)}")
    common = _common_fields(config, {"model_type": EAGLE_LAYERS} | layers, where)
    return HeadConfig(
        directory.expanduser(),
        "eagle3",
        num_layers=_size(layers, "num_hidden_layers", where, 1),
        hidden_states=_eagle3_states(config, own, where),
        flags=frozenset(name for name in _FLAGS if (config.get(name) or own.get(name)) is True),
        logit_scale=_scale(config, where),
        block=_parallel_block(config, common["vocab_size"], where),
        **common,
    )


def _common_fields(config: dict[str, Any], layers: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields that EAGLE-3 and DFlash heads have in the same keys; `layers` is the config of the head's layers."""
    hidden_size, vocab_size = (_size(layers, key, where) for key in ("hidden_size", "vocab_size"))
    return {
        "layers": layers,
        "hidden_size": hidden_size,
        "target_hidden_size": _size(config, "target_hidden_size", where, hidden_size),
        "vocab_size": vocab_size,
        "draft_vocab_size": _size(config, "draft_vocab_size", where, vocab_size),
        "max_draft_len": _proposed_len(config),
    }


def _parallel_block(config: dict[str, Any], vocab_size: int, where: str) -> BlockConfig | None:
    """Block with P-EAGLE's mask token, by which an EAGLE-3 head drafts all tokens in one pass; None for other heads."""
    is_parallel = config.get("speculators_model_type") == "peagle" or config.get("parallel_drafting") is True
    if not is_parallel and not any(key in config for key in ("pard_token", "ptd_token_id")):
        return None
    return BlockConfig(None, _mask_token(config, {}, vocab_size, where), starts_at_anchor=True)


def _read_block(config: dict[str, Any], directory: Path, where: str) -> HeadConfig:
    own = config.get("dflash_config") or {}
    layers = config.get("transformer_layer_config", config)
    if not isinstance(own, dict) or not isinstance(layers, dict):
        raise _damaged(f"`{where}` is not the config of a DFlash head")
    layers = {"model_type": BLOCK_LAYERS} | layers
    _refuse_other_blocks(config, own, layers, where)
    common = _common_fields(config, layers, where)
    has_output = any(name.removeprefix("model.") == "lm_head.weight" for name in _names_in(directory))
    return HeadConfig(
        directory.expanduser(),
        "dflash",
        num_layers=_size(layers, "num_hidden_layers", where),
        hidden_states=_block_states(config, own, where),
        flags=frozenset() if has_output else frozenset({"target_output"}),
        block=_block_of(config, own, common["vocab_size"], where),
        num_target_layers=config.get("num_target_layers"),
        **common,
    )


def _block_of(config: dict[str, Any], own: dict[str, Any], vocab_size: int, where: str) -> BlockConfig:
    sizes = own if "block_size" in own else config
    is_dspark = _kind_of_block(config) == "dspark"
    size = _size(sizes, "block_size", where, 8 if "speculators_model_type" in config else None)
    if size < 2 - is_dspark:
        raise _damaged(f"`{where}: block_size` leaves no slot to draft: {size}")
    anchor = config.get("sample_from_anchor", is_dspark and "speculators_model_type" not in config)
    rank = config.get("markov_rank") or 0
    if type(rank) is not int or rank < 0:
        raise _damaged(f"`{where}: markov_rank` must be a whole number: {shown(rank)}")
    has_confidence = is_dspark and config.get("enable_confidence_head") is True
    reads: Literal["hidden", "markov"] = "markov" if config.get("confidence_head_with_markov") is True else "hidden"
    return BlockConfig(
        size,
        _mask_token(config, own, vocab_size, where),
        anchor is True,
        config.get("markov_head_type", "vanilla") if rank else "none",
        rank,
        reads if has_confidence else "none",
    )


def _refuse_other_blocks(config: dict[str, Any], own: dict[str, Any], layers: dict[str, Any], where: str) -> None:
    """SpecDecError for heads that compute something that DFlash and DSpark heads do not."""
    markov = config.get("markov_head_type", "vanilla")
    refused = {
        "with Domino's correction": config.get("projector_type", "dflash") != "dflash",
        f"with a Markov head of the type {shown(markov)}": markov not in ("vanilla", "gated"),
        "with labels shifted by one": config.get("shift_label") is True,
        "that see both ways in windows": (config.get("sliding_window_non_causal") is True or own.get("causal") is False)
        and "sliding_attention" in (layers.get("layer_types") or ()),
        f"with layers of {shown(layers['model_type'])}": layers["model_type"] not in (BLOCK_LAYERS, EAGLE_LAYERS),
    }
    for what, is_so in refused.items():
        if is_so:
            raise SpecDecError(
                f"DFlash heads {what} are not supported: {where}", hint="take another head of this model"
            )


def _mask_token(config: dict[str, Any], own: dict[str, Any], vocab_size: int, where: str) -> int:
    given = ((key, record[key]) for record in (own, config) for key in _MASKS if record.get(key) is not None)
    key, found = next(given, ("mask_token_id", None))
    found = int(found) if isinstance(found, str) and found.isdigit() else found
    if type(found) is not int:
        raise _damaged(f"`{where}: {key}` must be a whole number: {shown(found)}")
    if not 0 <= found < vocab_size:
        raise _damaged(f"`{where}: {key}` is outside the vocabulary of {vocab_size}: {shown(found)}")
    return found


def _block_states(config: dict[str, Any], own: dict[str, Any], where: str) -> tuple[int, ...]:
    """Hidden states that the head reads. z-lab and DeepSpec number the outputs of layers (-1: the embeddings);
    `speculators` numbers the inputs.
    """
    keys = (own, "target_layer_ids", 1), (config, "target_layer_ids", 1), (config, "aux_hidden_state_layer_ids", 0)
    return _state_ids(*next((one for one in keys if one[0].get(one[1]) is not None), keys[0]), where)


def _state_ids(record: dict[str, Any], key: str, after: int, where: str) -> tuple[int, ...]:
    """Numbers of hidden states from a list of layers: the inputs of these layers (`after` 0), or their outputs (`after`
    1). Layer 5's input is hidden state 5, its output 6.
    """
    ids = record.get(key)
    if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
        raise _damaged(f"`{where}: {key}` is not a list of layers: {shown(ids)}")
    return tuple(one + after for one in ids)


def _read_assistant(config: dict[str, Any], directory: Path, where: str) -> HeadConfig:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise _damaged(f"`{where}: text_config` is not a JSON object: {shown(text)}")
    vocab_size = _size(text, "vocab_size", where, 262144)
    flags = frozenset({"centroids"} if config.get("use_ordered_embeddings") is True else ())
    if flags:
        num_centroids = _size(config, "num_centroids", where, 2048)
        num_chosen = _size(config, "centroid_intermediate_top_k", where, 32)
        if vocab_size % num_centroids or num_chosen > num_centroids:
            raise SpecDecError(
                f"`{where}` has {num_centroids} centroids for {vocab_size} ids, and takes {num_chosen} of these "
                "centroids",
                hint="download the head again",
            )
    return HeadConfig(
        directory.expanduser(),
        "assistant",
        config,
        _size(text, "hidden_size", where),
        _size(config, "backbone_hidden_size", where, ASSISTANTS[config["model_type"]]),
        _size(text, "num_hidden_layers", where),
        vocab_size,
        vocab_size,
        hidden_states=None,
        flags=flags,
    )


def _num_mtp_layers(config: dict[str, Any]) -> int:
    """Number of MTP layers behind the model's own layers; 0 if there are none."""
    for record in (config, config.get("text_config")):
        for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
            if isinstance(record, dict) and type(record.get(key)) is int:
                return _size(record, key, "config.json") if record[key] > 0 else 0
    return int(mtp_family(config.get("model_type")).is_unsaid)


def _read_mtp(config: dict[str, Any], num_layers: int, directory: Path, where: str) -> HeadConfig:
    inner = config.get("text_config")
    layers = inner if isinstance(inner, dict) else config
    if num_layers > 1 and any(key in record for record in (config, layers) for key in _SHARE_PARTS):
        raise SpecDecError(
            f"an MTP head with one projection for its {num_layers} layers is not supported: {directory}",
            hint="take a model whose MTP head has one layer, or one projection a layer",
        )
    hidden_size, vocab_size = (_size(layers, key, where) for key in ("hidden_size", "vocab_size"))
    sizes = hidden_size, hidden_size, num_layers, vocab_size, vocab_size
    return HeadConfig(directory, "mtp", layers, *sizes, hidden_states=None)


def _eagle3_states(config: dict[str, Any], own: dict[str, Any], where: str) -> tuple[int, ...] | None:
    """Hidden states that an EAGLE-3 head reads. `speculators` numbers the inputs of layers, as transformers'
    `hidden_states`; SpecForge and NVIDIA number the outputs.

    None for SafeAILab's configs, which do not state them: these heads read the inputs of layers 2, L // 2 and L - 3.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    for record, after in ((config, 0), (own, 1)):
        if record.get(key) is not None:
            return _state_ids(record, key, after, where)
    return None


def _damaged(problem: str) -> SpecDecError:
    return SpecDecError(problem, hint="download the head again")


def _size(config: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise _damaged(f"`{where}: {key}` must be a whole number of at least 1: {shown(value)}")
    if value > (most := _MOST_LAYERS if key.endswith("layers") else _LARGEST_SIZE):
        raise _damaged(f"`{where}: {key}` must be at most {most}: {shown(value)}")
    return value


def _scale(config: dict[str, Any], where: str) -> float:
    value = config.get("logit_scale")
    if value is None:
        return 1.0
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _damaged(f"`{where}: logit_scale` must be a number: {shown(value)}")
    return float(value)


def _proposed_len(config: dict[str, Any]) -> int | None:
    """Draft length of a `speculators` config's first proposal; None if there is no proposal."""
    try:
        length = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        return None
    return length if type(length) is int and length >= 1 else None


def states_of_heads(heads: Seq[HeadConfig], pretrained_config: dict[str, Any]) -> tuple[int, ...]:
    """The hidden states that a target's step must return for these heads. SpecDecError if two heads read different
    hidden states, or if the target lacks a layer.
    """
    wanted = {head.hidden_states_of(num_layers_of(pretrained_config)) for head in heads}
    if len(wanted) > 1:
        raise SpecDecError(f"heads read different hidden states of one target: {sorted(wanted)}", hint="give one head")
    return wanted.pop() if wanted else ()


def hidden_states_for(heads: Seq[HeadConfig], model: str) -> tuple[int, ...]:
    """The hidden states that these trained drafters read from a model. SpecDecError if config.json shows that a drafter
    was trained for another model.
    """
    if not heads:
        return ()
    config = read_model_config(resolve_model(model))
    text = language_model(config)
    if "hidden_size" in text and "vocab_size" in text:  # other configs are checked by the engine's (`open_head`)
        for head in heads:
            head.check_target(config, text["vocab_size"])
    return states_of_heads(heads, config)


def check_weights(
    config: HeadConfig,
    wanted: Mapping[str, Seq[int]],
    found: Mapping[str, Seq[int]],
    name_in_file: Callable[[str], str] = str,
) -> None:
    """SpecDecError unless `found` has the `wanted` weights, by name and shape, and no further layers."""
    if missing := sorted(wanted.keys() - found.keys()):
        raise lacks_weights(config, [name_in_file(name) for name in missing])
    layers = sorted(name for name in found.keys() - wanted.keys() if name.startswith("layers."))
    if layers:
        raise SpecDecError(
            f"the head has {len(layers)} weights that its config does not mention, such as "
            f"{name_in_file(layers[0])}: {config.directory}",
            hint=OF_TWO_HEADS,
        )
    for name, shape in wanted.items():
        if shape != found[name]:
            raise SpecDecError(
                f"the head's {name_in_file(name)} is {list(found[name])}, and should be {list(shape)} by its config: "
                f"{config.directory}",
                hint=OF_TWO_HEADS,
            )


def lacks_weights(config: HeadConfig, names: Seq[str]) -> SpecDecError:
    """The error for a head without these weights, under the names that its files would use."""
    return SpecDecError(
        f"the head lacks {len(names)} of its weights, such as {names[0]}: {config.directory}", hint=OF_TWO_HEADS
    )
