"""The tokenizer of a `tekken.json`, Mistral's own form: transformers converts it, and its BOS token is added here."""

from pathlib import Path
from typing import Any

from tokenizers import processors

from runtime.util.errors import SpecDecError

TEKKEN = "tekken.json"
_OTHERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def is_tekken_alone(directory: Path) -> bool:
    """True for a directory with a `tekken.json` and no other form of a tokenizer."""
    return (directory / TEKKEN).is_file() and not any((directory / name).is_file() for name in _OTHERS)


def make_tekken_tokenizer(directory: Path, chat_template: Any = None) -> Any:
    """transformers' tokenizer for the directory's `tekken.json`, with its BOS token before every text, as in Mistral's
    own library. SpecDecError if the file is invalid.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.mistral import MistralConverter

    path = directory / TEKKEN
    try:
        backend: Any = MistralConverter(str(path)).converted()
        bos = backend.token_to_id(_SPECIAL["bos_token"])
        around = [(_SPECIAL["bos_token"], bos)]
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=around)
    except Exception as error:  # a damaged file fails in json, base64 or the tokenizers package
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SpecDecError(
            f"the tokenizer is a {TEKKEN} that cannot be read ({reason}): {path}",
            hint="name a directory with the model's tokenizer.json, or give token ids",
            code="bad_tokenizer",
            reason=reason,
        ) from None
    special = {name: token for name, token in _SPECIAL.items() if backend.token_to_id(token) is not None}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template, **special)  # type: ignore[no-untyped-call]
