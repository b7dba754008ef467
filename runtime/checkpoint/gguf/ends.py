"""The tokens that end an answer of a GGUF file's model, by llama.cpp's rules (`src/llama-vocab.cpp`).

A file names one end token, or a few. llama.cpp knows further end tokens by their texts, and so does this module. One
rule is ours: a `</s>` that is plain text in the file (Qwen's, Gemma's) is an HTML tag and does not end an answer.
"""

from collections.abc import Mapping
from typing import Any

from runtime.checkpoint.gguf.reader import TOKENIZER, damaged

NORMAL, USER_DEFINED = 1, 4  # of `tokenizer.ggml.token_type`
ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
})  # fmt: skip
"""Texts of tokens that end an answer in every vocabulary, with the exceptions in `end_ids_of`."""
_CODE_ENDS = {  # key of the metadata -> texts, where the file does not have the key
    "fim_pad_token_id": frozenset({"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"}),
    "fim_rep_token_id": frozenset({"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"}),
    "fim_sep_token_id": frozenset({"<|file_sep|>"}),
}
"""Tokens after which a completion of code is over: padding, another repository, another file."""
_CODE_MARKS = frozenset({
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
    "<|prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
    "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>",
    "▁<MID>", "<|code_middle|>", "<|middle|>",
})  # fmt: skip
MARKS = ENDS.union(_CODE_MARKS, *_CODE_ENDS.values())
"""Texts of tokens that are found in a text before it is split, whatever types the file gives the tokens."""


def end_ids_of(metadata: Mapping[str, Any]) -> list[int]:
    """The ids that end an answer: ids that the file names, and ids of tokens known by their texts. SpecDecError for a
    value of another type.
    """
    tokens, types = _list(metadata, "tokens"), _list(metadata, "token_type")
    named = {i for name in ("eos", "eot", "eom") if (i := token_id(metadata, f"{name}_token_id")) is not None}
    texts = set(ENDS)
    for key, of_key in _CODE_ENDS.items():
        if (i := token_id(metadata, key)) is not None and 0 <= i < len(tokens):
            named.add(i)
        else:
            texts |= of_key
    ends = named | {i for i, token in enumerate(tokens) if token in texts and not _is_html(token, types[i : i + 1])}
    found = {tokens[i] for i in ends if 0 <= i < len(tokens)}
    return sorted(i for i in ends if not 0 <= i < len(tokens) or not _goes_on_after(tokens[i], found))


def _list(metadata: Mapping[str, Any], name: str) -> list[Any]:
    found = metadata.get(f"{TOKENIZER}{name}", [])
    if not isinstance(found, list):
        raise damaged(f"`{TOKENIZER}{name}` has a value that is not a list: {found!r:.60}")
    return found


def _is_html(token: str, token_type: list[int]) -> bool:
    """True for a `</s>` that is plain text: Qwen's vocabulary has it among its words, Gemma's among its HTML tags."""
    return token == "</s>" and token_type in ([NORMAL], [USER_DEFINED])


def _goes_on_after(token: str, ends: set[str]) -> bool:
    """True for a token that ends only a part of an answer, in a vocabulary that also has these end tokens.

    gpt-oss ends its analysis with `<|end|>`, and its answer with `<|return|>` or `<|call|>`; Solar's `<|flush|>` and
    `<|calls|>` do the same. Gemma 4, which stops at `<|tool_response>`, has `</s>` as HTML.
    """
    if token == "<|end|>":
        return bool(ends & {"<|call|>", "<|calls|>"} and ends & {"<|return|>", "<|flush|>"})
    return token == "</s>" and "<|tool_response>" in ends


def token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """The id under `tokenizer.ggml.<name>`, or None; SpecDecError if it is not a number."""
    token = metadata.get(f"{TOKENIZER}{name}")
    if token is not None and (not isinstance(token, int) or isinstance(token, bool)):
        raise damaged(f"`{TOKENIZER}{name}` has a value that is not a number: {token!r}")
    return token
