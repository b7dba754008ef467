"""A model's thinking, by its format and its tokenizer, as budgets count it (`runtime.core.thinking_budget`).

Tags are looked for in the text, as the parser of outputs does: a model may write `</think>` in other tokens than the
tokenizer would. If a tag has a special token, only that token counts.
"""

from collections.abc import Sequence as Seq

from runtime.checkpoint.tokenizer import Tokenizer
from runtime.core.thinking_budget import Thinking
from runtime.text.call_formats import ReasoningFormat
from runtime.text.parser import OutputForm, SpecialTokens
from runtime.text.text import encode_text
from runtime.text.token_text import special_token_ids, token_bytes, whole_text

_PROMPT_END = 64
"""Number of a prompt's last tokens in which an opened thought is looked for."""


def prompt_end(tokenizer: Tokenizer, prompt: Seq[int]) -> str:
    """Text of a prompt's last tokens, with special tokens: the prompt may have opened the output's reasoning there."""
    return whole_text(tokenizer, prompt[-_PROMPT_END:], with_special=True)


def thinking_of(form: ReasoningFormat, tokenizer: Tokenizer) -> Thinking:
    """Tags of thinking in this format, in the tokens of this tokenizer."""
    special = SpecialTokens(special_token_ids(tokenizer), (form.open, *form.closes))
    output_form, of_token = OutputForm(None, form, special), token_bytes(tokenizer)

    def piece(token: int) -> str:
        """A character for each byte of a token: a character of a text may be spread over several tokens."""
        if (mark := special.shown.get(token)) is not None:
            return mark
        return (str(tokenizer.decode([token])).encode() if of_token is None else of_token(token)).decode("latin-1")

    def marked(tag: str) -> str:
        marks = {*special.shown.values()}
        return "".join(one if one in marks else one.encode().decode("latin-1") for one in special.marked(tag))

    opening, added = encode_text(tokenizer, form.open), tokenizer.added_tokens_decoder
    again = None
    if opening[0] in added:  # as `<think>`, or gpt-oss's `analysis` after `<|channel|>`
        again = ((), opening[0]) if len(opening) == 1 else ((opening[0],), opening[1])
    return Thinking(
        form.name,
        marked(form.open),
        tuple(map(marked, form.closes)),
        tuple(encode_text(tokenizer, form.end or form.close)),
        again,
        piece,
        lambda prompt: output_form.is_in_reasoning(prompt_end(tokenizer, prompt)),
    )
