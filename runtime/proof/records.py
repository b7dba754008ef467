"""Records of proofs: an engine's fingerprint, an answer's receipt, and a check's finding. Imports no torch."""

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

from runtime.checkpoint.config import Compiler, Count, Dtype, Size, as_json
from runtime.core.params import Grammar, SamplingConfig
from runtime.core.stats import FinishReason
from runtime.text.trace_lines import line_digest
from runtime.util.digests import digest
from runtime.util.reading import shown

Relation = Literal["same", "other_machine", "faulty", "other_engine", "other_model"]
"""Relation of another engine to this engine: the same bits; other bits because of another machine, version or build;
other bits although all facts are the same; other weights or another precision; or another model or tokenizer.
"""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Digest of an engine's bits, and the facts that they depend on."""

    logits: str
    """Digest of the logits after fixed tokens; the same for engines that give the same bits."""
    weights: str
    """Digest of the weights as the engine has them."""
    architecture: str
    """Digest of the model's type, its vocabulary and the shapes of its layers."""
    tokenizer: str | None
    """Digest of the tokenizer's vocabulary; null without a tokenizer."""
    vocab_size: Size
    dtype: Dtype
    quantization: str | None
    """Formats of quantized weights, activations, keys and values; null if nothing is quantized."""
    tp_size: Size
    compiler: Compiler
    processor: str
    """Processor or GPU, and the kernels for its instructions."""
    instructions: tuple[str, ...]
    """Sets of instructions that the engine's code may use, by Linux's names."""
    torch: str
    specdec_version: str | None
    batch_invariant: bool
    """True if a token's logits have the same bits whatever else is in its step. Only then is a check exact."""
    num_tokens: Size = 48
    """Number of fixed tokens: 48, or fewer for an engine whose requests are shorter."""

    @property
    def name(self) -> str:
        """Name of the fingerprint, for the field `system_fingerprint` of OpenAI's protocol."""
        return f"fp_{self.logits}"


# Fields that differ between engines of one model, and fields that differ between machines or builds of one engine.
_OF_ENGINE = ("weights", "dtype", "quantization")
_OF_MACHINE = (
    "tp_size", "compiler", "processor", "instructions", "torch", "specdec_version", "batch_invariant", "num_tokens"
)  # fmt: skip
_WORDS = {"vocab_size": "ids", "specdec_version": "specdec", "num_tokens": "fixed tokens"}


def relation_of(theirs: Fingerprint, ours: Fingerprint) -> Relation:
    """Relation of the engine `theirs` to the engine `ours`."""
    if theirs.architecture != ours.architecture or theirs.tokenizer != ours.tokenizer:
        return "other_model"
    if any(getattr(theirs, name) != getattr(ours, name) for name in _OF_ENGINE):
        return "other_engine"
    if theirs.logits == ours.logits:
        return "same"
    return "other_machine" if any(getattr(theirs, name) != getattr(ours, name) for name in _OF_MACHINE) else "faulty"


def differences(theirs: Fingerprint, ours: Fingerprint) -> list[str]:
    """Differences in words, such as `dtype bfloat16, here float32`; empty for engines with the same fingerprint."""
    if theirs.architecture != ours.architecture:
        return [f"another model: {', '.join(_differences(('architecture', 'vocab_size'), theirs, ours))}"]
    found = _differences(("tokenizer", *_OF_ENGINE, *_OF_MACHINE), theirs, ours)
    if theirs.logits != ours.logits:
        found.append(f"bits {in_words(theirs.name)}, here {ours.name}")
    return found


def _differences(names: Seq[str], theirs: Fingerprint, ours: Fingerprint) -> list[str]:
    return [
        f"{_WORDS.get(name, name)} {there}, here {here}"
        for name in names
        for there, here in [_differing(getattr(theirs, name), getattr(ours, name))]
        if there != here
    ]


def _differing(theirs: Any, ours: Any) -> tuple[str, str]:
    """Two values in words; for tuples, the elements that the other does not have."""
    if isinstance(theirs, tuple):
        there, here = (" ".join(sorted({*one} - {*other})) for one, other in ((theirs, ours), (ours, theirs)))
        return f"also {in_words(there)}" if there else "no more", f"also {in_words(here)}" if here else "no more"
    return in_words(theirs), in_words(ours)


def in_words(value: Any) -> str:
    """A fingerprint's value in a sentence: cut and escaped if need be, since anyone may have written the receipt."""
    text = "none" if value is None else str(value)
    return text if text.isprintable() and len(text) <= 100 else shown(text)


FORMAT_VERSION = 1
IdsForm = Literal["ids", "digests"]
"""Form of receipts: with token ids, or with their digests alone, so that the ids must come from elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """An answer, and everything that its tokens follow from."""

    format_version: int = FORMAT_VERSION
    name: str | None = None
    """Name of the request, such as an answer's id; null if it has none."""
    fingerprint: Fingerprint
    prompt_ids: tuple[Count, ...] | None
    """Token ids of the prompt, as it was computed; null if the receipt has only their digest."""
    output_ids: tuple[Count, ...] | None
    """Token ids of the output, an end id included; null if the receipt has only their digest."""
    prompt_digest: str
    output_digest: str
    return_index: Count = 0
    """Index among the prompt's outputs, which makes the noise of each different."""
    max_new_tokens: Size
    end_ids: tuple[Count, ...]
    stop_words: tuple[str, ...]
    grammar: Grammar | None
    """Grammar of the output; null without one."""
    thinking: str | None = None
    """Name of the format in which the model thinks, if there is a budget for it."""
    sampling: SamplingConfig
    drawn: Literal["by_tokens", "by_probabilities"] = "by_tokens"
    """`by_probabilities` if a drafter's own probabilities took part in the draws (rejection sampling)."""
    finish_reason: FinishReason
    digest: str = ""
    """Digest of all other fields, as written."""

    def as_json(self) -> dict[str, Any]:
        """The JSON object of the receipt, with its digest."""
        values = {name: value for name, value in as_json(self).items() if name != "digest"}
        row: dict[str, Any] = json.loads(json.dumps(values))
        return row | {"digest": line_digest(row)}

    @property
    def line(self) -> str:
        return line_of(self.as_json())


def line_of(row: dict[str, Any]) -> str:
    """The JSON line of a receipt's object."""
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"


def ids_digest(tokens: Seq[int]) -> str:
    """Digest of token ids."""
    return digest(map(str, tokens))


Rule = Literal["tokens", "rounding", "likelihood"]
"""Rules of a check: token by token; token by token except for ties that rounding decides; or by probabilities."""
Verdict = Literal["exact", "within_rounding", "likely", "wrong", "unlikely", "not_checked"]
PASSED: frozenset[Verdict] = frozenset({"exact", "within_rounding", "likely"})


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of checking an answer. `place` to `gap` describe the first wrong token; null without one."""

    where: str
    name: str | None = None
    verdict: Verdict
    rule: Rule | None = None
    relation: Relation | None = None
    """Relation of the receipt's engine to this one; null if there is no receipt."""
    num_tokens: int = 0
    place: int | None = None
    """Index in the output of the first token that is not the engine's."""
    token: int | None = None
    """The answer's token at that place; null if the answer has ended there."""
    engine_token: int | None = None
    """The engine's choice at that place; null if it ends the output there, or no token can be chosen."""
    probability: float | None = None
    """Probability that the engine gives to the answer's token."""
    rank: int | None = None
    """Rank of the answer's token: 1 for the token with the largest score; null for a token that cannot be chosen."""
    gap: float | None = None
    """Difference of the logits of the two tokens, with the noise of sampling; null if one cannot be chosen."""
    num_ties: int = 0
    """Number of tokens that differ from the engine's by no more than rounding."""
    agreement: float | None = None
    """Share of the answer's tokens that are the engine's choices, for a check by likelihood."""
    deviations: float | None = None
    """Log-probability of the answer less the expected one, in standard deviations, for a check by likelihood."""
    reason: str | None = None
    """A sentence that says what is wrong."""

    @property
    def passed(self) -> bool:
        return self.verdict in PASSED
